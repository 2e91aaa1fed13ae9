"""Detectors of live arrays: trends, growth, replication, imbalance, lost donations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.array_detectors import GrowthDetector, ImbalanceDetector, ReplicationDetector
from jaxmem_callbacks.analysis.compile_detectors import DonationDetector, RecompilationDetector
from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.analysis.timeseries import Debounce, Trend
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup, changed_groups, with_changes
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.transforms.sharding.infer import would_split

MIB = 2**20
FOUR = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
SETTINGS = MonitorSettings(growth_steps=50, growth_min_arrays=100)


def group(shape: tuple[int, ...] = (4,), count: int = 1, placement: str = "", **fields: Any) -> ArrayGroup:
    devices = fields.pop("devices", FOUR if placement else FOUR[:1])
    known = {
        "dtype": "float32",
        "spread": len(devices),
        "replicated": placement == "P()",
        "bytes": count * MIB,
        "site": "train.py:7 (main)",
    }
    return ArrayGroup(shape=shape, count=count, placement=placement, devices=devices, **(known | fields))


def census(step: int, *groups: ArrayGroup) -> Observation:
    found = ArrayCensus(step=step, time_s=float(step), groups=groups)
    return Observation(step=step, time_s=float(step), arrays=found)


def run(detector: Any, observations: list[Observation]) -> list[MemoryEvent]:
    return [event for observation in observations for event in detector.detect(observation)]


# Trends


def rise_of(values: list[float], steps: int = 50) -> Any:
    trend = Trend(steps)
    for step, value in enumerate(values):
        trend.add(step, value)
    return trend.rise()


@given(slope=st.floats(0.01, 1e6), start=st.floats(0, 1e9), noise=st.lists(st.floats(0, 1e9), min_size=5, max_size=5))
def test_a_steady_rise_is_seen_under_any_noise_above_it(slope: float, start: float, noise: list[float]):
    rise = rise_of([start + slope * step + noise[step % 5] * (step % 2) for step in range(130)])
    assert rise is not None
    assert rise.order == 1.0
    assert rise.per_step == pytest.approx(slope, rel=0.3, abs=1e-3)


@given(values=st.lists(st.integers(0, 100), min_size=10, max_size=40))
def test_what_repeats_is_no_rise_above_what_was_there(values: list[int]):
    rise = rise_of([float(value) for value in values * 20])
    assert rise is None or rise.gain <= max(values) - min(values)


def test_a_list_that_is_emptied_now_and_then_gains_nothing_after_its_first_turn():
    trend, gains = Trend(50), []
    for step in range(1000):
        trend.add(step, step % 200)
        rise = trend.rise()
        gains.append((step, rise.gain if rise else 0))
    assert max(gain for step, gain in gains if step > 220) <= 20, "of 200"
    assert max(gain for step, gain in gains if step <= 220) > 100


def test_few_values_and_steps_that_go_back_begin_anew():
    assert rise_of([float(step) for step in range(40)]) is None
    trend = Trend(50)
    for step in [*range(100), *range(30)]:
        trend.add(step, float(step))
    assert trend.rise() is None


# Growth


def growing(counts: list[int], shape: tuple[int, ...] = ()) -> list[Observation]:
    return [census(step, group((8, 8), 4), group(shape, count, bytes=4 * count)) for step, count in enumerate(counts)]


def test_growth_names_shape_dtype_number_and_line_once():
    (event,) = run(GrowthDetector(SETTINGS), growing(list(range(300))))
    assert event.kind == "growth"
    assert "float32[]" in event.message
    assert "made at train.py:7 (main)" in event.message
    assert event.figures["site"] == "train.py:7 (main)"
    assert event.figures["arrays_more"] == event.step - event.figures["since_step"]
    assert event.step <= 160, "not long after a hundred more"
    assert "float()" in event.action


def test_growth_is_told_again_after_the_arrays_were_let_go_and_more_came():
    counts = [*range(300), *[0] * 150, *range(700)]
    events = run(GrowthDetector(SETTINGS), growing(counts))
    assert [event.kind for event in events] == ["growth", "growth"]
    assert events[1].step > 450 + 300, "only past what was there before"


@pytest.mark.parametrize(
    "counts",
    [
        [7] * 300,
        [min(step, 90) for step in range(400)],
        [step % 100 for step in range(600)],
        [step // 60 for step in range(400)],
    ],
    ids=["flat", "fills up", "emptied", "too slow"],
)
def test_what_does_not_go_on_is_no_growth(counts: list[int]):
    assert run(GrowthDetector(SETTINGS), growing(counts)) == []


def test_arrays_of_ever_other_shapes_are_growth_of_all_together():
    observations = [
        census(step, *(group((size,), bytes=10_000) for size in range(max(0, step - 30), step))) for step in range(9)
    ]
    shapes: list[ArrayGroup] = []
    for step in range(9, 300):
        shapes.append(group((1000 + step,), bytes=MIB))
        observations.append(census(step, *shapes))
    (event,) = run(GrowthDetector(SETTINGS), observations)
    assert "more kinds" in event.message


# Censuses


GROUPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6, unique_by=lambda pair: pair[0])


@given(counts=st.lists(GROUPS, min_size=1, max_size=6))
def test_what_is_written_of_censuses_gives_them_back(counts: list[list[tuple[int, int]]]):
    before: ArrayCensus | None = None
    again: ArrayCensus | None = None
    for step, pairs in enumerate(counts):
        now = ArrayCensus(step=step, time_s=0.0, groups=tuple(group((size,), count) for size, count in pairs))
        written = changed_groups(before, now)
        assert written is not None or before is not None
        if written is not None:
            again = with_changes(again, written)
        assert again is not None
        assert {each.key: each for each in again.groups} == {each.key: each for each in now.groups}
        before = now


# Debounce


def test_lasting_needs_looks_and_steps_and_tells_once():
    lasting = Debounce(100)
    told = [step for step in range(60) if lasting.begun(step, {"a"})]
    assert told == [10]
    assert lasting.since({"a"}) == 0
    for step in range(60, 70):
        assert not lasting.begun(step, set())
    assert [step for step in range(70, 100) if lasting.begun(step, {"a"})] == [80]


@given(present=st.lists(st.booleans(), max_size=80))
def test_what_is_gone_at_every_fifth_look_never_lasts(present: list[bool]):
    lasting = Debounce(1)
    assert not any(lasting.begun(step, {"a"} if now and step % 5 else set()) for step, now in enumerate(present))


# Replication


def placed(whole: int, split: int, shape: tuple[int, ...] = (1024, 1024)) -> list[ArrayGroup]:
    return [
        group(shape, whole, "P()", bytes=whole * 64 * MIB),
        group(shape, split, "P('fsdp')", bytes=split * 16 * MIB),
    ]


def lasting(*groups: ArrayGroup) -> list[Observation]:
    return [census(step, *groups) for step in range(20)]


def test_the_exception_among_split_arrays_is_replication():
    (event,) = run(ReplicationDetector(SETTINGS), lasting(*placed(2, 22)))
    assert (
        "Each of 4 devices holds 128 MiB of arrays whole since step 0, though 22 others of this shape" in event.message
    )
    assert event.figures["replicated_bytes"] == 128 * MIB
    assert "jm.infer_shardings" in event.action


def test_one_that_is_larger_than_all_that_are_split_is_replication():
    blocks = [group((256, size), 9, "P('fsdp')", bytes=MIB) for size in (256, 512, 1024, 2048)]
    table = group((1024, 1024), 1, "P()", bytes=64 * MIB)
    (event,) = run(ReplicationDetector(SETTINGS), lasting(table, *blocks))
    assert "smaller ones such as float32[256,256] are placed as P('fsdp')" in event.message


@pytest.mark.parametrize(
    "groups",
    [
        placed(8, 16),
        [group((1024, 1024), 9, "P()", bytes=9 * 64 * MIB), group((4096, 128), 8, "P('data')", bytes=MIB)],
        placed(2, 22, shape=()),
        [dataclasses.replace(each, bytes=each.count) for each in placed(2, 22)],
    ],
    ids=["ZeRO-1", "data parallel", "single numbers", "small"],
)
def test_what_is_meant_to_be_whole_is_none(groups: list[ArrayGroup]):
    assert run(ReplicationDetector(SETTINGS), lasting(*groups)) == []


def test_under_a_policy_that_splits_every_large_whole_array_is_meant():
    whole = group((1024, 1024), 9, "P()", bytes=9 * 64 * MIB)
    (event,) = run(ReplicationDetector(SETTINGS, "fsdp"), lasting(whole))
    assert "the policy has sharding=fsdp" in event.message


@pytest.mark.parametrize(
    ("shape", "split", "told"),
    [
        ((8192, 8191), "fsdp", 1),
        ((8191, 8191), "fsdp", 0),
        ((8, 2047, 2047), "fsdp", 0),
        ((8, 2047, 2048), "fsdp", 1),
        ((8192, 8192), "rules", 0),
    ],
    ids=["divides", "does not", "only its layers do", "inside of its layers", "who knows what is named"],
)
def test_a_policy_means_what_its_rule_for_shapes_splits(shape: tuple[int, ...], split: str, told: int):
    whole = group(shape, 1, "P()", bytes=4 * math.prod(shape))
    assert len(run(ReplicationDetector(SETTINGS, split, would_split), lasting(whole))) == told


def test_rules_that_name_some_axes_leave_the_exception_among_split_arrays():
    (event,) = run(ReplicationDetector(SETTINGS, "rules", would_split), lasting(*placed(2, 22)))
    assert "22 others of this shape" in event.message


# Imbalance


def held(step: int, *mib: int, source: Any = "live_arrays") -> Observation:
    field = "live_array_bytes" if source == "live_arrays" else "in_use_bytes"
    readings = [
        Reading(source=source, device=device, step=step, time_s=float(step), **{field: count * MIB})
        for device, count in zip(FOUR, mib, strict=False)
    ]
    return dataclasses.replace(census(step, group((8, 8), 1, "P('fsdp')")), readings=readings)


def test_imbalance_names_both_devices_and_is_told_once():
    (event,) = run(ImbalanceDetector(SETTINGS), [held(step, 2000, 1000, 1000, 1000) for step in range(30)])
    assert (event.kind, event.device) == ("imbalance", "gpu:0")
    assert (
        "gpu:0 holds 2.0 GiB and gpu:1 1000 MiB (live arrays), of 4 devices of one mesh, since step 0" in event.message
    )
    assert event.figures["imbalance_share"] == 0.5


def test_devices_that_share_no_array_are_not_compared():
    alone = [dataclasses.replace(held(step, 2000, 0, 0, 0), arrays=census(step, group()).arrays) for step in range(30)]
    assert run(ImbalanceDetector(SETTINGS), alone) == []
    assert run(ImbalanceDetector(SETTINGS), [held(step, 1000, 800) for step in range(30)]) == [], "a fifth is none"
    assert run(ImbalanceDetector(SETTINGS), [held(step, 200, 1) for step in range(30)]) == [], "too few bytes"


def test_programs_that_run_on_one_device_already_are_no_imbalance():
    observations = []
    for step in range(30):
        running = held(step, 3000, 1000, source="allocator").readings
        done = held(step, 1000, 1000, source="allocator").readings
        observations.append(dataclasses.replace(held(step, 900, 900), readings=[*running, *done]))
    assert run(ImbalanceDetector(SETTINGS), observations) == []


# Donation lost

LOST = ("state['w']: it comes as float32 and is returned as bfloat16",)


def compile_of(step: int, lost: tuple[str, ...] = (), changed: tuple[str, ...] = ()) -> Observation:
    memory = ProgramMemory(
        name="train_step",
        platform="gpu",
        target="attached",
        argument_bytes=9,
        output_bytes=9,
        alias_bytes=0,
        temp_bytes=1,
    )
    compilation = Compilation(
        program="train_step",
        time_s=float(step),
        signature=(("state['w']", "float32[8]"),),
        changed=changed,
        memory=memory,
        lost=lost,
        lost_bytes=32 * len(lost),
    )
    return Observation(step=step, time_s=float(step), compilations=(Compiled(step=step, compilation=compilation),))


def test_a_lost_donation_is_told_once_until_it_is_made_again():
    changed = ("state['w']: float32[8] -> bfloat16[8]",)
    history = [
        compile_of(0),
        compile_of(3, LOST, changed),
        compile_of(5, LOST, changed),
        compile_of(7),
        compile_of(9, LOST),
    ]
    events = run(DonationDetector(), history)
    assert [event.step for event in events] == [3, 9]
    assert "train_step does not reuse the memory of 1 donated arrays since step 3" in events[0].message
    assert "state['w']: it comes as float32" in events[0].message
    assert "Changed in this compile: state['w']: float32[8] -> bfloat16[8]." in events[0].message
    assert events[0].figures["lost_bytes"] == 32


def test_one_compile_is_one_event():
    changed = ("state['w']: float32[8] -> bfloat16[8]",)
    history = [compile_of(0), compile_of(3, LOST, changed)]
    assert run(RecompilationDetector(), history) == []
    later = run(RecompilationDetector(), [*history, compile_of(5, LOST, ("batch: a -> b",))])
    assert [event.step for event in later] == [5], "what is lost already hides no other change"


def test_losses_before_the_monitor_are_history():
    assert run(DonationDetector(since_s=5.0), [compile_of(3, LOST)]) == []
