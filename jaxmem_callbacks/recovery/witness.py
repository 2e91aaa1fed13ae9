"""What a report takes from whoever watched the run, and how: a small protocol, which the monitor keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxmem_callbacks.analysis.timeseries import Point
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.runs import MemoryEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Witnessed:
    """The last that was seen of a run.

    Attributes:
        logdir: The run's folder, or None.
        step: The latest step that was told, or None.
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


class Witness(Protocol):
    """Whoever watched the run, such as a `MemoryMonitor`."""

    def witnessed(self) -> Witnessed:
        """What was seen so far; it waits for nothing."""
        ...
