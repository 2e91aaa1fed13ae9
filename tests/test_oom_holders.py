"""Who holds memory after a failure: results of the failed call are told as such, and what the driver counts beside JAX's pool."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxmem_callbacks.probes.device_memory import DriverProbe
from jaxmem_callbacks.records.oom import Holder, OnTheCard
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.recovery.reporting import on_the_cards
from jaxmem_callbacks.recovery.reports.live_buffers import FAILED, find_live_buffers
from jaxmem_callbacks.recovery.reports.remedies import Forecasts, remedies
from jaxmem_callbacks.writers.oom_report import oom_markdown
from tests import forked
from tests.oom_reports import hostile_report
from tests.test_probes_driver import GPUS, Nvml

pytestmark = pytest.mark.core
GIB = 2**30
WIDTH = 2**19


SCRIPT = Path(__file__).with_name("failed_results.py")


@pytest.fixture(scope="module")
def told():
    """What a process said that ran out of memory in three ways, each seen only when a result was waited for."""
    done = forked.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["a function", "a step that donates", "a function of a failed result"])
def test_results_of_a_failed_call_are_none_of_its_arguments(told, way):
    holders, total, size = told[way]
    (failed,) = [holder for holder in holders if holder["name"] == "state (train.py)"]
    assert (failed["known_by"], failed["kind"]) == (FAILED, "results of the failed call")
    assert (failed["count"], failed["bytes"]) == (1, size)
    assert total >= size
    # An array of the argument's shape that can be read is told as before.
    (kept,) = [holder for holder in holders if "kept (train.py)" in holder["name"]]
    assert kept["known_by"] != FAILED
    rebuilt = [Holder(**{**holder, "devices": tuple(holder["devices"])}) for holder in holders]
    advised = remedies(None, Forecasts(), rebuilt, cause="capacity", lacking_bytes=1, platform="cpu")
    assert not any("del state" in line for remedy in advised for line in remedy.lines)


def test_a_deleted_array_and_one_that_is_not_ready_are_not_asked():
    gone = jnp.ones(WIDTH)
    gone.delete()
    before = find_live_buffers((), {}, are_the_calls=False).failed_bytes
    kept = jnp.ones(WIDTH)
    assert find_live_buffers((), {id(kept): "kept"}, are_the_calls=False).failed_bytes <= before


class Busy(Nvml):
    """A machine on whose first GPU several processes work."""

    def __init__(self, used, listed):
        super().__init__(used)
        self.listed = listed

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        if self.listed is None:
            raise LookupError
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.listed.get(handle, ())]


def reading(label, pool):
    return Reading(source="allocator", device=label, step=-1, time_s=0.0, pool_bytes=pool)


def cards(listed, pool=10 * GIB):
    library = Busy({"GPU-a": 40 * GIB, "GPU-b": GIB}, listed)
    return on_the_cards([reading("gpu:0", pool)], DriverProbe(GPUS, library=library, variables={}))


def test_what_others_hold_of_a_gpu_is_told_where_the_driver_shows_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    first, second = cards({"GPU-a": [(os.getpid(), 12 * GIB), (4711, 20 * GIB), (4712, None)]})
    assert first == OnTheCard(
        device="gpu:0",
        used_bytes=40 * GIB,
        pool_bytes=10 * GIB,
        own_bytes=12 * GIB,
        others=((4711, 20 * GIB), (4712, None)),
        frameworks=first.frameworks,
    )
    assert "cupy" in first.frameworks
    assert (second.device, second.pool_bytes, second.others) == ("gpu:1", None, ())
    report = dataclasses.replace(hostile_report(), on_the_cards=(dataclasses.replace(first, frameworks=("cupy",)),))
    told = oom_markdown(report)
    assert "On gpu:0 the driver counts 40.0 GiB as taken; JAX's pool is 10.0 GiB of it." in told
    assert (
        "This process holds 2.0 GiB outside of the pool: the CUDA context, its libraries, cupy, which is imported."
        in told
    )
    assert "Process 4711 holds 20.0 GiB." in told
    assert "Process 4712 holds memory, how much the driver does not report." in told


def test_a_driver_that_hides_processes_still_says_what_is_taken():
    first, _ = cards(None)
    assert (first.used_bytes, first.own_bytes, first.others) == (40 * GIB, None, ())
    report = dataclasses.replace(hostile_report(), on_the_cards=(dataclasses.replace(first, frameworks=("torch",)),))
    assert "This process has imported torch, whose memory is not in JAX's pool." in oom_markdown(report)
    assert "outside of the pool" not in oom_markdown(dataclasses.replace(report, on_the_cards=()))


def test_results_of_the_failed_call_are_summed_in_the_report():
    report = dataclasses.replace(hostile_report(), failed_bytes=GIB)
    assert (
        "1.0 GiB of it are results of the failed call, which cannot be read: they are no state to go on from"
        in oom_markdown(report)
    )
