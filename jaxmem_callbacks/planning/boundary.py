"""Things in the order of their bytes and a compiler enter; the last of them that fits leaves. Only what was asked counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Ask = Callable[[Sequence[int]], Mapping[int, bool]]
Guess = Callable[[int, int | None], int]


def last_that_fits(low: int, high: int | None, guess: Guess, ask: Ask) -> tuple[int, int | None]:
    """The last place that fits, found by asking few.

    Two neighbours are asked at a time, since two compilers run at a time: where a guess is right, its place fits, the next
    does not, and that is the proof.

    Args:
        low: A place that fits, or the place before the first.
        high: A later place that does not fit; None where the places go on.
        guess: Where between both the last that fits may be; what it says is brought between them.
        ask: Which of some places fit. An empty answer ends the search, such as when no compile is left.

    Returns:
        The last place known to fit (``low`` where none was found), and the first known not to.
    """
    stride = 1
    while high is None or high - low > 1:
        place = max(guess(low, high), low + stride) if high is None else min(max(guess(low, high), low + 1), high - 1)
        asked = [each for each in (place, place + 1) if high is None or each < high]
        answers = ask(asked)
        if not answers:
            break
        for each, fits in sorted(answers.items()):
            if fits and (high is None or each < high):
                low = max(low, each)
            elif not fits:
                high = each if high is None else min(high, each)
        stride *= 8
    return low, high
