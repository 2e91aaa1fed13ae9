"""Trend: values by step enter; whether they keep rising leaves, judged by a low value of each stretch of steps.

A low one is what stays: temporaries, evaluations and batches of other lengths come and go above it, and it is not the lowest,
since a donated state is counted nowhere while its step is dispatched. A rise also counts only as far as it passes what was
there shortly before it began, so that a list which is emptied now and then is none.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

_STRETCHES = 10  # of the steps that a trend must last
_VALUES = 8  # seen in one stretch at least
_KEPT = 256  # of them
_BEFORE = 50  # stretches before a rise that it must pass
_BEGUN = 0.5  # the order from which on something rises


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A rise that goes on.

    Attributes:
        since_step: Where it began.
        gain: By how much it passed what was there before.
        level: What is there now.
        per_step: What it gains a step, over its last stretches.
        order: How well the last stretches are in rising order, the worse of their halves: 1 perfectly, 0 not at all.
    """

    since_step: int
    gain: float
    level: float
    per_step: float
    order: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    step: int
    low: float


@final
class Trend:
    """Follows one value.

    Args:
        steps: How long a rise must last.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps // _STRETCHES)
        self._done: deque[_Stretch] = deque(maxlen=_BEFORE)
        self._values: list[float] = []
        self._opened: int | None = None
        self._begun: tuple[int, float] | None = None  # where the present rise began, and what was there before
        self._rise: Rise | None = None

    def add(self, step: int, value: float) -> None:
        """Take the next value; steps that go back, as after a restore, begin anew."""
        if self._opened is not None and step < self._opened:
            self.__init__(self._steps * _STRETCHES)
        if self._opened is None:
            self._opened = step
        elif step - self._opened >= self._steps and len(self._values) >= _VALUES:
            self._close(self._opened)
            self._opened = step
        self._values.append(value)
        if len(self._values) > _KEPT:
            del self._values[::2]

    def rise(self) -> Rise | None:
        """The rise that is going on, or None where nothing rose for long enough."""
        return self._rise

    def _close(self, step: int) -> None:
        self._done.append(_Stretch(step, sorted(self._values)[len(self._values) // 4]))
        self._values.clear()
        last = list(self._done)[-_STRETCHES:]
        if len(last) < _STRETCHES:
            return
        lows, half = [each.low for each in last], _STRETCHES // 2
        order = min(_order(lows), _order(lows[:half]), _order(lows[half:]))
        if order <= 0:
            self._begun = None
        elif self._begun is None and order > _BEGUN:
            self._begun = last[0].step, max(each.low for each in self._done if each.step <= last[0].step)
        if self._begun is None:
            self._rise = None
            return
        since, before = self._begun
        self._rise = Rise(
            since_step=since,
            gain=lows[-1] - before,
            level=lows[-1],
            per_step=(lows[-1] - lows[0]) / (last[-1].step - last[0].step),
            order=order,
        )


def _order(values: Sequence[float]) -> float:
    """Kendall's tau against the order of time: 1 where each is above all before, -1 where each is below."""
    pairs = list(itertools.combinations(values, 2))
    return sum((after > before) - (after < before) for before, after in pairs) / len(pairs)
