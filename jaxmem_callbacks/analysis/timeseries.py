"""Values over time: hysteresis, debounce, rate limits and trends."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final


@final
class HysteresisTrigger:
    """Whether an episode is running.

    Args:
        begin: An episode begins when a level is above this.
        release: It ends when levels are at or under this; not above ``begin``.
        quiet: So many of them in a row. While a step is dispatched its donated state is counted nowhere for a moment.
    """

    def __init__(self, *, begin: float, release: float, quiet: int = 1) -> None:
        if release > begin:
            msg = f"release={release} is above begin={begin}: the episode would end before it begins. Give release <= begin."
            raise ValueError(msg)
        self._begin = begin
        self._release = release
        self._quiet = quiet
        self._low = 0  # levels in a row that were low enough to end it
        self._low_at: Hashable = None
        self.running = False

    def begins(self, level: float, at: Hashable = None) -> bool:
        """Take the next level; True exactly when it begins an episode.

        Args:
            level: It.
            at: Such as the step: low levels of one step count once, however often it was looked at. None counts each.
        """
        if not self.running:
            self._low, self._low_at = 0, None
            self.running = level > self._begin
            return self.running
        if level > self._release:
            self._low, self._low_at = 0, None
        elif at is None or at != self._low_at:
            self._low, self._low_at = self._low + 1, at
        self.running = self._low < self._quiet
        return False


_LOOKS = 5
_SHARE = 10  # of the steps that growth must last


@dataclass(slots=True)
class _Stay:
    step: int
    looks: int = 0
    missed: int = 0
    reported: bool = False


@final
class Debounce:
    """A filter of what passes: what stays was there at five looks, and for a tenth of ``steps``.

    Args:
        steps: `MonitorSettings.growth_steps`.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps // _SHARE)
        self._stays: dict[Hashable, _Stay] = {}

    def begun(self, step: int, present: set[Hashable]) -> set[Hashable]:
        """Take one look; those of ``present`` whose episode begins with it."""
        for key in list(self._stays):
            stay = self._stays[key]
            stay.missed = 0 if key in present else stay.missed + 1
            if stay.missed and (not stay.reported or stay.missed >= _LOOKS):
                del self._stays[key]
        found: set[Hashable] = set()
        for key in present:
            stay = self._stays.setdefault(key, _Stay(step))
            stay.looks += 1
            if not stay.reported and stay.looks >= _LOOKS and step - stay.step >= self._steps:
                stay.reported = True
                found.add(key)
        return found

    def since(self, keys: set[Hashable]) -> int:
        """The step at which the first of them was seen."""
        return min(self._stays[key].step for key in keys)


# Of the run so far: a killed run has pictures at most so old, and the event file of a million slow steps stays small.
PICTURES = 50
_LONGEST = 4  # spans that one may count as


@final
class RateLimiter:
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


_STRETCHES = 10  # of the steps that a trend must last
_VALUES = 8  # seen in one stretch at least
_KEPT_VALUES = 256  # of them
_BEFORE = 50  # stretches before a rise that it must pass
_BEGUN = 0.5  # the order from which on something rises
_LET_GO = 0.25  # of what a rise gained, whose loss ends it: less is noise, and more is not lost where a leak goes on beside it
_FEW, _MANY = 6, 64  # floors that make a rise, and that are kept
_OVER = 2  # times the longest time between two floors, after which the next is not waited for any more


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A rise that goes on.

    Attributes:
        since_step: Where it began.
        gain: By how much it passed what was there before.
        level: What is there now.
        per_step: What it gains a step, over its last stretches.
        order: How well the last stretches are in rising order, the worse of their halves: 1 perfectly, 0 not at all.
        let_go: The most that an earlier rise had gained when it was let go of; 0 where none was.
    """

    since_step: int
    gain: float
    level: float
    per_step: float
    order: float
    let_go: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    step: int
    low: float


class _LetGo:
    """What earlier rises came to: how high they were when they were let go of, and from where the next ones began."""

    def __init__(self) -> None:
        self.reached = -math.inf
        self.most = 0.0
        self.floors: list[_Stretch] = []
        self.base: float | None = None  # where the rise began that is not let go of yet
        self._top = -math.inf

    def begin(self, first: _Stretch, top: float) -> None:
        """A rise begins, or goes on after a rest; it is known only once it came to ``top``."""
        if self.base is not None:
            return
        self.base, self._top = first.low, top
        if self.most:  # what was there before the first rise is the start of the run, not what one left behind
            self.floors.append(first)
            if len(self.floors) > _MANY:
                del self.floors[1:-1:2]

    def is_over(self, step: int) -> bool:
        """Whether nothing has begun to rise for twice the longest time between two rises; their floors are forgotten then."""
        gaps = [after.step - before.step for before, after in itertools.pairwise(self.floors)]
        if step - self.floors[-1].step <= _OVER * max(gaps):
            return False
        self.floors.clear()
        return True

    def see(self, low: float) -> None:
        """Take the low of the next stretch."""
        if self.base is None:
            return
        self._top = max(self._top, low)
        gained = self._top - self.base
        if low < self._top - _LET_GO * gained:
            self.reached, self.most = max(self.reached, self._top), max(self.most, gained)
            self.base = None


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
        self._earlier = _LetGo()
        self._rise: Rise | None = None
        self._stays: Rise | None = None

    def add(self, step: int, value: float) -> None:
        """Take the next value; steps that go back, as after a restore, begin again."""
        if self._opened is not None and step < self._opened:
            self.__init__(self._steps * _STRETCHES)
        if self._opened is None:
            self._opened = step
        elif step - self._opened >= self._steps and len(self._values) >= _VALUES:
            self._close(self._opened)
            self._opened = step
        self._values.append(value)
        if len(self._values) > _KEPT_VALUES:
            del self._values[::2]

    def rise(self) -> Rise | None:
        """The rise that is going on, or None where nothing rose for long enough."""
        return self._rise

    def stays(self) -> Rise | None:
        """The rise of what is left each time that what rose is let go of, or None."""
        return self._stays

    @property
    def has_risen(self) -> bool:
        """Whether anything was learnt of it that is worth keeping while it is gone."""
        return self._earlier.base is not None or self._earlier.most > 0

    def _close(self, step: int) -> None:
        self._done.append(_Stretch(step, sorted(self._values)[len(self._values) // 4]))
        self._values.clear()
        self._earlier.see(self._done[-1].low)
        last = list(self._done)[-_STRETCHES:]
        if len(last) < _STRETCHES:
            return
        lows = [each.low for each in last]
        order = _steadily(lows)
        if order <= 0:
            self._begun = None
        elif self._begun is None and order > _BEGUN:
            before = max(each.low for each in self._done if each.step <= last[0].step)
            self._begun = last[0].step, max(before, self._earlier.reached)
            self._earlier.begin(last[0], max(lows))
            self._stays = _rise_of(self._earlier.floors)
        if self._begun is None:
            self._rise = None
            if self._stays is not None and self._earlier.is_over(step):
                self._stays = None
            return
        since, before = self._begun
        self._rise = Rise(
            since_step=since,
            gain=lows[-1] - before,
            level=lows[-1],
            per_step=(lows[-1] - lows[0]) / (last[-1].step - last[0].step),
            order=order,
            let_go=self._earlier.most,
        )


def _rise_of(floors: Sequence[_Stretch]) -> Rise | None:
    """What rose from the first floor to the last, if all of them show it."""
    lows = [each.low for each in floors]
    order = _steadily(lows) if len(lows) >= _FEW else 0.0
    if order <= _BEGUN:
        return None
    first, last = floors[0], floors[-1]
    gain = last.low - first.low
    return Rise(since_step=first.step, gain=gain, level=last.low, per_step=gain / (last.step - first.step), order=order)


def _steadily(values: Sequence[float]) -> float:
    """The order of all, or of one half where that is worse: a single leap is no rise."""
    half = len(values) // 2
    return min(_order(values), _order(values[:half]), _order(values[half:]))


def _order(values: Sequence[float]) -> float:
    """Kendall's tau against the order of time: 1 where each is above all before, -1 where each is below."""
    pairs = list(itertools.combinations(values, 2))
    return sum((after > before) - (after < before) for before, after in pairs) / len(pairs)
