"""Fragmentation: the share of free memory outside the largest free block, as XLA and XProf define it; 0 is unfragmented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.timeseries import Episode
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_BAND = 0.1  # an episode ends when the share has fallen by so much,
_QUIET = 10  # in so many readings in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation:
    """How split the free memory of one device is.

    Attributes:
        share: 1 - largest free block / free bytes, in [0, 1].
        free_bytes: Free in the pool (GPU), or in the limit where there is no pool (TPU).
        largest_free_bytes: The largest block that could be given out.
    """

    share: float
    free_bytes: int
    largest_free_bytes: int


def fragmentation_of(reading: Reading) -> Fragmentation | Unavailable:
    """The fragmentation that one allocator reading shows.

    The denominator is the pool: on GPU the pool grows towards the limit, and what was never taken from the driver is not split.
    """
    if reading.in_use_bytes is None:
        return _unknown(reading, "the allocator does not report the bytes in use")
    whole = reading.pool_bytes if reading.pool_bytes is not None else reading.limit_bytes
    if whole is None:
        return _unknown(reading, "the allocator reports neither a pool nor a limit")
    if reading.largest_free_bytes is None:
        return _unknown(
            reading, "the runtime does not report the largest free block (GPU: jaxlib 0.11 or newer with BFC does)"
        )
    # The pool already holds everything; only without one is reserved memory taken from the same limit.
    reserved = (reading.reserved_bytes or 0) if reading.pool_bytes is None else 0
    free = whole - reading.in_use_bytes - reserved
    if free <= 0:
        return Fragmentation(share=0.0, free_bytes=0, largest_free_bytes=reading.largest_free_bytes)
    share = min(1.0, max(0.0, 1 - reading.largest_free_bytes / free))
    return Fragmentation(share=share, free_bytes=free, largest_free_bytes=reading.largest_free_bytes)


@final
class FragmentationDetector:
    """Tells once when much of the free memory of a device cannot be given out in one block."""

    def __init__(self, settings: MonitorSettings) -> None:
        begin = settings.fragmentation_share
        self._least = settings.fragmentation_min_bytes
        self._episode = Episode(begin=begin, release=max(0.0, begin - _BAND), quiet=_QUIET)

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event: devices are judged together, by the worst, moment by moment."""
        events: list[MemoryEvent] = []
        for moment in _moments(observation):
            worst, found = max(moment, key=lambda pair: self._level(pair[1]))
            if self._episode.begins(self._level(found)):
                events.append(_event(worst, found))
        return events

    def _level(self, found: Fragmentation) -> float:
        return found.share if found.free_bytes >= self._least else 0.0


def _moments(observation: Observation) -> list[list[tuple[Reading, Fragmentation]]]:
    """Known fragmentations grouped by the moment they were read at."""
    moments: dict[tuple[float, int], list[tuple[Reading, Fragmentation]]] = {}
    for reading in observation.readings:
        found = fragmentation_of(reading) if reading.source == "allocator" else None
        if isinstance(found, Fragmentation):
            moments.setdefault((reading.time_s, reading.step), []).append((reading, found))
    return list(moments.values())


def _event(reading: Reading, found: Fragmentation) -> MemoryEvent:
    return MemoryEvent(
        kind="fragmentation",
        step=reading.step,
        time_s=reading.time_s,
        device=reading.device,
        message=(
            f"{found.share:.0%} of the free memory of {reading.device} is outside its largest free block, since step "
            f"{reading.step}: {format_bytes(found.free_bytes)} are free, and the largest block is "
            f"{format_bytes(found.largest_free_bytes)}."
        ),
        action=(
            "Free small long-lived arrays (kept losses or metrics: convert them with float() and let the arrays go), keep "
            "batch shapes constant, and preallocate, before JAX starts: "
            f"{advise('memory.environment', preset='gpu_preallocate')}."
        ),
        figures={
            "fragmentation_share": round(found.share, 4),
            "free_bytes": found.free_bytes,
            "largest_free_bytes": found.largest_free_bytes,
        },
    )


def _unknown(reading: Reading, reason: str) -> Unavailable:
    return Unavailable(figure="fragmentation", device=reading.device, reason=reason)
