"""Windows, history and the table of what is known: nothing is lost between readings and what is shown."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.figures import (
    DERIVED,
    FIGURES,
    NAMED,
    History,
    Spread,
    Window,
    Windows,
    byte_unit,
    figure_of,
    values_of,
    window_in,
)
from jaxmem_callbacks.analysis.observation import Compiled, Metrics, Observation
from jaxmem_callbacks.analysis.run_summary import MetricAvailability
from jaxmem_callbacks.analysis.timeseries import PICTURES, RateLimiter
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import AcrossProcesses, Reading, SaveSpan, Unavailable
from jaxmem_callbacks.records.traces import StepMark

GIB, MIB = 2**30, 2**20


@settings(deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_window_keeps_lowest_mean_and_highest(values: list[float]):
    windows = Windows(1.0)
    for value in values:
        windows.add({"tag": value})
    window = windows.close(3, 10.0)
    spread = window.spreads["tag"]
    assert (spread.low, spread.high, spread.count) == (min(values), max(values), len(values))
    assert spread.mean == pytest.approx(sum(values) / len(values))
    assert spread.low - 1e-6 <= spread.mean <= spread.high + 1e-6


def test_the_first_window_closes_at_once_the_next_after_its_span_and_a_step():
    windows = Windows(1.0)
    windows.add({"tag": 1.0})
    assert windows.close(0, 100.0).step == 0
    windows.add({"tag": 2.0})
    assert windows.close(1, 100.5) is None, "not over"
    assert windows.close(0, 102.0) is None, "no step was completed in it"
    assert windows.close(1, 102.0).spreads["tag"].mean == 2.0
    assert windows.close(2, 200.0) is None, "nothing was seen"


def test_a_clock_that_is_set_back_does_not_stop_the_windows():
    windows = Windows(1.0)
    for step, time_s in ((0, 1000.0), (1, 10.0), (2, 12.0)):
        windows.add({"tag": 1.0})
        assert windows.close(step, time_s) is not None


def test_the_open_window_is_closed_by_force():
    windows = Windows(60.0)
    windows.add({"tag": 1.0})
    windows.close(0, 0.0)
    windows.add({"tag": 5.0})
    assert windows.close(0, 0.1, force=True).spreads["tag"].mean == 5.0


def test_a_range_is_shown_only_for_what_ranged():
    windows = Windows(1.0)
    windows.keep({"limit": 8.0})
    windows.add({"still": 1.0, "of/moving": 1.0})
    windows.add({"still": 1.0, "of/moving": 3.0})
    assert windows.close(0, 0.0).scalars() == {
        "still": 1.0,
        "of/moving": 2.0,
        "window/of/moving/min": 1.0,
        "window/of/moving/max": 3.0,
        "limit": 8.0,
    }


def window(step: int, high: float) -> Window:
    return Window(step=step, time_s=float(step), spreads={"tag": Spread(low=0.0, mean=0.0, high=high, count=1)})


@given(highs=st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_a_bounded_history_never_loses_the_peak(highs: list[float]):
    history = History(kept=16)
    for step, high in enumerate(highs):
        history.add(window(step, high))
    points = history.points
    assert len(points) <= 16
    assert max(point.highs["tag"] for point in points) == max(highs)
    assert points[-1].step == len(highs) - 1
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_every_figure_has_its_unit_in_the_tag():
    endings = {"GiB": "_gib", "arrays": "_count", "share": "_share"}
    for figure in (*FIGURES, *DERIVED, *NAMED):
        assert figure.tag.startswith("memory/")
        assert figure.tag.rstrip("/").endswith(endings[figure.unit])
        assert figure.field is None or figure.field in Reading.__slots__


def test_a_runs_tags_have_one_unit():
    assert [byte_unit("cpu", limit) for limit in (None, 4 * GIB - 1, 4 * GIB)] == ["MiB", "MiB", "GiB"]
    assert [byte_unit(platform, MIB) for platform in ("gpu", "cuda", "tpu")] == ["GiB"] * 3, "whatever is run on them"
    level = Spread(low=0.25, mean=0.5, high=1.0, count=2, high_at="cpu:1")
    one = Spread(low=0.5, mean=0.5, high=0.5, count=1)
    tags = {
        "memory/in_use_gib": "memory/in_use_mib",
        "window/memory/processes/in_use_gib/max": "window/memory/processes/in_use_mib/max",
        "memory/program_gib/a_gib": "memory/program_mib/a_gib",
    }
    others = dict.fromkeys(("memory/live_arrays_count", "memory/fragmentation_share", "train/a_gib"), one)
    window = Window(step=1, time_s=2.0, spreads=dict.fromkeys(tags, level) | others, ranged=frozenset(tags))
    assert window_in(window, "GiB") is window
    shown = window_in(window, "MiB")
    assert (shown.step, shown.time_s) == (1, 2.0)
    in_mib = Spread(low=256.0, mean=512.0, high=1024.0, count=2, high_at="cpu:1")
    assert shown.spreads == dict.fromkeys(tags.values(), in_mib) | others
    assert shown.ranged == frozenset(tags.values())
    described = figure_of("memory/program_mib/a_gib")
    assert (described.unit, described.divisor) == ("MiB", MIB)
    assert "in MiB, from the compiler" in described.described()


def test_the_table_of_what_is_known_names_the_runs_tags():
    known = MetricAvailability()
    known.unit = "MiB"
    names = {each.figure for each in known.rows()}
    assert {"memory/in_use_mib", "memory/headroom_mib", "memory/live_arrays_count"} <= names
    assert not any("_gib" in name for name in names)


def test_values_of_a_gpu_reading():
    reading = Reading(
        source="allocator",
        device="gpu:0",
        step=0,
        time_s=0.0,
        in_use_bytes=2 * GIB,
        limit_bytes=10 * GIB,
        pool_bytes=6 * GIB,
        largest_free_bytes=1 * GIB,
    )
    assert values_of(reading) == {
        "memory/in_use_gib": 2.0,
        "memory/limit_gib": 10.0,
        "memory/pool_gib": 6.0,
        "memory/largest_free_gib": 1.0,
        "memory/fragmentation_share": 0.75,
        "memory/headroom_gib": 8.0,
    }


def observed(*readings: Reading, **fields: object) -> Observation:
    return Observation(step=1, time_s=1.0, readings=readings, **fields)


def row(known: MetricAvailability, figure: str) -> tuple[bool, str, str]:
    return next((each.known, each.latest, each.text) for each in known.rows() if each.figure == figure)


def test_what_is_unknown_says_why():
    known = MetricAvailability(limit_bytes=3 * GIB)
    assert row(known, "memory/host_gib")[2] == "unknown, because nothing was read yet"
    why = Unavailable(figure="allocator", device="cpu:0", reason="this client keeps none")
    readings = [
        Reading(source="live_arrays", device=f"cpu:{index}", step=1, time_s=1.0, live_array_bytes=index * GIB)
        for index in range(3)
    ]
    before = known.shape()
    known.learn(observed(*readings, unavailable=[why], dropped=4))
    assert known.shape() != before
    assert row(known, "memory/in_use_gib") == (False, "unknown", "unknown, because this client keeps none")
    assert row(known, "memory/fragmentation_share")[2] == "unknown, because this client keeps none"
    assert row(known, "memory/live_arrays_gib")[:2] == (True, "min 0 B (cpu:0), mean 1.0 GiB, max 2.0 GiB (cpu:2)")
    assert (
        row(known, "memory/live_arrays_count")[2] == "unknown, because the allocator's statistics do not have it here"
    )
    assert row(known, "limit_bytes of the preset")[1] == "3.0 GiB"
    assert row(known, "steps that the monitor missed")[1] == "4"


def test_programs_are_known_by_their_largest_compile_or_by_a_reason():
    def compiled(name: str, temp: int | None) -> Compiled:
        memory = None
        if temp is not None:
            memory = ProgramMemory(
                name=name,
                platform="cpu",
                target="attached",
                argument_bytes=0,
                output_bytes=0,
                alias_bytes=0,
                temp_bytes=temp,
            )
        why = None if memory else "unknown, because not registered"
        return Compiled(
            step=0, compilation=Compilation(program=name, time_s=0.0, signature=(), memory=memory, unavailable=why)
        )

    known = MetricAvailability()
    known.learn(observed(compilations=[compiled("step", 2 * GIB), compiled("step", GIB), compiled("other", None)]))
    assert row(known, "need of step")[1] == "2.0 GiB"
    assert row(known, "need of other") == (False, "unknown", "unknown, because not registered")


def test_fragmentation_is_shown_for_the_worst_device():
    known = MetricAvailability()
    known.learn(
        observed(
            *(
                Reading(
                    source="allocator",
                    device=f"gpu:{index}",
                    step=1,
                    time_s=1.0,
                    in_use_bytes=0,
                    pool_bytes=100,
                    largest_free_bytes=100 - 10 * index,
                )
                for index in range(3)
            )
        )
    )
    assert row(known, "memory/fragmentation_share")[1] == "min 0.0% (gpu:0), mean 10.0%, max 20.0% (gpu:2)"
    assert row(known, "memory/in_use_gib")[1] == "0 B (each of 3 devices)"


def gpu(number: int = 0, **fields: int) -> Reading:
    return Reading(source="allocator", device=f"gpu:{number}", step=0, time_s=0.0, **fields)


def live(number: int, held: int) -> Reading:
    return Reading(source="live_arrays", device=f"gpu:{number}", step=0, time_s=0.0, live_array_bytes=held)


def test_unattributed_bytes_are_in_use_less_live_arrays_less_the_largest_programs_temporaries():
    in_use = gpu(in_use_bytes=10 * GIB)
    assert values_of(live(0, 6 * GIB), in_use, temp_bytes=GIB)["memory/unattributed_gib"] == 3.0
    assert values_of(live(0, 9 * GIB), in_use, temp_bytes=4 * GIB)["memory/unattributed_gib"] == 0.0, "never below"
    tpu = gpu(in_use_bytes=10 * GIB, reserved_bytes=4 * GIB)
    assert values_of(live(0, 6 * GIB), tpu, temp_bytes=4 * GIB)["memory/unattributed_gib"] == 4.0, "they are reserved"
    assert "memory/unattributed_gib" not in values_of(live(0, 6 * GIB), None)
    assert "memory/unattributed_gib" not in values_of(in_use, in_use), "only where live arrays were read"


def test_what_is_taken_outside_the_pool_is_the_drivers_less_the_pool():
    driver = Reading(source="driver", device="gpu:0", step=0, time_s=0.0, device_used_bytes=63 * GIB)
    assert values_of(driver, gpu(pool_bytes=60 * GIB)) == {
        "memory/device_used_gib": 63.0,
        "memory/outside_pool_gib": 3.0,
    }
    assert values_of(driver, gpu(in_use_bytes=1)) == {"memory/device_used_gib": 63.0}


def test_figures_that_are_computed_have_their_row_with_devices_or_a_reason():
    known = MetricAvailability()
    why = Unavailable(figure="driver", device="gpu:0", reason="the driver is not asked")
    readings = [gpu(number, in_use_bytes=(4 + number) * GIB, limit_bytes=8 * GIB) for number in range(3)]
    known.learn(observed(*readings, live(0, GIB), live(1, GIB), unavailable=[why]))
    assert row(known, "memory/headroom_gib")[1] == "min 2.0 GiB (gpu:2), mean 3.0 GiB, max 4.0 GiB (gpu:0)"
    assert row(known, "memory/unattributed_gib")[1] == "min 3.0 GiB (gpu:0), mean 3.5 GiB, max 4.0 GiB (gpu:1)"
    assert row(known, "memory/outside_pool_gib") == (False, "unknown", "unknown, because the driver is not asked")
    assert "does not report the largest free block" in row(known, "memory/fragmentation_share")[2] or (
        "neither a pool" in row(known, "memory/fragmentation_share")[2]
    )


SEEN: dict[str, Any] = {
    "readings": [gpu(in_use_bytes=GIB)],
    "unavailable": [Unavailable(figure="driver", device="gpu:0", reason="the driver is not asked")],
    "arrays": None,
    "compilations": [
        Compiled(step=0, compilation=Compilation(program="step", time_s=0.0, signature=(), unavailable="unknown"))
    ],
    "metrics": [Metrics(step=0, time_s=0.0, values={"loss": 1.0})],
    "dropped": 7,
    "heaps": [HeapMap(device="gpu:0", step=0, time_s=0.0, buffers=())],
    "processes": AcrossProcesses(step=0, time_s=0.0, processes=2),
    "trace": [StepMark(step=0, live_bytes=1)],
    "messages": ["a probe is switched off"],
    "saves": [SaveSpan(began_s=0.0, ended_s=1.0, first_step=0, background=False)],
    "draws_heap": False,
}


def test_what_brings_nothing_to_the_table_of_what_is_known_is_told_from_what_does():
    assert set(SEEN) == {each.name for each in dataclasses.fields(Observation)} - {"step", "time_s"}
    telling = {
        name for name in SEEN if MetricAvailability.may_change_by(Observation(step=0, time_s=0.0, **{name: SEEN[name]}))
    }
    for name, seen in SEEN.items():
        known = MetricAvailability()
        before = known.rows(), known.shape()
        known.learn(Observation(step=0, time_s=0.0, **{name: seen}))
        assert name in telling or (known.rows(), known.shape()) == before, name
    assert not telling & {"arrays", "metrics", "trace", "saves"}, "most looks bring metrics alone"


def test_a_window_names_the_device_that_had_the_highest_value():
    windows = Windows(1.0)
    for device, value in (("gpu:0", 1.0), ("gpu:1", 3.0), ("gpu:2", 2.0)):
        windows.add({"several": value}, device)
    windows.add({"one": 5.0}, "gpu:0")
    spreads = windows.close(0, 0.0).spreads
    assert (spreads["several"].high_at, spreads["one"].high_at) == ("gpu:1", "")
    history = History(kept=2)
    for step, (device, value) in enumerate((("gpu:1", 3.0), ("gpu:0", 9.0), ("gpu:1", 4.0))):
        high = Spread(low=0.0, mean=0.0, high=value, count=2, high_at=device)
        history.add(Window(step=step, time_s=0.0, spreads={"several": high}))
    assert history.points[0].places == {"several": "gpu:0"}, "joined points keep the place of the higher one"


def test_a_range_that_is_only_rounding_is_none():
    windows = Windows(1.0)
    for value in (0.7, 0.7 + 1e-12):
        windows.add({"share": value})
    assert windows.close(0, 0.0).scalars().keys() == {"share"}


def test_a_scalars_tag_leads_to_its_figure():
    assert figure_of("window/memory/in_use_gib/max") is FIGURES[0]
    for tag in ("memory/program_gib/max", "window/memory/program_gib/max/min"):
        assert figure_of(tag).tag == "memory/program_gib/", "of a program that is named so"
    assert figure_of("train/loss") is None
    assert figure_of("memory/host_gib").described() == (
        "Resident memory of the process; in GiB, from the operating system, at the moment of reading."
    )


def test_windows_grow_with_a_long_run_and_stay_as_they_are_in_a_short_one():
    def closed(steps: int, pace_s: float) -> int:
        windows = Windows(1.0)
        count = 0
        for step in range(steps):
            windows.add({"memory/host_gib": 1.0})
            count += windows.close(step, step * pace_s) is not None
        return count

    assert closed(1500, 1.0) == 1500
    assert closed(200_000, 10.0) < 2000 * 9


# RateLimiter


@given(
    span_s=st.floats(1.0, 600.0),
    finest=st.integers(5, 100),
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=500),
)
def test_no_span_is_shorter_than_its_seconds_or_its_part_of_the_run(span_s: float, finest: int, gaps: list[float]):
    spans, began = RateLimiter(span_s, finest), []
    for now in np.cumsum([5.0, *gaps]):
        if spans.is_over(now):
            spans.begin(now)
            began.append(now)
    assert began[0] == 5.0
    for before, after in itertools.pairwise(began):
        assert after - before >= max(span_s, (before - 5.0) / finest) - 1e-6


@pytest.mark.parametrize("jump_s", [365 * 86400.0, -365 * 86400.0])
def test_a_clock_that_jumps_by_a_year_leaves_windows_as_short_as_before(jump_s: float):
    windows, now, closed = Windows(1.0), 1e9, 0
    for step in range(2000):
        now += jump_s if step == 1000 else 0.5
        windows.add({"tag": 1.0})
        closed += windows.close(step, now) is not None
    assert 990 <= closed <= 1002


def test_a_run_of_eleven_days_draws_some_two_hundred_times_and_a_short_one_at_every_span():
    def drawn(seconds: int) -> int:
        spans, count = RateLimiter(600.0, PICTURES), 0
        for now in range(0, seconds, 10):
            if spans.is_over(now):
                spans.begin(now)
                count += 1
        return count

    assert drawn(3600) == 6
    assert 200 < drawn(10**6) < 250
