"""Policies in the order of the bytes that they keep, and what some of them need, enter; which to compile next for a room leaves.

What a step needs is the most of what is alive at several moments. With the bytes that are kept it rises slowly, as long as the
most is alive elsewhere, and then by a byte for each: never faster, and ever faster. So between two points that were compiled it
lies below the line from one to the other, and above the line down from the upper one that falls by a byte for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def next_places(
    kept: Sequence[float], needs: Mapping[int, int], room: float, *, between: tuple[int, int], knee: int, most: int
) -> list[int]:
    """The places to compile next: the last that fits for sure if needs rise so, and the last that may.

    Two compilers run at a time. So where the two are the same, the one behind it is asked too; and of an odd number of asks the
    first is the one that may alone, since what it needs tells more than any estimate. A single ask lies in the middle of the two.

    Args:
        kept: float[places], ascending: bytes that each keeps on a device, as modelled.
        needs: Bytes that the step needs at some places, one at or before the first of ``between`` among them.
        room: Bytes that it may need.
        between: The last place that is known to fit, and the first that is known not to, or the number of places.
        knee: Behind this place there is little left to win: it is the one that may fit, as long as nothing above tells otherwise.
        most: How many may be asked.
    """
    (low, high), known = between, sorted(needs)
    if high - low < 2 or most < 1:  # noqa: PLR2004 - nothing lies between neighbours
        return []
    sizes, last = np.asarray(kept, np.float64), known[-1]
    line = np.interp(sizes, sizes[known], [needs[place] for place in known])
    above = line + np.maximum(sizes - sizes[last], 0)
    sure = _last_within(above, room, low, high)
    may = min(knee, high - 1) if knee > low else high - 1
    if high not in needs and most % 2 and most > 1:
        return [may]
    if high not in needs:
        may = max(may, sure)
    else:
        may = max(_last_within(needs[high] - (sizes[high] - sizes), room, low, high), sure)
    if most == 1:
        return [(sure + may + 1) // 2]
    return [sure, may] if may > sure else [place for place in (sure, sure + 1) if place < high]


def narrowed(between: tuple[int, int], fits: Mapping[int, bool]) -> tuple[int, int]:
    """What is still open once some places were asked; needs may fall from place to place, so the first that fails is the end."""
    low, high = between
    high = min([high, *(place for place, yes in fits.items() if not yes)])
    return max([low, *(place for place, yes in fits.items() if yes and place < high)]), high


def _last_within(needs: np.ndarray, room: float, low: int, high: int) -> int:
    """The last place between both whose needs are within a room; at least the one behind ``low``."""
    places = np.arange(low + 1, high)
    return int(places[needs[low + 1 : high] <= room].max(initial=low + 1))
