"""Observation: everything the monitor saw since it last looked, as the sampler collected it and as detectors take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import AcrossProcesses, MemoryEvent, Reading, SaveSpan, Unavailable
from jaxmem_callbacks.records.traces import TraceEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The scalars that the user's step returned, as host floats.

    Attributes:
        step: The step they belong to.
        time_s: When the hook was given them, in seconds since the epoch.
        values: Name -> value.
    """

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compile and the step in which it happened."""

    step: int
    compilation: Compilation


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was seen between two looks.

    Attributes:
        step: The latest step that had completed, or -1 before the first.
        time_s: When the look ended, in seconds since the epoch.
        readings: Oldest first.
        unavailable: Figures that the probes could not read, and why.
        arrays: The groups of live arrays, where they were looked at.
        compilations: Compiles noticed, oldest first.
        metrics: The user's metrics that were ready.
        dropped: Stamps that were lost since the start because the ring was full.
        heaps: Heap maps that were taken, one a device.
        draws_heap: Whether there is to be a picture of them.
        processes: Figures of all processes of the run, on process 0 and where a preset asks for it.
        trace: Allocations that were recorded.
        messages: What the monitor reported of itself.
        saves: Checkpoint saves that ended since the look before, or run.
    """

    step: int
    time_s: float
    readings: Sequence[Reading] = ()
    unavailable: Sequence[Unavailable] = ()
    arrays: ArrayCensus | None = None
    compilations: Sequence[Compiled] = ()
    metrics: Sequence[Metrics] = field(default=())
    dropped: int = 0
    heaps: Sequence[HeapMap] = ()
    draws_heap: bool = True
    processes: AcrossProcesses | None = None
    trace: Sequence[TraceEvent] = ()
    messages: Sequence[str] = ()
    saves: Sequence[SaveSpan] = ()


class Detector(Protocol):
    """Turns observations into events: one event an episode, whatever the noise round its threshold."""

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """The events that begin in this observation."""
        ...
