"""History: the windows of a whole run in bounded memory, for the memory-over-time figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jaxmem_callbacks.analysis.windows import Window

_KEPT = 2000  # more points than a figure has pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The highest values of one stretch of a run.

    Attributes:
        step: Its last step.
        time_s: When it ended, in seconds since the epoch.
        highs: Tag -> highest value.
        places: Tag -> the device that had it, where several were read.
    """

    step: int
    time_s: float
    highs: Mapping[str, float]
    places: Mapping[str, str] = field(default_factory=dict)


@final
class History:
    """Keeps the highs of all windows; when full, neighbours are joined and keep the higher value, so no peak is lost."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._points: list[Point] = []

    def add(self, window: Window) -> None:
        """Append one window."""
        highs = {tag: spread.high for tag, spread in window.spreads.items()}
        places = {tag: spread.high_at for tag, spread in window.spreads.items() if spread.high_at}
        self._points.append(Point(step=window.step, time_s=window.time_s, highs=highs, places=places))
        if len(self._points) > self._kept:
            pairs = [self._points[at : at + 2] for at in range(0, len(self._points), 2)]
            self._points = [_joined(pair) for pair in pairs]

    @property
    def points(self) -> Sequence[Point]:
        """Oldest first."""
        return tuple(self._points)


def _joined(pair: Sequence[Point]) -> Point:
    highs: dict[str, float] = {}
    places: dict[str, str] = {}
    for point in pair:
        for tag, value in point.highs.items():
            if tag not in highs or value > highs[tag]:
                highs[tag] = value
                places[tag] = point.places.get(tag, "")
    return Point(step=pair[-1].step, time_s=pair[-1].time_s, highs=highs, places=places)
