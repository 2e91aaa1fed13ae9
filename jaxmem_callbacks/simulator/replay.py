"""The replay of a trace under an allocator's settings."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Literal, final

from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.traces import (
    Alloc,
    AllocationFailure,
    AllocatorSettings,
    Free,
    ProgramEnd,
    ProgramStart,
    StepMark,
    Timeline,
    TimelinePoint,
    Trace,
    TraceEvent,
)
from jaxmem_callbacks.simulator.allocators import PAGE_BYTES, Bfc, Pages


def check_trace(trace: Trace) -> None:
    """Refuse a trace that contradicts itself.

    Raises:
        SimulationError: an array that comes twice or goes without having come, sizes below 0, a program that ends without having
            begun, or a mark whose live bytes are not what the events before it add up to.
    """
    check_events(trace.events, trace.head.name)


def check_events(events: Iterable[TraceEvent], name: str) -> dict[int, int]:
    """The same for events alone.

    Returns:
        The arrays that are alive at their end: id -> bytes.
    """
    memory = _Memory()
    for number, event in enumerate(events):
        problem = memory.check(event)
        if problem is not None:
            msg = (
                f"The trace {name!r} contradicts itself at event {number} (step {event.step}): {problem}. Expected a whole "
                "trace, as MemoryMonitor with `trace_steps` writes it; record it again."
            )
            raise SimulationError(msg)
    return memory.alive


@final
class _Memory:
    """The live arrays while a trace is checked."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self._live_bytes = 0
        self._seen: set[int] = set()
        self._running: set[int] = set()
        self._runs: set[int] = set()

    def check(self, event: TraceEvent) -> str | None:
        """The contradiction in the next event, or None."""
        if isinstance(event, Alloc):
            return self._add(event.id, event.bytes)
        if isinstance(event, Free):
            return self._remove(event.id)
        if isinstance(event, ProgramStart):
            return self._start(event)
        if isinstance(event, ProgramEnd):
            problem = None if event.run in self._running else f"the run {event.run} ends without having begun"
            self._running.discard(event.run)
            return problem
        return self._compare(event)

    def _add(self, name: int, size: int) -> str | None:
        if name in self._seen:
            return f"the array {name} comes twice"
        if size < 0:
            return f"the array {name} has {size} bytes"
        self._seen.add(name)
        self.alive[name] = size
        self._live_bytes += size
        return None

    def _remove(self, name: int) -> str | None:
        if name not in self.alive:
            return f"the array {name} goes without being there"
        self._live_bytes -= self.alive.pop(name)
        return None

    def _start(self, event: ProgramStart) -> str | None:
        if event.run in self._runs:
            return f"the run {event.run} begins twice"
        if event.temp_bytes is not None and event.temp_bytes < 0:
            return f"the temporaries of {event.program} have {event.temp_bytes} bytes"
        self._runs.add(event.run)
        self._running.add(event.run)
        problems: list[str | None] = []
        for output in event.outputs:
            if output.reuses is not None:
                problems.append(self._remove(output.reuses))
            problems.append(self._add(output.id, output.bytes))
        return next(filter(None, problems), None)

    def _compare(self, event: StepMark) -> str | None:
        if event.live_bytes is None or event.live_bytes == self._live_bytes:
            return None
        return f"{event.live_bytes} live bytes were counted, and the events add up to {self._live_bytes}"


Requests = list[tuple[str, int]]  # the name of each allocation, and its bytes


def allocator_of(settings: AllocatorSettings) -> Bfc | Pages:
    """The allocator for these settings."""
    device_bytes = settings.device_bytes - settings.outside_bytes
    share = int(settings.device_bytes * settings.fraction)
    if settings.allocator == "bfc":
        # GpuAllocatorConfig: the fraction is of the whole memory, and rounded up to pages.
        limit = -(-share // PAGE_BYTES) * PAGE_BYTES
        return Bfc(limit, preallocate=settings.preallocate, partitioned=settings.partitioned, device_bytes=device_bytes)
    if settings.allocator == "platform":
        return Pages(device_bytes)
    # The pool's release threshold: the fraction where it is preallocated, else nothing is kept.
    return Pages(device_bytes, kept_bytes=share if settings.preallocate else 0)


def replay(trace: Trace, settings: AllocatorSettings) -> Timeline:
    """Run a trace through an allocator.

    Raises:
        SimulationError: a trace that contradicts itself.
    """
    check_trace(trace)
    run = _Replay(settings)
    for number, event in enumerate(trace.events):
        kind = type(event)
        if kind is Alloc:
            placed = run.alloc(number, event)  # type: ignore[arg-type]
        elif kind is Free:
            run.drop(event.id)  # type: ignore[union-attr]
            continue
        elif kind is ProgramStart:
            placed = run.start(number, event)  # type: ignore[arg-type]
        elif kind is ProgramEnd:
            run.end(event.run)  # type: ignore[union-attr]
            continue
        else:
            run.mark(event)  # type: ignore[arg-type]
            continue
        if not placed:
            break
    return run.timeline()


@final
class _Replay:
    """The state of one replay."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._on_demand = settings.defragment == "when_needed"
        self._memory = allocator_of(settings)
        self._arrays: dict[int, tuple[int, int]] = {}  # id -> address, bytes asked for
        self._temporaries: dict[int, int] = {}  # run -> address
        self._points: list[TimelinePoint] = []
        self._failure: AllocationFailure | None = None
        self._defragmented: list[int] = []
        self._unknown: dict[str, None] = {}
        self._live_bytes = self._allocations = self._peak = self._step = 0
        self._least = self._memory.largest_block_bytes()

    def alloc(self, number: int, event: Alloc) -> bool:
        """Place an array."""
        self._step = event.step
        address = self._memory.allocate(event.bytes)
        if address is None:
            placed = self._allocate_all(number, [(event.name or f"array {event.id}", event.bytes)])
            if placed is None:
                return False
            (address,) = placed
        self._allocations += 1
        self._arrays[event.id] = address, event.bytes
        self._live_bytes += event.bytes
        self._track_extremes()
        return True

    def drop(self, name: int) -> None:
        """Free an array."""
        address, size = self._arrays.pop(name)
        self._live_bytes -= size
        self._memory.free(address)

    def start(self, number: int, event: ProgramStart) -> bool:
        """Place a program's results and its temporaries."""
        self._step = event.step
        fresh = [output for output in event.outputs if output.reuses is None]
        requests = [(f"{event.program}, result {output.name or output.id}", output.bytes) for output in fresh]
        if event.temp_bytes is None:
            self._unknown[event.program] = None
        requests.append((f"{event.program}, temporaries", event.temp_bytes or 0))
        placed = self._allocate_all(number, requests)
        if placed is None:
            return False
        self._temporaries[event.run] = placed.pop()
        self._allocations += len(requests)
        for output in event.outputs:
            if output.reuses is not None:
                address, size = self._arrays.pop(output.reuses)
                self._live_bytes -= size
            else:
                address = placed.pop(0)
            self._arrays[output.id] = address, output.bytes
            self._live_bytes += output.bytes
        self._track_extremes()
        return True

    def end(self, run: int) -> None:
        """Free a program's temporaries."""
        self._memory.free(self._temporaries.pop(run))

    def mark(self, event: StepMark) -> None:
        """Add a point at a step's end, and defragment where that was requested."""
        self._step = event.step
        self._add_point()
        if event.step in self._settings.defragment_steps:
            self._defragment()
            self._least = self._memory.largest_block_bytes()

    def timeline(self) -> Timeline:
        """The timeline up to now."""
        if self._failure is not None or not self._points:
            self._add_point()
        return Timeline(
            settings=self._settings,
            points=tuple(self._points),
            failure=self._failure,
            allocations=self._allocations,
            peak_in_use_bytes=self._memory.peak_in_use_bytes,
            defragmented=tuple(self._defragmented),
            unknown_temporaries=tuple(self._unknown),
        )

    def _allocate_all(self, number: int, requests: Requests) -> list[int] | None:
        """Allocate all or none; defragment in between where that is enabled and helps."""
        placed, failure = self._try_all(number, requests)
        if failure is not None and self._on_demand and failure.why == "fragmentation":
            for address in placed:
                self._memory.free(address)
            self._defragment()
            placed, failure = self._try_all(number, requests)
        self._failure = failure
        return placed if failure is None else None

    def _try_all(self, number: int, requests: Requests) -> tuple[list[int], AllocationFailure | None]:
        placed: list[int] = []
        for what, size in requests:
            address = self._memory.allocate(size)
            if address is None:
                return placed, self._failed(number, what, size)
            placed.append(address)
        return placed, None

    def _failed(self, number: int, what: str, size: int) -> AllocationFailure:
        free = self._memory.free_bytes()
        why: Literal["capacity", "fragmentation"] = "fragmentation" if free >= size else "capacity"
        return AllocationFailure(
            step=self._step,
            event=number,
            what=what,
            asked_bytes=size,
            free_bytes=free,
            largest_block_bytes=self._memory.largest_block_bytes(),
            why=why,
        )

    def _defragment(self) -> None:
        """Move every array off the device and back, the largest first; temporaries of running programs stay where they are.

        Where they do not go back, all stays as it was: the real one plans before it moves anything.
        """
        memory, arrays = copy.deepcopy(self._memory), self._arrays
        self._arrays = dict(arrays)
        order = sorted(arrays, key=lambda name: -arrays[name][1])
        for name in order:
            self._memory.free(arrays[name][0])
        for name in order:
            address = self._memory.allocate(arrays[name][1])
            if address is None:
                self._memory, self._arrays = memory, arrays
                return
            self._arrays[name] = address, arrays[name][1]
        self._defragmented.append(self._step)

    def _track_extremes(self) -> None:
        """Update the extremes of the step."""
        memory = self._memory
        self._peak = max(self._peak, memory.in_use_bytes)
        self._least = min(self._least, memory.largest_block_bytes())

    def _add_point(self) -> None:
        memory = self._memory
        self._track_extremes()
        pool, largest = memory.pool_bytes, memory.largest_free_bytes()
        free = None if pool is None or largest is None else pool - memory.in_use_bytes
        self._points.append(
            TimelinePoint(
                step=self._step,
                live_bytes=self._live_bytes,
                in_use_bytes=memory.in_use_bytes,
                peak_in_use_bytes=self._peak,
                largest_free_bytes=largest,
                least_block_bytes=self._least,
                pool_bytes=pool,
                fragmentation=1 - largest / free if free and largest is not None else None,
            )
        )
        self._peak, self._least = memory.in_use_bytes, memory.largest_block_bytes()
