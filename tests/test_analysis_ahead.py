"""Near-OOM, ahead of time: by the largest block that could be had, and by a trend that meets the limit."""

from __future__ import annotations

from typing import Any

import pytest

from jaxmem_callbacks.analysis.limit_detectors import NearOomDetector
from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading

MIB = 2**20


def run(detector: Any, observations: list[Observation]) -> list[MemoryEvent]:
    return [event for observation in observations for event in detector.detect(observation)]


def pool(step: int, in_use: int, largest: int | None, whole: int = 1000, limit: int = 1000) -> list[Reading]:
    figures = {"in_use_bytes": in_use * MIB, "pool_bytes": whole * MIB, "limit_bytes": limit * MIB}
    free = None if largest is None else largest * MIB
    return [
        Reading(source="allocator", device="gpu:0", step=step, time_s=float(step), largest_free_bytes=free, **figures),
        Reading(source="live_arrays", device="gpu:0", step=step, time_s=float(step), live_array_bytes=300 * MIB),
    ]


def blocks(*pools: list[Reading], temp_mib: int = 500, platform: str = "gpu") -> list[MemoryEvent]:
    memory = ProgramMemory(
        name="train_step",
        platform=platform,
        target="attached",
        argument_bytes=300 * MIB,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=temp_mib * MIB,
    )
    compilation = Compilation(program="train_step", time_s=0.0, signature=(), memory=memory)
    first = Observation(step=0, time_s=0.0, compilations=(Compiled(step=0, compilation=compilation),))
    looks = [Observation(step=step, time_s=float(step), readings=each) for step, each in enumerate(pools)]
    return run(NearOomDetector(MonitorSettings()), [first, *looks])


def test_a_block_that_cannot_be_had_is_near_oom_once():
    (event,) = blocks(*(pool(step, 400, 450) for step in range(12)))
    assert event.kind == "near_oom"
    assert "The next train_step needs 500 MiB for its temporaries in one block" in event.message
    assert "the largest that gpu:0 could give is 450 MiB" in event.message
    assert event.figures["block_bytes"] == 500 * MIB
    assert event.figures["free_bytes"] == 600 * MIB


def test_a_look_that_cannot_judge_the_block_ends_no_episode_however_many_steps_it_saw():
    short, taken = (0, 4, 400, 450), (4, 30, 820, 150)
    again = (30, 34, 400, 450)
    looks = [
        [reading for step in range(first, last) for reading in pool(step, in_use, largest)]
        for first, last, in_use, largest in (short, taken, again)
    ]
    assert [event.step for event in blocks(*looks)] == [3]


@pytest.mark.parametrize(
    "pools",
    [
        [pool(step, 820, 150) for step in range(12)],
        [pool(step, 400, 450 if step % 3 else 600) for step in range(12)],
        [pool(step, 400, 90, whole=490) for step in range(12)],
        [pool(step, 400, None) for step in range(12)],
    ],
    ids=["it is taken by the program itself", "only for a moment", "the pool still grows", "not reported"],
)
def test_a_block_that_is_or_may_be_had_is_none(pools: list[list[Reading]]):
    assert blocks(*pools) == []


def test_only_gpus_take_one_block():
    assert blocks(*(pool(step, 400, 450) for step in range(12)), platform="tpu") == []


def used(step: int, mib: float) -> Observation:
    reading = Reading(
        source="allocator",
        device="gpu:0",
        step=step,
        time_s=float(step),
        in_use_bytes=int(mib * MIB),
        limit_bytes=1000 * MIB,
    )
    return Observation(step=step, time_s=float(step), readings=(reading,))


def test_growth_that_meets_the_limit_soon_is_near_oom_once_even_when_it_gets_there():
    settings = MonitorSettings(growth_steps=50, near_oom_steps=300)
    (event,) = run(NearOomDetector(settings), [used(step, min(999, 300 + step)) for step in range(800)])
    assert event.step == pytest.approx(400, abs=15), "300 steps before 1000 MiB"
    assert "gpu:0 meets its limit of 1000 MiB in about" in event.message
    assert "grows by 1.0 MiB a step since step 0" in event.message
    assert event.figures["steps_left"] == pytest.approx(300, abs=10)


def test_growth_that_ends_or_is_far_from_the_limit_is_none():
    settings = MonitorSettings(growth_steps=50, near_oom_steps=300)
    assert run(NearOomDetector(settings), [used(step, 300 + min(step, 80)) for step in range(800)]) == []
    assert run(NearOomDetector(settings), [used(step, 300 + step / 10) for step in range(800)]) == []
