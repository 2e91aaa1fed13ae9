"""Things in the order of their bytes and a compiler enter; the last of them that fits leaves. Only what was asked counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Ask = Callable[[Sequence[int]], Mapping[int, bool]]
Guess = Callable[[int, int | None], int]

_FAR = 8  # times the last place that fits: a guess beyond it may be any number of times too far
_WIDE = 2  # times that place: what is open is much
_LITTLE = 32  # part of a guess that it may be too far by
_SLOW = 4  # an ask that leaves more than this part of what was open has not come closer


def last_that_fits(low: int, high: int | None, guess: Guess, ask: Ask) -> tuple[int, int | None]:
    """The last place that fits, found by asking few.

    Two are asked at a time, since two compilers run at a time. Where a guess is right, its place fits, the next does not, and
    that is the proof; as long as much is open, a place before the guess is asked beside it, which fits where the guess is a
    little too far. Where guesses lie beside what is open, or lead to one side of it twice, the middle is asked beside the
    guess, so that the number of asks grows with the logarithm of the places however wrong the guesses are.

    Args:
        low: A place that fits, or the place before the first.
        high: A later place that does not fit; None where the places go on.
        guess: Where between both the last that fits may be; what it says is brought between them.
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
        slow = high is not None and before[1] is not None and (high - low) * _SLOW > before[1] - before[0]
        halve = slow and (place != guessed or side == moved)
        moved = side
        stride *= 8 if low - before[0] < max(before[0], 1) else 1  # or guesses a little above it lead nowhere
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
    if high is None and 0 < low * _FAR < place:
        return math.isqrt(low * place)
    before = place - place // _LITTLE
    return before if low < before < place and high is not None and high > _WIDE * low else place + 1


def _middle(low: int, high: int) -> int:
    """Half of the way; where the end is many times the beginning, half of the doublings."""
    return math.isqrt(low * high) if 0 < low * _SLOW < high else (low + high) // 2
