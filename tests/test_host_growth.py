"""Growth of the host's memory is an event; caches that fill, noise and arrays on the CPU are none."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
import types
from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem_callbacks.analysis.array_detectors import HostGrowthDetector
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.probes.host import largest_containers
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading
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
    assert event.message.endswith(" Largest Python containers: a list of 9 ndarray, some 2.0 GiB.")
    assert asked == [event.figures["bytes_more"] // 10], "once an event"


kept = None  # a variable of this module's, which is a user's


class Trainer:
    """An instance whose attribute grows."""

    def __init__(self, history):
        self.history = history


KEPT = {
    "a list of 64 ndarray, some 61.0 MiB": lambda: [np.ones(125_000) for _ in range(64)],
    "a dict of 80 bytes, some 76.3 MiB": lambda: types.SimpleNamespace(
        cache={at: bytes(1_000_000) for at in range(80)}
    ),
    "a deque of 100 dict, some 76.3 MiB": lambda: deque({"x": np.ones(100_000), "step": at} for at in range(100)),
    "a list of 5000 tuple, some 78.4 MiB": lambda: [(at, bytearray(16_384)) for at in range(5000)],
    "a list of 64 Trainer, some 61.0 MiB": lambda: Trainer([Trainer(np.ones(125_000)) for _ in range(64)]),
}


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    globals()["kept"] = None


@pytest.mark.parametrize("words", KEPT)
def test_a_container_that_grows_is_named_with_its_variable_and_what_it_holds(words):
    before = largest_containers(32 * MIB)
    globals()["kept"] = KEPT[words]()
    named, _, size = words.partition(", some ")
    (found,) = set(largest_containers(32 * MIB)) - set(before)
    assert re.match(rf"[\w.]*kept[\w.]*, {named}, some ", found), found
    assert parse_bytes(found.partition(", some ")[2]) == pytest.approx(parse_bytes(size), rel=0.02)
    globals()["kept"] = None
    assert largest_containers(32 * MIB) == before


def test_a_module_with_more_variables_than_a_look_can_take_hides_no_other(tmp_path, monkeypatch):
    wide = types.ModuleType("wide")
    wide.__file__ = str(tmp_path / "wide.py")
    for at in range(4000):
        setattr(wide, f"table_{at}", tuple((each,) for each in range(60)))
    monkeypatch.setattr(sys, "modules", {"wide": wide} | sys.modules)
    globals()["kept"] = KEPT["a list of 64 Trainer, some 61.0 MiB"]()
    assert any("a list of 64 Trainer" in each for each in largest_containers(32 * MIB))


def test_memory_that_is_not_held_twice_is_counted_once():
    whole = np.ones(5_000_000)
    globals()["kept"] = [[whole] * 1000, [whole[at:] for at in range(1000)]]
    assert all("38.1 MiB" in each for each in largest_containers(32 * MIB))
    globals()["kept"] = [np.ones(125_000) for _ in range(64)]
    globals()["kept"] = [globals()["kept"], list(globals()["kept"])]
    assert len(largest_containers(32 * MIB)) == 1


def test_a_mapped_file_holds_nothing(tmp_path):
    np.save(tmp_path / "data.npy", np.ones(5_000_000))
    globals()["kept"] = [np.load(tmp_path / "data.npy", mmap_mode="r") for _ in range(64)]
    assert largest_containers(32 * MIB) == ()


@pytest.mark.skipif(sys.version_info < (3, 13), reason="a look at local variables would keep them alive")
def test_local_variables_are_seen_where_looking_leaves_nothing_behind():
    seen = [np.ones(125_000) for _ in range(64)]
    (found,) = largest_containers(32 * MIB)
    assert found.startswith("seen in test_local_variables_are_seen")
    assert len(seen) == 64


class Odd:
    """Raises wherever it can be touched."""

    @property
    def __class__(self):
        raise RuntimeError

    def __sizeof__(self):
        raise RuntimeError

    def __len__(self):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError


class OddType(type):
    """A type that raises when it is compared or asked for its module."""

    def __eq__(cls, other):
        raise ValueError

    __hash__ = None

    @property
    def __module__(cls):
        raise ValueError


def test_odd_objects_lose_no_event():
    odd = [Odd(), OddType("Of", (), {})(), *(Odd() for _ in range(70))]
    globals()["kept"] = [odd[:2], odd, [np.ones(125_000) for _ in range(64)]]
    assert "a list of 64 ndarray" in "".join(largest_containers(32 * MIB))


def test_a_tuple_that_another_thread_builds_is_not_touched():
    """CPython resizes such a tuple in place, and raises where anybody else refers to it."""
    failed, done = [], threading.Event()

    def build():
        for _ in range(20):
            try:
                tuple(time.sleep(0.0002) for _ in range(100))
            except SystemError as error:
                failed.append(error)
        done.set()

    globals()["kept"] = [[at] for at in range(200_000)]
    thread = threading.Thread(target=build)
    thread.start()
    while not done.is_set():
        largest_containers(32 * MIB)
    thread.join()
    assert failed == []


def test_a_look_lets_go_in_time_and_jaxs_arrays_weigh_nothing():
    globals()["kept"] = [jnp.ones(200_000) for _ in range(64)]
    globals()["many"] = [[[at, bytes(70)] for at in range(70)] for _ in range(20_000)]
    begun = time.monotonic()
    assert largest_containers(1 << 34) == ()
    assert time.monotonic() - begun < 1.0, "0.05 are spent looking; once an event, on the monitor's own thread"
    assert "Array" not in "".join(largest_containers(32 * MIB))
    del globals()["many"]
