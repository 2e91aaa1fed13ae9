"""Windows: values that arrive at any rate enter, one Window of minimum, mean and maximum a time span leaves.

A window closes when its span is over and a step was completed in it, so that no step has two points, but the last one where more
was seen after it. In long runs windows grow with the run, so that its files stay small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.spans import Spans

_FINEST = 2000  # no window is shorter than this part of the run so far: more points than a page shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """What one tag did in one window, over all readings and devices: lowest, mean, highest, how many.

    ``high_at`` is the device that had the highest value, where several devices were read; else empty.
    """

    low: float
    mean: float
    high: float
    count: int
    high_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One time window of a run.

    Attributes:
        step: The last step in it.
        time_s: When it closed, in seconds since the epoch.
        spreads: Tag -> what it did; tags without a value in this window are absent.
        ranged: Tags that had different values in some window so far: only these have a range worth showing.
    """

    step: int
    time_s: float
    spreads: Mapping[str, Spread]
    ranged: frozenset[str] = frozenset()

    def scalars(self) -> dict[str, float]:
        """Flat tags: the mean under the tag itself, ``tag/min`` and ``tag/max`` beside it for tags that range."""
        flat: dict[str, float] = {}
        for tag, spread in self.spreads.items():
            flat[tag] = spread.mean
            if tag in self.ranged:
                flat[f"{tag}/min"] = spread.low
                flat[f"{tag}/max"] = spread.high
        return flat


class _Sum:
    """What is known of one tag in the open window."""

    def __init__(self, value: float, device: str) -> None:
        self.low = self.high = value
        self.total, self.count = 0.0, 0
        self.device = self.high_at = device
        self.several = False

    def add(self, value: float, device: str) -> None:
        self.several = self.several or device != self.device
        if value > self.high:
            self.high, self.high_at = value, device
        self.low = min(self.low, value)
        self.total += value
        self.count += 1

    def spread(self) -> Spread:
        where = self.high_at if self.several else ""
        return Spread(low=self.low, mean=self.total / self.count, high=self.high, count=self.count, high_at=where)


@final
class Windows:
    """Collects values and closes windows.

    Args:
        span_s: Seconds of one window, until a two-thousandth of the run is longer.
    """

    def __init__(self, span_s: float) -> None:
        self._sums: dict[str, _Sum] = {}
        self._constants: dict[str, float] = {}
        self._ranged: set[str] = set()
        self._span = Spans(span_s, _FINEST)
        self._closed_step: int | None = None

    def add(self, values: Mapping[str, float], device: str = "") -> None:
        """Count the values, of one device where it is said, into the open window."""
        for tag, value in values.items():
            self._sums.setdefault(tag, _Sum(value, device)).add(value, device)

    def keep(self, values: Mapping[str, float]) -> None:
        """Show these in every window from now on, such as limits: they have no spread."""
        self._constants.update(values)

    def close(self, step: int, time_s: float, *, force: bool = False) -> Window | None:
        """The window, if it is over (or ``force``) and has values; the first one is over at once."""
        if not self._sums or not (force or (self._span.is_over(time_s) and step != self._closed_step)):
            return None
        spreads = {tag: each.spread() for tag, each in self._sums.items()}
        self._ranged.update(tag for tag, each in spreads.items() if not math.isclose(each.low, each.high))
        spreads |= {tag: Spread(low=value, mean=value, high=value, count=1) for tag, value in self._constants.items()}
        self._span.begin(time_s)
        self._sums, self._closed_step = {}, step
        return Window(step=step, time_s=time_s, spreads=spreads, ranged=frozenset(self._ranged))
