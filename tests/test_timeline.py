"""A run over time in bounded memory, and the page's model of it: no peak is lost, and what is long is thinned."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.timeline import Curve, Held, Stretch, Timeline, divided, thinned
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap, LiveBuffer
from jaxmem_callbacks.records.page import clean
from jaxmem_callbacks.records.peaks import BY_TOTALS
from jaxmem_callbacks.records.runs import AcrossFigure, AcrossProcesses
from jaxmem_callbacks.writers.report import story_model
from tests.rich_runs import census, heap_at, write_rich_run

MIB = 2**20
values = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e15)), min_size=1, max_size=300)


@given(values, st.integers(1, 50))
def test_thinned_stretches_keep_the_lowest_and_the_highest(pairs, most):
    stretches = [Stretch(number, float(number), value, value) for number, (_, value) in enumerate(pairs)]
    kept = thinned(stretches, most)
    assert len(kept) <= most
    assert max(kept, key=lambda each: each.high).high == max(value for _, value in pairs)
    assert min(each.low for each in kept) == min(value for _, value in pairs)
    assert [each.step for each in kept] == sorted(each.step for each in kept)
    assert all(stretches[each.step].high == each.high for each in kept), "each stands where its highest value was"


def test_a_curve_of_any_length_has_so_many_stretches():
    curve = Curve(figure="in_use_bytes", device="gpu:0")
    for step in range(50_000):
        curve.add(Stretch(step, float(step), step % 977, step % 977))
    assert 1000 <= len(curve.stretches) <= 2000
    assert max(each.high for each in curve.stretches) == 976


def test_figures_over_processes_are_curves_under_the_names_that_the_page_draws():
    names = ("in_use_bytes", "live_arrays_bytes", "host_bytes", "peak_since_start_bytes")
    each = AcrossFigure(low=1, low_process=0, mean=2, high=3, high_process=1, highs={"0": 1, "1": 3})
    timeline = Timeline()
    timeline.learn(AcrossProcesses(step=4, time_s=1.0, processes=2, figures=dict.fromkeys(names, each)))
    drawn = {"in_use_bytes", "live_array_bytes", "resident_bytes", "peak_bytes_since_start"}
    assert {curve.figure for curve in timeline.curves} == drawn
    of_all, of_one = (
        [curve for curve in timeline.curves if curve.device == name] for name in ("all processes", "process 1")
    )
    assert all(curve.stretches[-1][2:] == (1, 3) for curve in of_all)
    assert all(curve.stretches[-1][2:] == (3, 3) for curve in of_one)
    assert len(of_all) + len(of_one) == len(timeline.curves) == 8, "the devices of process 0 have curves of their own"


def test_a_census_of_changes_holds_all_arrays():
    """A line has only what differs from the one before; an array that is gone is gone."""
    timeline = Timeline()
    whole, later = census(0, 1.0), census(104, 1.0)
    timeline.learn(whole)
    (changed,) = [group for group in later.groups if "checkpoint" in group.site]
    timeline.learn(ArrayCensus(step=104, time_s=1.0, groups=(changed,), left_out_bytes=MIB, partial=True))
    first, second = timeline.arrays
    assert second.held.keys() - first.held.keys() == {
        ("checkpoint.py:52 (save.<locals>.copy_of_all_leaves)", "float32[24,2,1024,8192]")
    }
    assert second.bytes == sum(group.bytes for group in whole.groups) + changed.bytes + MIB


@given(
    st.integers(1, 40),
    st.integers(0, 10**12),
    st.dictionaries(st.sampled_from(["parameters", "optimizer state", "batch"]), st.integers(1, 20)),
)
def test_like_arrays_are_divided_by_what_a_step_takes_of_them(count, size, kinds):
    parts = divided(Held(bytes=size, count=count), kinds)
    assert sum(parts.values()) == size
    if sum(kinds.values()) > count:
        assert list(parts) == [" or ".join(kinds)]
    else:
        assert all(abs(parts[kind] - size * number / count) < 1 for kind, number in kinds.items())
        assert ("other arrays" in parts) == (count > sum(kinds.values()))


def test_heap_maps_are_kept_at_the_moments_that_matter():
    timeline = Timeline()
    for step in range(60):
        size = 100 if step == 37 else 10
        timeline.learn(
            HeapMap(
                device="gpu:0", step=step, time_s=float(step), buffers=[LiveBuffer(address=1, bytes=size, label="x")]
            )
        )
    steps = [heap.step for heap in timeline.heaps]
    assert len(steps) <= 10
    assert {0, 37, 59} <= set(steps), "the first, the fullest and the last"
    assert steps == sorted(steps)


def test_a_map_of_very_many_buffers_is_short(tmp_path):
    buffers = [LiveBuffer(address=1 + 3 * number, bytes=2, label=f"kind {number % 20}") for number in range(20_000)]
    heap = heap_at(0, 1.0)
    write_rich_run(tmp_path, steps=3)
    (story,) = stories_of(tmp_path)
    story.timeline.heaps = [HeapMap(device="gpu:0", step=heap.step, time_s=0.0, buffers=buffers)]
    (shown,) = story_model(story)["heaps"]
    assert sum(len(region["stretches"]) for region in shown["regions"]) <= 1501
    (region,) = shown["regions"]
    assert sum(size for size, _ in region["stretches"]) == region["bytes"]
    assert shown["held_bytes"] == 40_000


def test_the_model_of_a_run_is_plain_and_sums_up(tmp_path):
    write_rich_run(tmp_path)
    (story,) = stories_of(tmp_path)
    model = story_model(story)
    assert json.loads(json.dumps(model, allow_nan=False)) == model
    assert model["glance"]["level"] == "good"
    assert model["glance"]["high"]["device"] == "gpu:1"
    assert model["glance"]["first"]["event"] == 1, "the gravest, and not the first"
    program = next(each for each in model["programs"] if each["name"] == "train_step")
    assert sum(group["bytes"] for group in program["peak"]["groups"]) == program["peak"]["bytes"]
    for group in program["peak"]["groups"]:
        named = sum(buffer["bytes"] for buffer in program["peak"]["buffers"] if buffer["group"] == group["name"])
        assert named <= group["bytes"]
    arrays = model["arrays"]
    held = sum(group["bytes"][-1] for group in arrays["groups"]) + arrays["rest"][-1]
    assert held == story.timeline.arrays[-1].bytes
    assert [each["preset"] is None for each in model["plan"]["candidates"]] == [True, True, False, False, False, False]


def test_a_program_that_needs_more_than_the_limit_does_not_fit(tmp_path):
    write_rich_run(tmp_path, scale=2.0)
    (story,) = stories_of(tmp_path)
    glance = story_model(story)["glance"]
    assert glance["level"] == "bad"
    assert glance["verdict"] == (
        "train_step does not fit: it needs 1.5 times the limit of 75.0 GiB. eval_step fits: it needs 62.0 GiB."
    )
    assert "train_step needs 116 GiB by its compiler, 1.5 times the limit" in story_model(story)["sentence"]


@pytest.mark.parametrize(
    ("need", "source"), [(1.0, "as it was planned"), (1.1, "by its arguments and its compiler's totals")]
)
def test_a_plans_peak_fills_in_for_totals_where_the_plan_came_true(tmp_path, need, source):
    write_rich_run(tmp_path)
    (story,) = stories_of(tmp_path)
    program = story.programs["train_step"]
    planned = story.plan.candidates[story.plan.chosen]
    chosen = replace(planned, step_bytes=round(program.memory.step_bytes / need))
    story.plan = replace(story.plan, candidates=(chosen,), chosen=0)
    story.programs["train_step"] = replace(program, peak=replace(planned.peak, basis=BY_TOTALS))
    (shown,) = [each for each in story_model(story)["programs"] if each["name"] == "train_step"]
    assert shown["peak"]["source"] == source


def test_texts_of_the_model_show_no_secret_and_no_control_sequence():
    told = clean({"a": ["\x1b[31mred", {"token=ghp_" + "a1" * 18: float("nan")}]})
    assert "\x1b" not in json.dumps(told, ensure_ascii=False)
    assert "a1a1" not in json.dumps(told)
    assert None in next(iter(told["a"][1:])).values()
