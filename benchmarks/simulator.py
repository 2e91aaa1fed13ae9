"""Allocations a second of the simulated allocators; what recording costs. Writes results/simulator_jax_<version>.json.

    python -m benchmarks.simulator

Processor time of this process, the median and the best of several rounds, because other work on the machine slows each of them.
An allocation is one request and, for all but those alive at the end, its free.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks.sources import write_result
from jaxmem_callbacks.probes.allocations import AllocationsProbe
from jaxmem_callbacks.records.traces import (
    Alloc,
    AllocatorSettings,
    Free,
    ProgramEnd,
    ProgramStart,
    StepMark,
    Trace,
    TraceHead,
)
from jaxmem_callbacks.simulator.allocators import Bfc
from jaxmem_callbacks.simulator.replay import replay

_ROUNDS, _COUNT = 7, 100_000
_DEVICE = 80 * 2**30
_SETTINGS: dict[str, dict[str, Any]] = {
    "preallocated": {},
    "preallocated, before jaxlib 0.11": {"partitioned": False},
    "growing": {"preallocate": False},
    "cuda_async": {"allocator": "cuda_async"},
    "platform": {"allocator": "platform"},
}


def requests(alive: int) -> list[tuple[int, int]]:
    """Sizes from 4 bytes to 64 MiB, each with the number of the living block that is freed before it, or -1."""
    draw = random.Random(0)  # noqa: S311 - a workload, the same every time
    sizes = [int(2 ** draw.uniform(2, 26)) for _ in range(_COUNT)]
    return [(size, draw.randrange(alive) if number >= alive else -1) for number, size in enumerate(sizes)]


def allocate_all(asked: list[tuple[int, int]], *, preallocate: bool) -> Callable[[], int]:
    """The pool alone: what to time, which counts its allocations."""

    def run() -> int:
        pool, held = Bfc(_DEVICE, preallocate=preallocate, partitioned=True), []
        for size, freed in asked:
            if freed >= 0:
                held[freed], held[-1] = held[-1], held[freed]
                pool.free(held.pop())
            address = pool.allocate(size)
            assert address is not None
            held.append(address)
        return len(asked)

    return run


def trace_of(asked: list[tuple[int, int]], every: int = 50) -> Trace:
    """The same requests as a trace, with a program and a mark after every so many."""
    events: list[Any] = []
    held: list[int] = []
    for number, (size, freed) in enumerate(asked):
        step = number // every
        if freed >= 0:
            held[freed], held[-1] = held[-1], held[freed]
            events.append(Free(id=held.pop(), step=step))
        events.append(Alloc(id=number, bytes=size, step=step))
        held.append(number)
        if number % every == every - 1:
            start = ProgramStart(run=step, program="step", step=step, temp_bytes=2**30)
            events += [start, ProgramEnd(run=step, step=step), StepMark(step=step)]
    return Trace(head=TraceHead(name="bench"), events=tuple(events))


def replay_all(trace: Trace, settings: dict[str, Any]) -> Callable[[], int]:
    """A whole replay, the check of the trace and the timeline included."""

    def run() -> int:
        timeline = replay(trace, AllocatorSettings(device_bytes=_DEVICE, **settings))
        assert timeline.survived
        return timeline.allocations

    return run


def rates(run: Callable[[], int]) -> dict[str, int]:
    """Allocations a second of processor time."""
    found: list[float] = []
    for _ in range(_ROUNDS):
        begun = time.process_time()
        count = run()
        found.append(count / (time.process_time() - begun))
    return {"median_a_second": round(statistics.median(found)), "best_a_second": round(max(found))}


def recording_us(arrays: int, fresh: int = 40) -> dict[str, float]:
    """Microseconds of processor time that one reading takes with so many live arrays, some of them new."""
    held = [jnp.zeros((number % 7 + 1,)) for number in range(arrays)]
    probe = AllocationsProbe()
    probe.read(0)
    found: list[float] = []
    for step in range(1, 60):
        held[:fresh] = [jnp.zeros((number % 7 + 1,)) for number in range(min(fresh, arrays))]
        begun = time.thread_time()
        probe.read(step)
        found.append(1e6 * (time.thread_time() - begun))
    return {"live_arrays": arrays, "new_a_call": min(fresh, arrays), "median_us": round(statistics.median(found), 1)}


def main() -> None:
    """Measure and write the result file."""
    pools = {
        f"{name}, {alive} blocks alive": rates(allocate_all(requests(alive), preallocate=name == "preallocated"))
        for name in ("preallocated", "growing")
        for alive in (100, 1000)
    }
    trace = trace_of(requests(1000))
    replays = {name: rates(replay_all(trace, settings)) for name, settings in _SETTINGS.items()}
    recording = [recording_us(arrays) for arrays in (100, 1000, 5000)]
    write_result("simulator", allocations=_COUNT, pool_alone=pools, replay=replays, recording_a_call=recording)
    print(json.dumps({"pool_alone": pools, "replay": replays, "recording": recording}, indent=1))


if __name__ == "__main__":
    main()
