"""Readings: what a probe saw, from where and when. A figure that a platform does not report is None here, never 0 or -1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["allocator", "live_arrays", "programs", "host", "driver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Figures seen by one probe for one device (or for the host).

    Attributes:
        source: Which interface produced them; figures of different sources are never mixed under one name.
        device: Stable label such as ``gpu:0``; ``host`` for the process itself.
        step: The step that had just completed, or -1 before the first.
        time_s: Seconds since the epoch.
        in_use_bytes: Held at the moment of reading. On GPU this follows dispatch, not device time.
        reserved_bytes: Reserved for programs' temporaries beside ``in_use_bytes`` (TPU).
        peak_bytes_since_start: Largest ``in_use_bytes`` since the process began; never one step's peak.
        limit_bytes: What the allocator may use.
        pool_bytes: Obtained from the driver so far (GPU BFC).
        largest_free_bytes: Largest block that could be given out without growing the pool.
        live_array_bytes: Sum of the live arrays' bytes on this device.
        live_array_count: Number of live arrays on this device.
        resident_bytes: The process's resident memory (host).
        device_used_bytes: Taken on the whole device, by this process and all others, as its driver counts it.
    """

    source: Source
    device: str
    step: int
    time_s: float
    in_use_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes_since_start: int | None = None
    limit_bytes: int | None = None
    pool_bytes: int | None = None
    largest_free_bytes: int | None = None
    live_array_bytes: int | None = None
    live_array_count: int | None = None
    resident_bytes: int | None = None
    device_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unavailable:
    """A figure that cannot be had here; written once as text, never plotted as zero.

    Attributes:
        figure: What is missing, such as ``largest_free_bytes``.
        device: Device label, or ``host``.
        reason: Why, in words for the user: the rest of a sentence that begins "unknown, because".
    """

    figure: str
    device: str
    reason: str
