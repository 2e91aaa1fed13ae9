"""What a failure's report needs from before it: a monitor's snapshot, call counts, and host memory held in reserve."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from jaxmem_callbacks.analysis.figures import Point
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.registry import Step
from jaxmem_callbacks.records.runs import MemoryEvent, Reading

BALLAST_BYTES = 48 * 2**20


@final
class MemoryReserve:
    """Address space that costs no memory until it is needed: nobody touches it.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int = BALLAST_BYTES) -> None:
        self._size = size
        self._held: list[mmap.mmap] = []  # one for each guard around the same code; appended and popped whole

    def hold(self) -> None:
        """Take it, where there is so much left."""
        try:
            self._held.append(mmap.mmap(-1, self._size))
        except (OSError, MemoryError, ValueError):  # there is little left already
            return

    def release(self) -> None:
        """Let go of what was taken last."""
        if self._held:
            self._held.pop().close()


@final
class CallCounts:
    """How often each step has been called up to now. Keeps no step alive."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Step, int] = weakref.WeakKeyDictionary()
        for step, _ in registry.steps():
            self._counts[step] = step.calls

    def called_since(self, step: Step) -> bool:
        """Whether a step was called after this moment."""
        return step.calls > self._counts.get(step, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSnapshot:
    """The latest state of a monitored run.

    Attributes:
        logdir: The run's folder, or None.
        step: The latest step, or None.
        readings: The latest of every source and device.
        events: Oldest first.
        history: Highest values over time, for a figure.
        needs: Program -> bytes of one step by its compiler.
        limit_bytes: What a device may use, or None.
    """

    logdir: Path | None = None
    step: int | None = None
    readings: Sequence[Reading] = ()
    events: Sequence[MemoryEvent] = ()
    history: Sequence[Point] = ()
    needs: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int | None = None


class Monitored(Protocol):
    """A monitor of the run, such as a `MemoryMonitor`."""

    def witnessed(self) -> MonitorSnapshot:
        """The state now, without waiting."""
        ...

    def tell(self, event: MemoryEvent) -> None:
        """Take in an event that the monitor did not see itself."""
        ...
