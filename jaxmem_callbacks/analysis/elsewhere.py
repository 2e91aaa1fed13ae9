"""Elsewhere: events of a run's other processes enter; like ones together, with the processes that told them, leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.records.runs import MemoryEvent

_EACH = 3  # processes that are told one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldElsewhere:
    """An event, as the first of ``processes`` told it; the others told it in the same words."""

    event: MemoryEvent
    processes: tuple[int, ...]

    @property
    def where(self) -> str:
        """``process 3``, ``processes 1, 2`` or ``7 processes: 1 to 9``."""
        first, *rest = self.processes
        if not rest:
            return f"process {first}"
        if len(self.processes) <= _EACH:
            return f"processes {', '.join(map(str, self.processes))}"
        return f"{len(self.processes)} processes: {first} to {rest[-1]}"


@final
class Elsewhere:
    """Gathers them. Processes of one program mostly meet the same at the same step, a thousand of them too."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], MemoryEvent] = {}
        self._processes: dict[tuple[str, str], set[int]] = {}

    def add(self, process: int, event: MemoryEvent) -> None:
        """Take in one event of one process."""
        key = event.kind, event.message
        self._events.setdefault(key, event)
        self._processes.setdefault(key, set()).add(process)

    @property
    def told(self) -> Sequence[ToldElsewhere]:
        """Each event once, by its step."""
        found = [
            ToldElsewhere(event=event, processes=tuple(sorted(self._processes[key])))
            for key, event in self._events.items()
        ]
        return sorted(found, key=lambda each: (each.event.step, each.processes))
