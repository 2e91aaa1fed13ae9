"""The records of a run: readings of its probes, checkpoint saves, memory events, and where it begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrossFigure:
    """One figure over the processes, each of which sent its lowest, mean and highest since it sent before.

    Attributes:
        low: The lowest that any of them sent; bytes, a number or a share, as in the figure's name.
        low_process: Whose it is.
        mean: Of the processes' means; whole bytes for bytes.
        high: The highest.
        high_process: Whose it is.
        high_device: The device that had it, where that process has several; else empty.
        highs: Process -> the highest that it sent; of the figures whose curves a page shows for each process, else empty.
    """

    low: float
    low_process: int
    mean: float
    high: float
    high_process: int
    high_device: str = ""
    highs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrossProcesses:
    """What process 0 knows of all processes at one moment.

    Attributes:
        step: The latest step of process 0; the others may be some steps before or behind.
        time_s: Seconds since the epoch.
        processes: How many the run has.
        silent: Those that sent nothing for three rounds, or nothing at all; what they sent is left out.
        figures: Figure, such as ``in_use_bytes``, over those that sent it.
    """

    step: int
    time_s: float
    processes: int
    silent: tuple[int, ...] = ()
    figures: Mapping[str, AcrossFigure] = field(default_factory=dict)

    @property
    def heard(self) -> int:
        """How many sent something."""
        return self.processes - len(self.silent)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSpan:
    """A save as it was heard of.

    Attributes:
        began_s: When it began, in seconds since the epoch.
        ended_s: When it ended, or None while it runs.
        first_step: The latest step that was dispatched before it began, or -1.
        background: Whether it went on beside the training.
    """

    began_s: float
    ended_s: float | None
    first_step: int
    background: bool

    def includes(self, time_s: float) -> bool:
        """Whether it ran at that time."""
        return self.began_s <= time_s and (self.ended_s is None or time_s <= self.ended_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSave:
    """A save that ended, with the highest values that were read during it.

    Attributes:
        step: The latest step when its end was noticed.
        time_s: When it ended, in seconds since the epoch.
        first_step: The latest step that was dispatched before it began, or -1.
        began_s: When it began.
        background: Whether it went on beside the training.
        before: Figure such as ``in_use_bytes`` -> its latest value before, on the device that held most.
        highs: The same -> its highest value during the save; what was not read then is absent.
    """

    step: int
    time_s: float
    first_step: int
    began_s: float
    background: bool
    before: Mapping[str, int] = field(default_factory=dict)
    highs: Mapping[str, int] = field(default_factory=dict)


EventKind = Literal[
    "near_oom",
    "fragmentation",
    "growth",
    "donation_lost",
    "recompilation",
    "replication",
    "imbalance",
    "plan_stale",
    "prediction_off",
    "recovery",
    "out_of_memory",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent:
    """One episode, reported once.

    Attributes:
        kind: What happened.
        step: The step that had just completed when it was noticed.
        time_s: Seconds since the epoch.
        device: Device label, or the program's name for events about programs.
        message: One or two sentences: what, since when, with the figures.
        action: What to do about it, as a line to type where there is one; empty where nothing is left to do.
        figures: The numbers behind it, in bytes or shares as in the key (``limit_bytes``, ``headroom_share``).
    """

    kind: EventKind
    step: int
    time_s: float
    device: str
    message: str
    action: str
    figures: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """The first line of a run, repeated at the head of every part of its file.

    Attributes:
        time_s: When the part was begun, in seconds since the epoch.
        part: Number of the part within the run, from 1.
        versions: Package -> version.
        devices: What the run had: ``platform``, ``kind``, ``count``, ``processes``, and ``process`` where it is not the first.
        settings: The monitor's settings by name.
    """

    time_s: float
    part: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str | int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """What the monitor itself lost: steps that came faster than it looked.

    Attributes:
        step: The latest step that had completed.
        time_s: When it was noticed, in seconds since the epoch.
        stamps: How many since the run began.
    """

    step: int
    time_s: float
    stamps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What the monitor reported of itself on stderr: which part is switched off, or what it cannot show.

    Attributes:
        step: The latest step that had completed.
        time_s: When, in seconds since the epoch.
        message: In its words.
    """

    step: int
    time_s: float
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The last line of a run that was closed; a run that was killed has none.

    Attributes:
        time_s: When, in seconds since the epoch.
    """

    time_s: float
