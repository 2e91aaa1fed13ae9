"""Growth of the host's memory is an event; caches that fill, noise and arrays on the CPU are none."""

from __future__ import annotations

import random
import time
import types
from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem_callbacks.analysis.host_growth import HostGrowthDetector
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.probes.host_objects import largest_containers
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.settings import MonitorSettings
from jaxmem_callbacks.records.units import GIB, MIB, parse_bytes

STEPS = 40
NOISE = random.Random(0)  # noqa: S311 - no secret


def events(resident, steps, arrays=None, *, listed=True):
    """What is told of a run whose resident memory is a function of the step."""
    detector = HostGrowthDetector(MonitorSettings(growth_steps=STEPS))
    told = []
    for step in range(steps):
        noise = NOISE.randint(-MIB, MIB)
        reading = Reading(
            source="host", device="host", step=step, time_s=step, resident_bytes=int(resident(step)) + noise
        )
        census = None if arrays is None else _census(step, int(arrays(step)), listed=listed)
        told += detector.detect(Observation(step=step, time_s=step, readings=[reading], arrays=census))
    return told


def _census(step, size, *, listed):
    group = ArrayGroup(
        shape=(size,),
        dtype="uint8",
        placement="",
        devices=("cpu:0",),
        spread=1,
        replicated=False,
        count=1,
        bytes=size if listed else 1,
        site="train.py:1",
    )
    return ArrayCensus(step=step, time_s=step, groups=(group,), left_out_bytes=0 if listed else size)


@pytest.mark.parametrize(
    "resident",
    [
        lambda step: GIB + 4 * MIB * step,
        lambda step: GIB + 2 * MIB * step + (300 * MIB if step % 50 == 0 else 0),
        lambda step: 8 * GIB + 100 * MIB * (step // 20),
    ],
    ids=["each step", "beside evaluations", "each epoch"],
)
def test_what_is_kept_on_the_host_is_told_once(resident):
    (event,) = events(resident, 900)
    assert (event.kind, event.device) == ("growth", "host")
    assert event.message.startswith("The host's memory has grown since step ")
    assert event.figures["bytes_more"] >= 256 * MIB
    assert event.step <= 700


@pytest.mark.parametrize(
    "resident",
    [
        lambda step: GIB + 8 * MIB * min(step, 100),
        lambda step: GIB + 8 * MIB * min(step, 300),
        lambda step: GIB + (step % 60) * 20 * MIB,
        lambda step: GIB + 0.2 * MIB * step,
        lambda step: GIB,
    ],
    ids=["a cache", "a longer cache", "emptied lists", "a little", "nothing"],
)
def test_a_healthy_host_is_silent(resident):
    assert events(resident, 900) == []


@pytest.mark.parametrize("listed", [True, False], ids=["alike", "each of a shape of its own"])
def test_arrays_on_the_cpu_are_told_as_arrays_alone(listed):
    assert events(lambda step: GIB + 4 * MIB * step, 900, arrays=lambda step: 4 * MIB * step, listed=listed) == []


def test_the_event_names_what_holds_a_tenth_of_the_growth_and_more():
    asked = []
    detector = HostGrowthDetector(
        MonitorSettings(growth_steps=STEPS), lambda least: asked.append(least) or ("a list of 9 ndarray, some 2.0 GiB",)
    )
    found = []
    for step in range(900):
        reading = Reading(source="host", device="host", step=step, time_s=step, resident_bytes=GIB + 4 * MIB * step)
        found += detector.detect(Observation(step=step, time_s=step, readings=[reading], arrays=None))
    (event,) = found
    assert event.message.endswith(" The largest that Python holds: a list of 9 ndarray, some 2.0 GiB.")
    assert asked == [event.figures["bytes_more"] // 10], "once an event"


KEPT = {
    "a list of 64 ndarray, some 61.0 MiB": lambda: [np.ones(125_000) for _ in range(64)],
    "a dict of 80 bytes, some 76.3 MiB": lambda: types.SimpleNamespace(
        cache={at: bytes(1_000_000) for at in range(80)}
    ),
    "a deque of 100 dict, some 76.3 MiB": lambda: deque({"x": np.ones(100_000), "step": at} for at in range(100)),
    "a list of 5000 tuple, some 78.4 MiB": lambda: [(at, bytearray(16_384)) for at in range(5000)],
}


@pytest.mark.parametrize("words", KEPT)
def test_a_container_that_grows_is_named_by_what_it_holds(words):
    before = largest_containers(32 * MIB)
    kept = KEPT[words]()
    named, _, size = words.partition(", some ")
    (found,) = set(largest_containers(32 * MIB)) - set(before)
    assert found.startswith(f"{named}, some ")
    assert parse_bytes(found.partition(", some ")[2]) == pytest.approx(parse_bytes(size), rel=0.02)
    del kept
    assert largest_containers(32 * MIB) == before


def test_jaxs_arrays_are_none_of_pythons_and_looking_is_cheap():
    arrays = [jnp.ones(200_000) for _ in range(64)]
    many = [[at] for at in range(200_000)]
    begun = time.thread_time()
    assert not [each for each in largest_containers(32 * MIB) if "Array" in each]
    assert time.thread_time() - begun < 0.5, (
        "of which 0.2 are spent looking; once an event, on the monitor's own thread"
    )
    assert len(arrays) + len(many) == 200_064
