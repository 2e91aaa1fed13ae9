"""Checkpoint saves: when one ran, and what was held meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
