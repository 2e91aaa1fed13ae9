"""MemoryEvent: something that happened to a run's memory, in words a user can act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
    """One episode, told once.

    Attributes:
        kind: What happened.
        step: The step that had just completed when it was noticed.
        time_s: Seconds since the epoch.
        device: Device label, or the program's name for events about programs.
        message: One or two sentences: what, since when, with the figures.
        action: What to do about it, as a line to type where there is one.
        figures: The numbers behind it, in bytes or shares as the key says (``limit_bytes``, ``headroom_share``).
    """

    kind: EventKind
    step: int
    time_s: float
    device: str
    message: str
    action: str
    figures: Mapping[str, int | float | str] = field(default_factory=dict)
