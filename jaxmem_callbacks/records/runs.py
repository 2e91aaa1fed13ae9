"""The records of a run: where it begins and ends, and its memory events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
        action: What to do about it, as a line to type where there is one.
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
