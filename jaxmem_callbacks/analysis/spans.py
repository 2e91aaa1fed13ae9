"""Spans of time that grow with the run: what is written once a span stays small, however long the run is."""

from __future__ import annotations

from typing import final

# Of the run so far: a killed run has pictures at most so old, and the event file of a million slow steps stays small.
PICTURES = 50
_LONGEST = 4  # spans that one may count as


@final
class Spans:
    """When something that is done once a span is due.

    Args:
        span_s: Seconds of one span.
        finest: No span is shorter than this part of the run so far, in which a span never counts longer than four: a pause is no
            long run, nor is a clock that was set forward.
    """

    def __init__(self, span_s: float, finest: int) -> None:
        self._span_s = span_s
        self._finest = finest
        self._since_s: float | None = None
        self._run_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there was a first one."""
        return self._since_s is not None

    def is_over(self, time_s: float) -> bool:
        """Whether the span is over; the first is over at once, and so is one whose clock was set back."""
        # A clock that was set back counts, or the span would last until it catches up.
        return self._since_s is None or not 0 <= time_s - self._since_s < self._now_s()

    def begin(self, time_s: float) -> None:
        """A new span."""
        if self._since_s is not None:
            self._run_s += min(max(0.0, time_s - self._since_s), _LONGEST * self._now_s())
        self._since_s = time_s

    def _now_s(self) -> float:
        return max(self._span_s, self._run_s / self._finest)
