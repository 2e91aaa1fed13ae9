"""Bisection by compiled bytes: the last of some ordered policies or sizes that fits, found with few compiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmem_callbacks.transforms.costs import ALIKE

Ask = Callable[[Sequence[int]], Mapping[int, bool]]
Guess = Callable[[int, int | None], int]


def last_that_fits(low: int, high: int | None, guess: Guess, ask: Ask) -> tuple[int, int | None]:
    """The last place that fits, found by asking few.

    Two are asked at a time, since two compilers run at a time. Where a guess is right, its place fits, the next does not, and
    that is the proof; as long as much is open, a place before the guess is asked beside it, which fits where the guess is a
    little too far. Where guesses are beside what is open, or lead to one side of it twice, the middle is asked beside the
    guess, so that the number of asks grows with the logarithm of the places however wrong the guesses are.

    Args:
        low: A place that fits, or the place before the first.
        high: A later place that does not fit; None where the places go on.
        guess: Where between both the last that fits may be; it is brought between them.
        ask: Which of some places fit. An empty answer ends the search, such as when no compile is left.

    Returns:
        The last place known to fit (``low`` where none was found), and the first known not to.
    """
    stride, moved, halve = 1, 0, False
    while high is None or high - low > 1:
        guessed = guess(low, high)
        place = max(guessed, low + stride) if high is None else min(max(guessed, low + 1), high - 1)
        second = _middle(low, high) if halve and high is not None else _beside(place, low, high)
        answers = ask([each for each in sorted({place, second}) if high is None or each < high])
        if not answers:
            break
        before, (low, high) = (low, high), closer(low, high, answers)
        side = (high == before[1]) - (low == before[0])  # 1: only the lower end moved, -1: only the upper one
        # Two asks halve twice: one that leaves more than half has not come closer.
        slow = high is not None and before[1] is not None and 2 * (high - low) > before[1] - before[0]
        halve = slow and (place != guessed or side == moved)
        moved = side
        stride *= 2 * 2 if low - before[0] < max(before[0], 1) else 1  # or guesses a little above it lead nowhere
    return low, high


def closer(low: int, high: int | None, answers: Mapping[int, bool]) -> tuple[int, int | None]:
    """What is open once some places were asked; bytes need not grow from place to place, so the first that fails is the end."""
    for each, fits in sorted(answers.items()):
        if fits and (high is None or each < high):
            low = max(low, each)
        elif not fits:
            high = each if high is None else min(high, each)
    return low, high


def _beside(place: int, low: int, high: int | None) -> int:
    """What to ask beside a guess: the next place near the end; a little before it, or half of the doublings, far from there."""
    if high is None and 0 < 2 * low < place:
        return math.isqrt(low * place)
    before = place - int(ALIKE * place)  # a guess may be too far by as much
    return before if low < before < place and high is not None and high > 2 * low else place + 1


def _middle(low: int, high: int) -> int:
    """Half of the way; where the end is many times the beginning, half of the doublings."""
    return math.isqrt(low * high) if 0 < 2 * low < high else (low + high) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesBracket:
    """Bytes to fill, and the ordered policies that may fill them.

    Attributes:
        bytes: What a step may need.
        kept: float64[places], ascending: bytes that each policy keeps on a device, as modelled.
        knee: Behind this place there is little left to win.
    """

    bytes: float
    kept: np.ndarray
    knee: int

    def next_places(self, needs: Mapping[int, int], between: tuple[int, int], most: int) -> list[int]:
        """The places to compile next: the last that fits by an upper bound of its needs, and the last that may by a lower bound.

        Two compilers run at a time. Where both places are the same, the next one is compiled too; where the bounds contradict
        each other, the middle of what is left is. Of an odd number of compiles
        the first is the one that may fit, alone: a measured need is worth more than any estimate. A single compile is in the
        middle. Where only the first place is known, the last two compiles begin with the one that fits by the upper bound,
        alone: its measured need corrects the estimate for the second.

        Args:
            needs: Bytes that the step needs at some places, the first among them.
            between: The last place that is known to fit, and the first that is known not to, or the number of places.
            most: How many may be asked.
        """
        (low, high), known = between, sorted(needs)
        if high - low < 2 or most < 1:  # noqa: PLR2004 - nothing is between neighbours
            return []
        line = np.interp(self.kept, self.kept[known], [needs[place] for place in known])
        sure = self._last(line + np.maximum(self.kept - self.kept[known[-1]], 0), between)
        if high in needs:
            may = self._last(needs[high] - (self.kept[high] - self.kept), between)
        else:
            may = min(self.knee, high - 1) if self.knee > low else high - 1
            if most % 2 and most > 1:
                return [may]
        if low == 0 and high not in needs and most <= 2:  # noqa: PLR2004 - the last two
            return [sure]
        if most == 1:
            return [(sure + max(may, sure) + 1) // 2]
        if may < sure:  # the bounds contradict each other
            may = max((sure + high) // 2, sure + 1)
        return [place for place in (sure, max(may, sure + 1)) if place < high]

    def _last(self, needs: np.ndarray, between: tuple[int, int]) -> int:
        """The last place between both whose needs are within the room; at least the first."""
        places = np.arange(between[0] + 1, between[1])
        return int(places[needs[places] <= self.bytes].max(initial=between[0] + 1))
