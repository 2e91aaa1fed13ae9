"""Trend: values by step enter; whether they keep rising leaves, judged by the lowest value of each stretch of steps.

The lowest is what stays: temporaries, evaluations and batches of other lengths come and go above it. A rise also counts only
as far as it passes the highest of these shortly before it began, so that a list which is emptied now and then is none.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import final

_STRETCHES = 10  # of the steps that a trend must last
_VALUES = 4  # seen in one stretch at least
_BEFORE = 50  # stretches before a rise whose highest value must be passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A rise that goes on.

    Attributes:
        since_step: Where it began.
        gain: By how much it passed what was there before.
        level: What is there now.
        per_step: What it gains a step, over its last stretches.
        share: The share of the last stretches that ended higher than they began.
    """

    since_step: int
    gain: float
    level: float
    per_step: float
    share: float


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
        self._low, self._values = math.inf, 0
        self._opened: int | None = None
        self._begun: _Stretch | None = None  # the first stretch of the present rise
        self._length = 0  # stretches in which the value did not fall
        self._before = -math.inf  # the highest one shortly before it

    def add(self, step: int, value: float) -> None:
        """Take the next value; steps that go back, as after a restore, begin anew."""
        if self._opened is not None and step < self._opened:
            self.__init__(self._steps * _STRETCHES)
        if self._opened is None:
            self._opened = step
        elif step - self._opened >= self._steps and self._values >= _VALUES:
            self._close()
            self._opened = step
        self._low, self._values = min(self._low, value), self._values + 1

    def rise(self) -> Rise | None:
        """The rise that is going on, or None where nothing rose for long enough, or it fell."""
        if self._begun is None or self._length < _STRETCHES or len(self._done) < _STRETCHES:
            return None
        last = list(self._done)[-_STRETCHES:]
        steps = last[-1].step - last[0].step
        risen = sum(after.low > before.low for before, after in itertools.pairwise(last))
        gain = last[-1].low - max(self._before, self._begun.low)
        if not risen or not steps or gain <= 0:
            return None
        return Rise(
            since_step=self._begun.step,
            gain=gain,
            level=last[-1].low,
            per_step=(last[-1].low - last[0].low) / steps,
            share=risen / (_STRETCHES - 1),
        )

    def _close(self) -> None:
        assert self._opened is not None
        stretch = _Stretch(self._opened, self._low)
        before = self._done[-1] if self._done else None
        if before is None or stretch.low < before.low or self._is_flat(stretch):
            self._before = max((each.low for each in self._done), default=-math.inf)
            self._begun, self._length = stretch, 0
        self._length += 1
        self._done.append(stretch)
        self._low, self._values = math.inf, 0

    def _is_flat(self, stretch: _Stretch) -> bool:
        """Whether nothing rose for so long that what comes next is another rise."""
        return len(self._done) >= _STRETCHES and self._done[-_STRETCHES].low == stretch.low
