"""Detectors: one event an episode whatever the noise, none above the release level, and texts that say what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem_callbacks.analysis.compile_detectors import RecompilationDetector
from jaxmem_callbacks.analysis.figures import Fragmentation, fragmentation_of
from jaxmem_callbacks.analysis.limit_detectors import FragmentationDetector, NearOomDetector
from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.analysis.timeseries import HysteresisTrigger
from jaxmem_callbacks.probes.jax_events import NOT_REGISTERED
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, Unavailable

MIB = 2**20
LIMIT = 1000 * MIB


def allocator(step: int = 0, device: str = "gpu:0", **figures: Any) -> Reading:
    return Reading(source="allocator", device=device, step=step, time_s=float(step), **figures)


def live(step: int, count: int, device: str = "cpu:0") -> Reading:
    return Reading(source="live_arrays", device=device, step=step, time_s=float(step), live_array_bytes=count)


def seen(*readings: Reading, step: int = 0, compiled: tuple[Compiled, ...] = ()) -> Observation:
    return Observation(step=step, time_s=float(step), readings=readings, compilations=compiled)


def program(need_mib: int, arguments_mib: int = 0, name: str = "train_step", **fields: Any) -> Compilation:
    memory = ProgramMemory(
        name=name,
        platform="cpu",
        target="attached",
        argument_bytes=arguments_mib * MIB,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=(need_mib - arguments_mib) * MIB,
    )
    return Compilation(program=name, time_s=10.0, signature=(("batch", "float32[8]"),), memory=memory, **fields)


def compiled(compilation: Compilation, step: int = 0) -> Compiled:
    return Compiled(step=step, compilation=compilation)


def run(detector: Any, observations: list[Observation]) -> list[MemoryEvent]:
    return [event for observation in observations for event in detector.detect(observation)]


# Hysteresis


def test_a_release_above_the_beginning_is_refused():
    with pytest.raises(ValueError, match=r"release=0\.9 is above begin=0\.5.*Give release <= begin"):
        HysteresisTrigger(begin=0.5, release=0.9)


@given(noise=st.lists(st.floats(0.86, 1.0), min_size=1, max_size=40))
def test_noise_between_the_levels_never_begins_a_second_episode(noise: list[float]):
    episode = HysteresisTrigger(begin=0.95, release=0.85)
    assert episode.begins(0.96)
    assert not any(episode.begins(level) for level in noise)


@given(levels=st.lists(st.floats(0, 1), max_size=60))
def test_an_episode_begins_only_above_its_level_and_never_twice_without_a_release(levels: list[float]):
    episode = HysteresisTrigger(begin=0.8, release=0.6)
    released = True
    for level in levels:
        began = episode.begins(level)
        if began:
            assert level > 0.8
            assert released
            released = False
        released = released or level <= 0.6


@given(levels=st.lists(st.floats(0, 1), max_size=200))
def test_a_dip_that_does_not_last_ends_no_episode(levels: list[float]):
    episode = HysteresisTrigger(begin=0.8, release=0.6, quiet=10)
    began = [episode.begins(0.9 if index % 10 == 0 else level) for index, level in enumerate(levels)]
    assert began == [True, *[False] * (len(levels) - 1)][: len(levels)]


# Near-OOM


def test_near_oom_of_the_allocator_counts_what_is_reserved():
    reading = allocator(5, "tpu:0", in_use_bytes=300 * MIB, reserved_bytes=660 * MIB, limit_bytes=LIMIT)
    (event,) = NearOomDetector(MonitorSettings()).detect(seen(reading))
    assert (event.kind, event.step, event.device) == ("near_oom", 5, "tpu:0")
    assert "tpu:0 holds 960 MiB of a limit of 1000 MiB: 40.0 MiB (4.0%) left, since step 5." in event.message
    assert event.figures["headroom_share"] == 0.04
    assert "jm.load_preset('donate', 'full_remat')" in event.action


@given(shares=st.lists(st.floats(0.93, 1.1), min_size=1, max_size=30))
def test_near_oom_is_told_once_an_episode_whatever_the_noise(shares: list[float]):
    detector = NearOomDetector(MonitorSettings(near_oom_headroom=0.05))
    first = [seen(allocator(0, in_use_bytes=970 * MIB, limit_bytes=LIMIT))]
    noise = [
        seen(allocator(step, in_use_bytes=int(share * LIMIT), limit_bytes=LIMIT))
        for step, share in enumerate(shares, start=1)
    ]
    assert len(run(detector, first + noise)) == 1


@given(shares=st.lists(st.floats(0, 0.949), max_size=30))
def test_near_oom_is_never_told_with_enough_headroom(shares: list[float]):
    observations = [
        seen(allocator(step, in_use_bytes=int(share * LIMIT), limit_bytes=LIMIT)) for step, share in enumerate(shares)
    ]
    assert run(NearOomDetector(MonitorSettings()), observations) == []


def test_near_oom_is_told_again_after_real_relief():
    detector = NearOomDetector(MonitorSettings())
    levels = [970, *[500] * 10, 980]
    found = run(
        detector,
        [seen(allocator(step, in_use_bytes=level * MIB, limit_bytes=LIMIT)) for step, level in enumerate(levels)],
    )
    assert [event.step for event in found] == [0, 11]


def test_near_oom_is_not_told_again_within_ten_steps_however_often_each_is_looked_at():
    """Long steps, or two sources, give many readings a step."""
    detector = NearOomDetector(MonitorSettings())

    def looks(first: int, last: int, level: int) -> list[Observation]:
        return [
            seen(allocator(step, in_use_bytes=level * MIB, limit_bytes=LIMIT), live(step, level * MIB, "gpu:0"))
            for step in range(first, last)
            for _ in range(20)
        ]

    assert [event.step for event in run(detector, looks(0, 1, 970))] == [0]
    assert run(detector, [*looks(1, 5, 500), *looks(5, 6, 970), *looks(6, 15, 500), *looks(15, 16, 970)]) == []
    assert [event.step for event in run(detector, [*looks(16, 26, 500), *looks(26, 27, 970)])] == [26]


def test_near_oom_judges_devices_together_and_names_the_worst():
    readings = [allocator(3, f"gpu:{index}", in_use_bytes=(960 + index) * MIB, limit_bytes=LIMIT) for index in range(8)]
    (event,) = NearOomDetector(MonitorSettings()).detect(seen(*readings))
    assert event.device == "gpu:7"


def test_the_allocator_and_live_arrays_of_one_device_are_one_episode():
    detector = NearOomDetector(MonitorSettings())
    observations = [
        seen(allocator(step, in_use_bytes=970 * MIB, limit_bytes=LIMIT), live(step, 300 * MIB, "gpu:0"))
        for step in range(5)
    ]
    assert len(run(detector, observations)) == 1


def test_a_tighter_limit_of_the_preset_wins_over_the_allocator():
    reading = allocator(in_use_bytes=480 * MIB, limit_bytes=LIMIT)
    assert NearOomDetector(MonitorSettings()).detect(seen(reading)) == []
    (event,) = NearOomDetector(MonitorSettings(limit_bytes=500 * MIB)).detect(seen(reading))
    assert event.figures["limit_bytes"] == 500 * MIB


def test_without_any_limit_nothing_is_judged():
    huge = compiled(program(10**6))
    assert NearOomDetector(MonitorSettings()).detect(seen(live(0, 10**15), compiled=(huge,))) == []


def test_on_cpu_live_arrays_and_the_programs_need_are_judged_without_counting_arguments_twice():
    detector = NearOomDetector(MonitorSettings(limit_bytes=LIMIT))
    need = compiled(program(700, arguments_mib=300))
    assert detector.detect(seen(live(0, 500 * MIB), compiled=(need,))) == [], "200 beside the arguments + 700 = 900"
    (event,) = detector.detect(seen(live(1, 560 * MIB), step=1))
    assert event.figures == {
        "demand_bytes": 960 * MIB,
        "limit_bytes": LIMIT,
        "headroom_share": 0.04,
        "program": "train_step",
    }
    assert (
        "cpu:0 needs 960 MiB at the next train_step (700 MiB by its compiler, 260 MiB of other live arrays)"
        in event.message
    )


def test_more_than_the_limit_is_said_as_such():
    detector = NearOomDetector(MonitorSettings(limit_bytes=LIMIT))
    (event,) = detector.detect(seen(live(1, 1200 * MIB)))
    assert "200 MiB too much" in event.message


@pytest.mark.core
def test_a_program_that_cannot_fit_is_told_once_and_does_not_hide_the_others():
    detector = NearOomDetector(MonitorSettings(limit_bytes=LIMIT))
    plain, remat = compiled(program(1500, name="plain"), step=4), compiled(program(600, name="remat"), step=4)
    (event,) = detector.detect(seen(live(4, 10 * MIB), step=4, compiled=(plain, remat)))
    assert (event.device, event.step) == ("plain", 4)
    assert "plain alone needs 1.5 GiB by its compiler" in event.message
    assert "500 MiB above the limit of 1000 MiB, noticed at step 4." in event.message
    again = compiled(program(1600, name="plain"), step=5)
    assert detector.detect(seen(live(5, 10 * MIB), step=5, compiled=(again,))) == []
    (other,) = detector.detect(seen(live(6, 400 * MIB), step=6))
    assert other.figures["program"] == "remat"


def test_a_step_that_fits_is_judged_beside_one_of_the_same_name_that_cannot():
    detector = NearOomDetector(MonitorSettings(limit_bytes=LIMIT))
    plain, remat = compiled(program(1500)), compiled(program(600))
    assert [event.device for event in detector.detect(seen(compiled=(plain, remat)))] == ["train_step"]
    (event,) = detector.detect(seen(live(6, 400 * MIB), step=6))
    assert event.figures["demand_bytes"] == 1000 * MIB


# Fragmentation


def test_fragmentation_is_xlas_definition_with_the_pool_as_denominator():
    reading = allocator(
        in_use_bytes=200 * MIB, pool_bytes=600 * MIB, limit_bytes=LIMIT, largest_free_bytes=100 * MIB, reserved_bytes=0
    )
    found = fragmentation_of(reading)
    assert isinstance(found, Fragmentation)
    assert found.share == pytest.approx(0.75)
    assert found.free_bytes == 400 * MIB


def test_fragmentation_without_a_pool_uses_the_limit_and_what_is_reserved():
    reading = allocator(
        device="tpu:0",
        in_use_bytes=200 * MIB,
        reserved_bytes=500 * MIB,
        limit_bytes=LIMIT,
        largest_free_bytes=300 * MIB,
    )
    found = fragmentation_of(reading)
    assert isinstance(found, Fragmentation)
    assert (found.share, found.free_bytes) == (0.0, 300 * MIB)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({}, "does not report the bytes in use"),
        ({"in_use_bytes": 5}, "neither a pool nor a limit"),
        ({"in_use_bytes": 5, "pool_bytes": 9}, "does not report the largest free block"),
    ],
)
def test_unknown_fragmentation_has_its_reason(figures: dict[str, int], reason: str):
    found = fragmentation_of(allocator(**figures))
    assert isinstance(found, Unavailable)
    assert reason in found.reason


SIZES = st.one_of(st.none(), st.integers(0, 2**41))


@given(in_use=SIZES, reserved=SIZES, limit=SIZES, pool=SIZES, largest=SIZES)
def test_fragmentation_is_a_share_or_a_reason_for_any_figures(in_use, reserved, limit, pool, largest):
    reading = allocator(
        in_use_bytes=in_use, reserved_bytes=reserved, limit_bytes=limit, pool_bytes=pool, largest_free_bytes=largest
    )
    found = fragmentation_of(reading)
    assert found.reason if isinstance(found, Unavailable) else 0 <= found.share <= 1


def split(step: int, share: float, free_mib: int = 400) -> Observation:
    free = free_mib * MIB
    reading = allocator(
        step, in_use_bytes=100 * MIB, pool_bytes=100 * MIB + free, largest_free_bytes=int(free * (1 - share))
    )
    return seen(reading, step=step)


def test_fragmentation_is_told_once_an_episode():
    detector = FragmentationDetector(MonitorSettings(fragmentation_share=0.5))
    shares = [0.3, 0.6, 0.45, 0.7, 0.2, 0.52, *[0.2] * 10, 0.55]
    found = run(detector, [split(step, share) for step, share in enumerate(shares)])
    assert [event.step for event in found] == [1, 16]
    assert (
        "60% of the free memory of gpu:0 is outside its largest free block, since step 1: 400 MiB are free"
        in found[0].message
    )
    assert "float()" in found[0].action


@given(shares=st.lists(st.floats(0, 0.499), max_size=30))
def test_fragmentation_below_the_share_is_no_event(shares: list[float]):
    observations = [split(step, share) for step, share in enumerate(shares)]
    assert run(FragmentationDetector(MonitorSettings(fragmentation_share=0.5)), observations) == []


def test_an_almost_full_pool_is_no_fragmentation_event():
    detector = FragmentationDetector(MonitorSettings(fragmentation_min_bytes=64 * MIB))
    assert run(detector, [split(0, 0.9, free_mib=63)]) == []
    assert len(run(detector, [split(1, 0.9, free_mib=65)])) == 1


# Recompilation

CHANGE = ("batch: float32[8] -> float32[3]",)


def test_a_recompilation_names_the_argument_and_the_first_compile_is_no_event():
    detector = RecompilationDetector()
    first, second = program(10), program(10, changed=CHANGE)
    assert detector.detect(seen(compiled=(compiled(first, 0),))) == []
    (event,) = detector.detect(seen(compiled=(compiled(second, 9),), step=12))
    assert (event.kind, event.step, event.device) == ("recompilation", 9, "train_step")
    assert event.message == (
        "train_step was compiled again (compile 2) at step 9. Changed: batch: float32[8] -> float32[3]."
    )
    assert "pad" in event.action
    assert event.figures == {"compiles": 2, "changed": CHANGE[0]}


def test_many_changed_arguments_are_cut_short():
    changes = tuple(f"x{index}: a -> b" for index in range(7))
    (event,) = RecompilationDetector().detect(seen(compiled=(compiled(program(1, changed=changes)),)))
    assert event.message.endswith("x3: a -> b; and 3 more.")
    assert "x6: a -> b" in event.figures["changed"]


def test_an_unregistered_recompilation_says_why_the_argument_is_unknown():
    heard = Compilation(program="my_step", time_s=1.0, signature=(), unavailable=NOT_REGISTERED)
    detector = RecompilationDetector()
    assert detector.detect(seen(compiled=(compiled(heard),))) == []
    (event,) = detector.detect(seen(compiled=(compiled(heard, 3),)))
    assert "Changed: unknown, because not registered" in event.message
    assert event.action.startswith("Is it jitted inside the loop")


def test_another_step_of_the_same_name_is_no_recompilation():
    plain, remat = compiled(program(9)), compiled(program(5), 2)
    assert run(RecompilationDetector(), [seen(compiled=(plain, remat))]) == []


@given(gaps=st.lists(st.integers(1, 100), max_size=30))
def test_the_same_arguments_changing_again_and_again_is_one_episode(gaps: list[int]):
    detector, step, found = RecompilationDetector(), 0, 0
    for index, gap in enumerate([1, *gaps]):
        step += gap
        change = (f"batch: float32[8] -> float32[{index}]",)
        found += len(detector.detect(seen(compiled=(compiled(program(1, changed=change), step),))))
    assert found == 1


def test_another_argument_or_a_long_quiet_time_is_another_episode():
    detector = RecompilationDetector()
    mask = ("mask: absent -> bool[8]",)
    history = [(CHANGE, 1), (mask, 2), (CHANGE, 3), (CHANGE, 200)]
    found = run(detector, [seen(compiled=(compiled(program(1, changed=change), step),)) for change, step in history])
    assert [event.step for event in found] == [1, 2, 200]


def test_compiles_before_the_monitor_are_history():
    detector = RecompilationDetector(since_s=100.0)
    old, new = program(1, changed=CHANGE), dataclasses.replace(program(1, changed=CHANGE), time_s=101.0)
    assert detector.detect(seen(compiled=(compiled(old),))) == []
    assert len(detector.detect(seen(compiled=(compiled(new),)))) == 1
