"""Whether a trace can have happened: events enter; a refusal leaves that names the first event that cannot follow the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.traces import Alloc, Free, ProgramEnd, ProgramStart, StepMark, Trace, TraceEvent


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
        What is alive at their end: id -> bytes.
    """
    memory = _Memory()
    for number, event in enumerate(events):
        problem = memory.take(event)
        if problem is not None:
            msg = (
                f"The trace {name!r} contradicts itself at event {number} (step {event.step}): {problem}. Expected a whole "
                "trace, as MemoryMonitor with `trace_steps` writes it; record it again."
            )
            raise SimulationError(msg)
    return memory.alive


@final
class _Memory:
    """What is alive while a trace is read."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self._live_bytes = 0
        self._seen: set[int] = set()
        self._running: set[int] = set()
        self._runs: set[int] = set()

    def take(self, event: TraceEvent) -> str | None:
        """What is wrong with the next event; None where nothing is."""
        if isinstance(event, Alloc):
            return self._come(event.id, event.bytes)
        if isinstance(event, Free):
            return self._go(event.id)
        if isinstance(event, ProgramStart):
            return self._start(event)
        if isinstance(event, ProgramEnd):
            problem = None if event.run in self._running else f"the run {event.run} ends without having begun"
            self._running.discard(event.run)
            return problem
        return self._marked(event)

    def _come(self, name: int, size: int) -> str | None:
        if name in self._seen:
            return f"the array {name} comes twice"
        if size < 0:
            return f"the array {name} has {size} bytes"
        self._seen.add(name)
        self.alive[name] = size
        self._live_bytes += size
        return None

    def _go(self, name: int) -> str | None:
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
                problems.append(self._go(output.reuses))
            problems.append(self._come(output.id, output.bytes))
        return next(filter(None, problems), None)

    def _marked(self, event: StepMark) -> str | None:
        if event.live_bytes is None or event.live_bytes == self._live_bytes:
            return None
        return f"{event.live_bytes} live bytes were counted, and the events add up to {self._live_bytes}"
