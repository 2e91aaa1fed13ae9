"""Where to cut a loss: positions in its list of equations that make the estimated peak of the backward pass smallest.

Behind the choice is a model of what is alive while one segment is
differentiated: the values stored at the cuts before it, what it holds of its own, and gradients. The smallest budget under
which a sequence of segments exists is found by bisection; for one budget a dynamic programme finds the sequence that
stores least. Distances between cuts follow from bytes, not from layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem_callbacks._compat.jaxprs import (
    scan_arity,
)
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS
from jaxmem_callbacks.transforms.costs import (
    held_by_body,
    nbytes,
    scan_carry_bytes,
    scan_step_bytes,
)
from jaxmem_callbacks.transforms.tracing import (
    flatten,
    has_own_checkpoint,
    reports_inside,
    side_effects,
    variables,
)

# More candidates sharpen the cuts by less than the estimate's own error, and the programme is quadratic in them.
_MOST_CANDIDATES = 256
_BISECTIONS = 24
# Limits on what a segment holds that are tried for two levels.
_LIMITS = 12
_NOTABLY_LESS = 0.95
# An estimated peak this much above the smallest is as good, if it stores less: the last bytes would be bought with cuts
# inside the head, whose products are the dearest to compute again.
SLACK = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Landscape:
    """Bytes along a list of n equations; a position p lies before equation p, and n is the end.

    Attributes:
        spans: int64[values, 4]: bytes, first and last position at which a value that must be stored is alive, and the last
            equation whose derivative needs it (-1 for none).
        held: int64[values, 3]: bytes of what is in memory while its segment is differentiated, the equation that makes it,
            and the first whose derivative needs it.
        gradients: int64[n + 1]: bytes of the gradients that are in memory at each position on the way back.
        made: int64[n]: bytes each equation makes at once; -1 where compilers do it inside another.
        stored: int64[n]: bytes an equation stores from forward to backward whatever the cuts (a scan's carries).
        forced: Positions at which a cut must be, because an equation brings its own checkpoint.
        residuals: int64[n]: bytes JAX keeps of each equation where it is in no checkpoint; of a loop, what its checkpoints keep.
        last_product: Position before the last matrix product that is differentiated: behind it a cut would compute that product
            again. n without one.
    """

    spans: np.ndarray
    held: np.ndarray
    gradients: np.ndarray
    made: np.ndarray
    stored: np.ndarray
    forced: tuple[int, ...]
    residuals: np.ndarray
    last_product: int

    @property
    def length(self) -> int:
        """Number of equations."""
        return len(self.made)


def lives_of(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Each value that is used, with the first and last position at which it is alive."""
    last = {var: index for index, eqn in enumerate(eqns) for var in variables(eqn.invars)}
    last |= dict.fromkeys(variables(outvars), len(eqns))
    return [
        (var, index + 1, last[var])
        for index, eqn in enumerate(eqns)
        for var in eqn.outvars
        if last.get(var, -1) > index
    ]


def alive(spans: np.ndarray, length: int) -> np.ndarray:
    """Bytes alive at each position of ``length`` equations, int64[length + 1]; spans of bytes, first and last position."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, spans[:, 1], spans[:, 0])
    np.add.at(change, spans[:, 2] + 1, -spans[:, 0])
    return np.cumsum(change)[: length + 1]


def choose_cuts(land: Landscape, segments: int | None = None) -> list[int]:
    """Positions of the cuts, ascending, without 0 and n; empty where cutting cannot help.

    Args:
        land: What lives where.
        segments: How many segments to make, or None for as many as the smallest estimated peak asks for.

    Raises:
        ValueError: more segments than there are places to cut, or fewer than the forced cuts make.
    """
    places = _candidates(land)
    if segments is not None:
        before = _before_the_head(land, places)
        places = before if len(before) > segments else places
    least = len(set(land.forced)) + 1
    if segments is not None and segments < least:
        msg = (
            f"segments={segments}: this loss has loops or checkpoints of its own, which stay whole, and so {least} "
            f"segments at least. Use segments={least} or more, or leave segments out."
        )
        raise ValueError(msg)
    if segments is not None and segments > len(places) - 1:
        msg = (
            f"segments={segments}: this loss can be cut into {len(places) - 1} segments at most. Use a smaller number."
        )
        raise ValueError(msg)
    # For a given number the last segment is taken to hold all that JAX keeps of it: so `RematSearch` asks where a compiler fuses
    # less than the number that is chosen here relies on, or may do so.
    table = _Table(land, places, unfused=segments is not None)
    route = table.route(int(_smallest(table, segments) * SLACK), segments)
    assert route is not None
    return [int(places[index]) for index in route]


def choose_two_levels(land: Landscape, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cuts for two levels of checkpoints, and those of them that bound groups, which have a checkpoint of their own.

    While a group is differentiated its own cuts are alive, and of the groups before it those that bound them. So segments may be
    shorter than where all cuts are alive at once, and which are best depends on the groups: those of several limits on what a
    single segment holds are tried.

    Args:
        land: What lives where.
        cuts: Those of one level, ascending, without the ends.

    Returns:
        Positions of all cuts, and of the bounds, each ascending without the ends; as given and none where two levels are not
        estimated to take notably less.
    """
    places = np.union1d(_before_the_head(land, _candidates(land)), cuts)
    table = _Table(land, places, unfused=True)
    here = np.searchsorted(places, [0, *cuts, land.length])
    most, least = int(table.own[here[:-1], here[1:]].max()), int(table.own[table.allowed].min(initial=0))
    found = [(_grouped(land, cuts), list(cuts))]
    for limit in np.linspace(least, most, _LIMITS).tolist():
        route = table.route(int(limit), None, alone=True)
        if route is not None:
            fine = [int(places[index]) for index in route]
            found.append((_grouped(land, fine), fine))
    (peak, bounds), fine = min(found, key=lambda each: (each[0][0], len(each[1])))
    return (fine, bounds) if peak <= _NOTABLY_LESS * max(segment_peaks(land, cuts)) else (list(cuts), [])


def _grouped(land: Landscape, cuts: Sequence[int]) -> tuple[int, list[int]]:
    """The smallest estimated peak of groups of given segments, and the bounds of these groups."""
    table = _Table(land, np.array([0, *cuts, land.length]), unfused=True)
    count = len(table.places)
    here = np.arange(count - 1)
    stored, own = table.stored[here, here + 1], table.own[here, here + 1]
    before = np.cumsum(stored) - stored
    for start in range(count - 1):
        table.own[start, start + 1 :] = np.maximum.accumulate((before - before[start] + own)[start:])
    peak = _smallest(table, None)
    route = table.route(int(peak * SLACK), None)
    assert route is not None
    return peak, [int(table.places[index]) for index in route]


def _is_head(land: Landscape) -> bool:
    """Whether the last product makes more than is alive before it, as logits are; other layers hand on as much as they got."""
    last = land.last_product
    return last < land.length and bool(land.made[last] > alive(land.spans, land.length)[last])


def _before_the_head(land: Landscape, places: np.ndarray) -> np.ndarray:
    """The places behind which no head is computed again, the end and the forced ones."""
    last = land.last_product if _is_head(land) else land.length
    return places[(places <= last) | (places == land.length) | np.isin(places, land.forced)]


def smallest_peak(land: Landscape) -> int:
    """The estimated peak in bytes under the best cuts."""
    return _smallest(_Table(land, _candidates(land)), None)


def _smallest(table: _Table, segments: int | None) -> int:
    """The smallest budget for which there is a route."""
    low, high = 0, table.upper_bound()
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        if table.route(middle, segments) is None:
            low = middle
        else:
            high = middle
    return high


def segment_peaks(land: Landscape, cuts: Sequence[int]) -> list[int]:
    """Estimated bytes alive at most while each segment is differentiated, with what was stored before it.

    The last one, most of which has no checkpoint, is taken to hold all that JAX keeps of it: compilers seldom hold as little as
    fusions would let them, and that is how segments that are computed again are estimated.

    Args:
        land: What lives where.
        cuts: Positions, ascending, without the ends.
    """
    table = _Table(land, np.array([0, *cuts, land.length]), unfused=True)
    here = np.arange(len(cuts) + 1)
    stored, own = table.stored[here, here + 1], table.own[here, here + 1]
    return (np.cumsum(stored) - stored + own).tolist()


def head_position(land: Landscape, cuts: Sequence[int]) -> int | None:
    """Position of the last product, such as the logits, where the last segment's peak lies behind it; None elsewhere.

    It is so where differentiating what lies from there on takes more than the gradients between the last cut and there: what
    is held in between waits while that peak lasts, and is needed only afterwards.

    Args:
        land: What lives where.
        cuts: Positions, ascending, without the ends.
    """
    head, start = land.last_product, cuts[-1] if cuts else land.length
    if not start < head < land.length:
        return None
    most = _own_peaks(land, np.array([head, land.length]))[0, 1] + _unneeded(land)[head] + _not_fused(land)[head]
    return head if most > land.gradients[start:head].max() else None


def _candidates(land: Landscape) -> np.ndarray:
    """Positions worth cutting at: the ends, the forced ones, and where little is alive or something lasting is made.

    Of too many, those where no neighbour has less alive; of too many of these the least live one of each stretch of work.
    """
    n, live, inner = land.length, alive(land.spans, land.length), np.arange(1, land.length)
    low = inner[(live[inner] <= live[inner - 1]) & (live[inner] <= live[inner + 1])]
    beside = inner[(land.made[inner - 1] >= 0) | (land.made[inner] >= 0)]
    chosen = np.union1d(low, beside)
    if len(chosen) > _MOST_CANDIDATES:
        chosen = low if len(low) <= _MOST_CANDIDATES else _spaced(land, low, live)
    return np.unique(np.concatenate([[0, n], chosen, np.array(land.forced, np.int64)])).astype(np.int64)


def _spaced(land: Landscape, places: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Of many places the least live one of each stretch of work."""
    size, maker, _ = land.held.T
    made = np.bincount(maker, size, land.length).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(made + land.stored)])
    bucket = work[places] * _MOST_CANDIDATES // max(int(work[-1]), 1)
    order = np.lexsort((places, live[places], bucket))
    return places[order][np.r_[True, np.diff(bucket[order]) != 0]]


def _own_peaks(land: Landscape, places: np.ndarray) -> np.ndarray:
    """Most bytes that a segment takes besides what was stored before it, as a matrix over (start, end).

    Differentiated backwards, an equation finds what the segment holds of those before it, the gradients of what is alive
    there, and of what it makes itself. At the segment's end that is all it holds and the gradients it is handed.
    """
    gradients, length = land.gradients, land.length
    size, maker, first = land.held.T
    fused = land.made < 0
    peaks = np.zeros((len(places), len(places)), np.int64)
    for index, start in enumerate(places[:-1]):
        ends = places[index + 1 :]
        own = maker >= start  # what lies before the segment is stored, and counted there
        held = np.cumsum(np.bincount(first[own] - start, size[own], length - start).astype(np.int64))
        most = np.maximum.accumulate(np.where(fused[start:], 0, held + gradients[start:length] + land.made[start:]))
        handed = held[ends - start - 1] + np.where(ends < length, gradients[ends], 0)
        peaks[index, index + 1 :] = np.maximum(most[ends - start - 1], handed)
    peaks[:, -1] -= _unneeded(land)[places]
    return peaks


def _not_fused(land: Landscape) -> np.ndarray:
    """Bytes that JAX keeps of what lies behind each position above those that fusions hold of it, int64[n + 1]."""
    size, maker, _ = land.held.T
    more = land.residuals - np.bincount(maker, size, land.length).astype(np.int64)
    return np.maximum(np.append(np.cumsum(more[::-1])[::-1], 0), 0)


def _unneeded(land: Landscape) -> np.ndarray:
    """Bytes alive at each position that no derivative behind it needs.

    A segment in the middle is computed again from them. The last one is not, and so does not store them.
    """
    size, first, last, needed = land.spans[land.spans[:, 2] < land.length].T
    begin = np.maximum(first, needed + 1)
    some = begin <= last
    return alive(np.stack([size[some], begin[some], last[some]], axis=1), land.length)


class _Table:
    """Costs of every segment between two candidate places, as matrices over (start, end).

    Args:
        land: What lives where.
        places: Positions, the ends included.
        unfused: Whether the last segment holds all that JAX keeps of it, and not only what fusions would.
    """

    def __init__(self, land: Landscape, places: np.ndarray, *, unfused: bool = False) -> None:
        self.places = places
        count = len(places)
        # A value made before place i+1 and alive at place j is stored by every segment that starts at or before its
        # making and ends within its life: a rectangle in (start, end), added at its corners and summed once.
        corners = np.zeros((count + 1, count + 1), np.int64)
        size, first, last, _ = land.spans.T
        start = np.searchsorted(places, first - 1, side="right")  # starts 0 .. start-1 lie at or before the making
        begin = np.searchsorted(places, first, side="left")
        end = np.searchsorted(places, last, side="right")  # ends begin .. end-1 lie within the life
        alive = end > begin
        for row, sign_row in ((np.zeros_like(start), 1), (start, -1)):
            for column, sign in ((begin, 1), (end, -1)):
                np.add.at(corners, (row[alive], column[alive]), sign_row * sign * size[alive])
        self.stored = corners.cumsum(0).cumsum(1)[:count, :count]
        self.stored[:, -1] = 0  # results of the loss leave it anyway
        always = np.concatenate([[0], np.cumsum(land.stored)])[places]
        self.own = _own_peaks(land, places)
        self.own[:, -1] += _not_fused(land)[places] if unfused else 0
        self.stored = self.stored + (always[None, :] - always[:, None])
        forced = np.isin(places, land.forced)
        until = np.array([next((k for k in range(i + 1, count) if forced[k]), count - 1) for i in range(count)])
        ends = np.arange(count)
        self.allowed = (ends[None, :] > ends[:, None]) & (ends[None, :] <= until[:, None])

    def upper_bound(self) -> int:
        """A budget under which every allowed route is possible."""
        return int(self.own.max(initial=0) + 2 * self.stored.max(initial=0) * len(self.places) + 1)

    def route(self, budget: int, segments: int | None, *, alone: bool = False) -> list[int] | None:
        """Indices of the cut places that store least with no segment's peak over ``budget``; None where there are none.

        Args:
            budget: Bytes.
            segments: How many; None for as many as are best.
            alone: Whether a segment's peak is what it holds itself, what was stored before it left aside.
        """
        if segments is not None:
            return self._route_of(budget, segments)
        count = len(self.places)
        cost = np.full(count, np.iinfo(np.int64).max // 4)
        before = np.full(count, -1)
        cost[0] = 0
        for end in range(1, count):
            candidate = self._extended(cost, end, budget, alone=alone)
            before[end] = int(np.argmin(candidate))
            cost[end] = candidate[before[end]]
        return self._walk(lambda end, _: int(before[end]), int(cost[-1]), None)

    def _route_of(self, budget: int, segments: int) -> list[int] | None:
        count = len(self.places)
        cost = np.full(count, np.iinfo(np.int64).max // 4)
        cost[0] = 0
        layers = []
        for _ in range(segments):
            after = np.full_like(cost, np.iinfo(np.int64).max // 4)
            before = np.full(count, -1)
            for end in range(1, count):
                candidate = self._extended(cost, end, budget)
                before[end] = int(np.argmin(candidate))
                after[end] = candidate[before[end]]
            layers.append(before)
            cost = after
        return self._walk(lambda end, layer: int(layers[layer][end]), int(cost[-1]), segments)

    def _extended(self, cost: np.ndarray, end: int, budget: int, *, alone: bool = False) -> np.ndarray:
        """Stored bytes of the routes to each start, lengthened by the segment from there to ``end``."""
        peak = self.own[:end, end] if alone else cost[:end] + self.own[:end, end]
        fits = self.allowed[:end, end] & (peak <= budget)
        return np.where(fits, cost[:end] + self.stored[:end, end], np.iinfo(np.int64).max // 4)

    def _walk(self, before: Any, total: int, segments: int | None) -> list[int] | None:
        if total >= np.iinfo(np.int64).max // 4:
            return None
        route, end, layer = [], len(self.places) - 1, (segments or 0) - 1
        while (end := before(end, layer)) > 0:
            route.append(end)
            layer -= 1
        return route[::-1]


# Steps are put together where that takes at most this share of the loop's estimated bytes.
_WORTH = 0.9


# An estimated peak this little above the smallest is the same.
_SAME = 1.001


def steps_together(
    loops: Mapping[int, Any], offload: Collection[str], peak: Callable[[Mapping[int, int]], int]
) -> dict[int, int]:
    """For each loop the number of steps under one checkpoint; 1 is a checkpointed body.

    Args:
        loops: The scans, by any key.
        offload: What waits in host memory, in the policy's words.
        peak: The estimated peak of the whole function with so many steps together.
    """
    # What reports stays in a loop of its own: two loops would not change its order, but its place in the trace. What a step
    # itself sends to the host stays there too: XLA for GPUs fails at a loop in a loop that stacks host memory.
    fixed = bool(set(offload) - {OFFLOAD_CUTS})
    alone = dict.fromkeys(loops, 1)
    some = {key: eqn for key, eqn in loops.items() if not fixed and not eqn.effects and _is_worth_it(eqn)}
    tried = [alone | chosen for chosen in _choices(some)]
    if len(tried) < 2:  # noqa: PLR2004 - nothing to compare
        return tried[0] if tried else alone
    peaks = [peak(chosen) for chosen in tried]
    least = min(peaks) * _SAME
    # Of equals the one that takes least by itself: the rest of the function may be less than it is estimated to be.
    return min(
        (chosen for chosen, found in zip(tried, peaks, strict=True) if found <= least),
        key=lambda chosen: sum(_total(loops[key], steps) for key, steps in chosen.items()),
    )


def held_together(eqn: Any, steps: int) -> int:
    """Bytes that are held while so many steps of a loop are differentiated under one checkpoint."""
    if steps == 1:
        return held_by_body(eqn)
    # No fusion reaches from a loop into the next: the inner one stacks all that JAX keeps. And in parts, compilers copy what
    # the loop is given a slice of in each step: stacked weights, or a sequence's inputs.
    return steps * scan_step_bytes(eqn) + sum(map(nbytes, eqn.invars[sum(scan_arity(eqn)) :]))


def stored_between(eqn: Any, steps: int) -> int:
    """Bytes of the carries that a loop stores with so many steps under one checkpoint."""
    length = int(eqn.params["length"])
    return scan_carry_bytes(eqn) // max(length, 1) * -(-length // steps)


def _total(eqn: Any, steps: int) -> int:
    held = scan_step_bytes(eqn) if steps == 1 else held_together(eqn, steps)
    return held + stored_between(eqn, steps)


def sizes(length: int) -> list[int]:
    """How many steps may share a checkpoint, ascending: divisors, which leave nothing over, and others where those lie apart."""
    divisors = [part for part in range(1, length) if length % part == 0]
    # As many parts as of about that size, each as short as they may be: little is left over.
    between = (
        -(-length // round(length / (low << doubled)))
        for low, high in itertools.pairwise([*divisors, length])
        for doubled in range(1, math.ceil(math.log2(high / low)))
    )
    return sorted({*divisors, *(part for part in between if part < length)})


def _sizes(eqn: Any) -> list[int]:
    """What is worth trying: where steps are left over, compilers copy stacks once more, and so divisors do if they do as well."""
    length, every = int(eqn.params["length"]), sizes(int(eqn.params["length"]))
    divisors = [part for part in every if length % part == 0]
    least = min((_total(eqn, part) for part in divisors), default=0)
    return every if any(_total(eqn, part) < _WORTH * least for part in every) else divisors


def _is_worth_it(eqn: Any) -> bool:
    totals = [_total(eqn, part) for part in _sizes(eqn)]
    return bool(totals) and min(totals) < _WORTH * totals[0]


def _choices(loops: Mapping[int, Any]) -> Iterator[dict[int, int]]:
    """For each amount of memory that steps may hold together, as many in each loop as stay within it."""
    parts = {key: _sizes(eqn) for key, eqn in loops.items()}
    amounts = sorted({held_together(loops[key], part) for key, several in parts.items() for part in several[1:]})
    seen: list[dict[int, int]] = []
    for most in amounts:
        chosen = {
            key: max((part for part in several[1:] if held_together(loops[key], part) <= most), default=1)
            for key, several in parts.items()
        }
        if chosen not in seen:
            seen.append(chosen)
            yield chosen


def is_layer_scan(eqn: Any, enough: int) -> bool:
    """Whether an equation is a loop whose stacked residuals, at least ``enough`` bytes, are worth a checkpointed body.

    A body that itself holds a loop or branch which reports is left as it is: its reports would come twice.
    """
    if eqn.primitive.name != "scan" or has_own_checkpoint(eqn):
        return False
    if side_effects(eqn) and any(map(reports_inside, flatten(eqn.params["jaxpr"], hoist_constants=False).eqns)):
        return False
    return int(eqn.params["length"]) * scan_step_bytes(eqn) >= max(enough, 1)
