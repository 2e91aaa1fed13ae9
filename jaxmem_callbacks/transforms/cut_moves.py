"""Cuts moved one at a time, as long as that lowers the peak of the whole loss.

The dynamic programme of `cuts.py` adds up what is known of pairs of cuts. Whether a value waits for a segment depends on more of
them: what skips a segment waits from the first one on that uses it, and what the last segment only adds may wait for none. Here
what is alive is followed through the forward pass and each segment, for one choice of cuts at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from jaxmem_callbacks.transforms.costs import ALIKE, MARGIN, SAME, SIDE, TABLE, alive

if TYPE_CHECKING:
    from jaxmem_callbacks.transforms.loss_profile import LiveBytesProfile

Cuts = tuple[int, ...]
# Equations that are followed at most, over all cuts that are tried.
_MOST_FOLLOWED = TABLE * round(1 / MARGIN)


@final
class LiveBytes:
    """What is alive under cuts with nothing else kept; what was found is remembered.

    Args:
        profile: What lives where, as a compiler holds it that does not fuse.
    """

    def __init__(self, profile: LiveBytesProfile) -> None:
        self._profile = profile
        self._number, size, maker, self._reader, derived = profile.uses.T
        self._maker, self._derived = maker, derived == 1
        count = int(self._number.max(initial=-1)) + 1
        self._size, self._made, self._last = np.zeros((3, count), np.int64)
        self._size[self._number], self._made[self._number] = size, maker
        np.maximum.at(self._last, self._number, self._reader)
        self._needed = np.bincount(self._number[self._derived], minlength=count) > 0
        self._found: dict[Cuts, tuple[int, float]] = {}

    @property
    def followed(self) -> int:
        """How many equations were followed."""
        return len(self._found) * self._profile.length

    def under(self, cuts: Cuts) -> tuple[int, float]:
        """The most bytes alive at once, and the work that is done again.

        Args:
            cuts: Positions, ascending, without the ends.
        """
        if cuts not in self._found:
            self._found[cuts] = self._follow(cuts)
        return self._found[cuts]

    def _follow(self, cuts: Cuts) -> tuple[int, float]:
        profile, length, count = self._profile, self._profile.length, len(cuts) + 1
        starts, ends = np.array([0, *cuts]), np.array([*cuts, length])
        inside = np.repeat(np.arange(count), ends - starts)  # the segment of each equation
        again = (profile.needed_from < ends[inside]) & (inside < count - 1)
        number, reader, used = self._number, self._reader, self._derived | again[self._reader]
        user, home = inside[reader], inside[self._made]
        # What a derivative uses, or an equation that is done again, waits if an earlier segment made it: for all from here on.
        waits = used & (user > inside[self._maker])
        by = np.full(len(home), count)
        np.minimum.at(by, number[waits], user[waits])
        new = np.bincount(by, self._size, count + 1)[:count].astype(np.int64) + np.add.reduceat(profile.stored, starts)
        before = np.cumsum(new) - new
        gradients = np.where(ends < length, profile.gradients[ends], 0)  # that a segment is handed

        # A derivative finds what those before it in the segment need too, made there or waiting for this segment.
        needs = np.full(len(home), length)
        first = waits & self._derived & (user == by[number])
        np.minimum.at(needs, number[first], reader[first])
        size, maker, first_need = profile.kept.T
        own = inside[first_need] == inside[maker]
        held = np.bincount(first_need[own], size[own], length + 1) + np.bincount(needs, self._size, length + 1)
        total = np.cumsum(held.astype(np.int64))[:length]
        holds = total - np.append(0, total)[starts][inside]
        peaks = holds + profile.gradients[:length] + np.maximum(profile.made, 0)
        peaks[ends - 1] = np.maximum(peaks[ends - 1], holds[ends - 1] + gradients)

        # While it is computed again a segment has what waited for it and what it made, as long as anything there uses them.
        until = np.stack([self._made, np.full(len(home), -1)])
        for place, (here, last) in enumerate([(user == inside[self._maker], home), (user == by[number], by)]):
            some = here & used
            np.maximum.at(until[place], number[some], reader[some])
            some = here & self._derived
            until[place][number[some]] = ends[last[number[some]]] - 1
        mine, waiting = again[self._made], by < count
        rows = [
            np.stack([self._size[mine], self._made[mine], until[0][mine]], 1),
            np.stack([self._size[waiting], starts[by[waiting]], until[1][waiting]], 1),
        ]
        anew = alive(np.concatenate(rows), length)[:length] + gradients[inside]
        backward = before[inside] + np.maximum(peaks, np.where(again, anew, 0))

        last = np.where(waiting | ((home == count - 1) & self._needed), length, self._last)
        there = alive(np.stack([self._size, self._made + 1, last], 1), length)[:length]
        forward = there + np.cumsum(profile.stored) - profile.stored + np.maximum(profile.made, 0)
        return int(max(backward.max(), forward.max())), float(profile.work[again].sum())


@functools.lru_cache(maxsize=SIDE)
def lowered(profile: LiveBytesProfile, routes: tuple[Cuts, ...], places: Cuts, *, fixed: bool) -> Cuts:
    """Cuts that no single move makes better: the best of those that moves lead to from some given ones.

    Args:
        profile: What lives where.
        routes: Where to begin: positions, ascending, without the ends. The first is the answer where nothing is notably lower.
        places: Positions at which a cut may be, ascending.
        fixed: Whether there are to be as many cuts as before.

    Returns:
        Positions with the smallest peak that is found, or near it and with less work again.
    """
    live = LiveBytes(profile)

    def moved(cuts: Cuts, enough: float) -> Cuts:
        while live.followed < _MOST_FOLLOWED:
            near = [cuts, *_moves(cuts, places, profile.forced, fixed=fixed)]
            best = min(near, key=lambda some: (max(live.under(some)[0], enough), live.under(some)[1]))
            if best == cuts:
                break
            cuts = best
        return cuts

    lowest = min((moved(cuts, 0) for cuts in dict.fromkeys(routes)), key=live.under)
    least, first = live.under(lowest)[0], routes[0]
    # Of cuts nearer than an estimate resolves those are taken that the programme chose.
    return first if live.under(first)[0] <= (1 + SAME) * least else moved(lowest, (1 + ALIKE) * least)


def _moves(cuts: Cuts, places: Sequence[int], forced: Collection[int], *, fixed: bool) -> Iterator[Cuts]:
    """Cuts that differ by one: it is moved between its neighbours, or made or left out if their number is not fixed."""
    for number, cut in enumerate(cuts):
        before, after = cuts[:number], cuts[number + 1 :]
        if cut not in forced:
            least, most = max(before, default=0), min(after, default=places[-1] + 1)
            yield from ((*before, new, *after) for new in places if least < new < most and new != cut)
            if not fixed:
                yield (*before, *after)
    if not fixed:
        yield from (tuple(sorted((*cuts, new))) for new in places if new not in cuts)
