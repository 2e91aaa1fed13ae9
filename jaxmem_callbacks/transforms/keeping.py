"""Which intermediates a checkpointed segment keeps: the dearest to compute again for their bytes.

Enters: a segment's equations. Leaves: its frontier, from nothing kept to nothing computed again. For one price of a byte the
cheapest choice is a minimum cut between what is stored anyway and what the backward pass needs, and so exact; the prices that
matter are found by bisection. Segments are joined by spending bytes where they save most operations.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxmem_callbacks.transforms.equations import variables
from jaxmem_callbacks.transforms.flops import equation_flops
from jaxmem_callbacks.transforms.residuals import is_inexact, nbytes, needs_own_result, residual_values

# Capacities are whole numbers of 32 bits in SciPy's flow; all that could be computed again together fits below the limit.
_ALL = 2**30
_ENDLESS = 2**31 - 1
# More points of one segment than this are finer than the estimate.
_MOST_POINTS = 24
# What is left to compute again below this share of a segment's work is elementwise, which compilers fuse into its readers.
_CHEAP_SHARE = 0.02
# Values alike in bytes and work would all be kept at one price. A later one is a little cheaper: it waits shorter.
_LATER_DISCOUNT = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Kept:
    """One point of a segment's frontier.

    Attributes:
        bytes: Kept from the forward to the backward pass besides the segment's inputs.
        flops: Operations computed again.
        values: What is kept.
        priced: Its bytes as the search counts them, with the discount for what is kept shortly.
    """

    bytes: int
    flops: int
    values: frozenset[Any] = field(compare=False)
    priced: float = field(compare=False)


Known = dict[Hashable, "tuple[list[Any], list[Kept]]"]


def frontier(eqns: Sequence[Any], free: frozenset[Any] = frozenset(), known: Known | None = None) -> list[Kept]:
    """What a segment may keep: ascending in bytes, descending in operations computed again.

    It ends where hardly anything dear is computed again: keeping more would cost bytes and save no time.

    Args:
        eqns: The segment's equations, in order, without reports.
        free: Its results that are stored anyway, because a later segment takes them.
        known: Frontiers of the segments before, by their networks; this one is looked up in it or added. Layers that were
            unrolled are alike, and a flow is the dearest thing that planning does before it compiles.
    """
    graph = _Graph(eqns, free)
    known = {} if known is None else known
    if graph.key not in known:
        known[graph.key] = graph.made, _points(graph)
        return known[graph.key][1]
    made, points = known[graph.key]
    names = dict(zip(made, graph.made, strict=True))
    return [replace(point, values=frozenset(names[var] for var in point.values)) for point in points]


def _points(graph: _Graph) -> list[Kept]:
    none, everything = graph.cheapest(graph.dearest_price), graph.cheapest(0.0)
    points = {none.bytes: none, everything.bytes: everything}
    gaps = [_gap(none, everything)]
    while gaps and len(points) < _MOST_POINTS:
        _, left, right = heapq.heappop(gaps)
        if right.priced <= left.priced or right.flops >= left.flops:
            continue
        middle = graph.cheapest((left.flops - right.flops) / (right.priced - left.priced))
        if left.bytes < middle.bytes < right.bytes and right.flops <= middle.flops < left.flops:
            points[middle.bytes] = middle
            for gap in (_gap(left, middle), _gap(middle, right)):
                heapq.heappush(gaps, gap)
    return _worth_keeping(sorted(points.values()))


def _gap(left: Kept, right: Kept) -> tuple[float, Kept, Kept]:
    """Two neighbouring points, those with most between them first in a heap."""
    return -float(left.flops - right.flops) * (right.bytes - left.bytes), left, right


def _worth_keeping(points: Sequence[Kept]) -> list[Kept]:
    chosen = [points[0]]
    for point in points[1:]:
        if chosen[-1].flops > _CHEAP_SHARE * points[0].flops and point.flops < chosen[-1].flops:
            chosen.append(point)
    return chosen


def keep_within(frontiers: Sequence[Sequence[Kept]], trips: Sequence[int], share: float) -> list[frozenset[Any]]:
    """What each segment keeps under one limit for all.

    Args:
        frontiers: One a segment, in the order of the forward pass.
        trips: How often each segment runs, and so how often its kept values are stored.
        share: Limit, as a share of what keeping everything would take.

    Returns:
        One set of values a segment. Of equal savings those of later segments come first: the backward pass frees them first.
    """
    left = (
        share * _everything(frontiers, trips) + 0.5
    )  # bytes are whole: a share that came from bytes means those bytes
    chosen = [0] * len(frontiers)
    full = set[int]()
    for place, index in _dearest_first(frontiers):
        if place in full:
            continue
        points = frontiers[place]
        cost = (points[index].bytes - points[index - 1].bytes) * trips[place]
        if cost > left:
            full.add(place)
            continue
        left -= cost
        chosen[place] = index
    return [points[index].values for points, index in zip(frontiers, chosen, strict=True)]


@dataclass(frozen=True, slots=True)
class Share:
    """One point of what a whole loss may keep.

    Attributes:
        share: Of what keeping everything dear would take, from 0 to 1; `keep_within` takes it.
        bytes: Kept besides the values at the cuts.
        flops: Operations computed again.
    """

    share: float
    bytes: int
    flops: int


def shares(frontiers: Sequence[Sequence[Kept]], trips: Sequence[int]) -> list[Share]:
    """The frontier of a whole loss: from nothing kept to hardly anything dear computed again."""
    whole = _everything(frontiers, trips)
    kept = 0
    again = sum(points[0].flops * times for points, times in zip(frontiers, trips, strict=True))
    found = [Share(0.0, 0, again)]
    for place, index in _dearest_first(frontiers):
        before, point = frontiers[place][index - 1 : index + 1]
        kept += (point.bytes - before.bytes) * trips[place]
        again -= (before.flops - point.flops) * trips[place]
        found.append(Share(kept / whole if whole else 1.0, kept, again))
    return found


def _everything(frontiers: Sequence[Sequence[Kept]], trips: Sequence[int]) -> int:
    return sum(points[-1].bytes * times for points, times in zip(frontiers, trips, strict=True))


def _dearest_first(frontiers: Sequence[Sequence[Kept]]) -> Iterator[tuple[int, int]]:
    """Segment and point, one step along one frontier at a time, those first that save most operations a byte."""
    waiting = [(_gain(points, 1), -place) for place, points in enumerate(frontiers) if len(points) > 1]
    heapq.heapify(waiting)
    index = [1] * len(frontiers)
    while waiting:
        _, negative = heapq.heappop(waiting)
        place = -negative
        yield place, index[place]
        index[place] += 1
        if index[place] < len(frontiers[place]):
            heapq.heappush(waiting, (_gain(frontiers[place], index[place]), negative))


def _gain(points: Sequence[Kept], index: int) -> float:
    """Negative operations saved by a byte, for a heap that gives the smallest first."""
    before, point = points[index - 1], points[index]
    return -(before.flops - point.flops) / max(point.bytes - before.bytes, 1)


def _once(atoms: Sequence[Any]) -> dict[Any, None]:
    """The variables among operands, each once, in order."""
    return dict.fromkeys(variables(atoms))


class _Graph:
    """A segment as a flow network: equations cost operations to do again, values cost bytes to keep.

    An edge from the source to an equation is cut where the equation is done again, an edge from an equation to its result
    where the result is kept. What is done again needs its operands, what the backward pass needs must be had: those edges
    are endless.
    """

    def __init__(self, eqns: Sequence[Any], free: frozenset[Any]) -> None:
        self.made = made = [var for eqn in eqns for var in eqn.outvars]
        inputs = {var for eqn in eqns for var in variables(eqn.invars)}.difference(made)
        number: dict[Any, int] = {var: index for index, var in enumerate(made, 2 + len(eqns))}
        active = {var for var in inputs if is_inexact(var)}
        self.needed = residual_values(eqns, inputs, active)
        self._makers = np.array([2 + place for place, eqn in enumerate(eqns) for _ in eqn.outvars], np.int64)
        self._values = np.arange(len(made)) + 2 + len(eqns)
        self.work = np.array([equation_flops(eqn) for eqn in eqns], np.float64)
        self.sizes = np.array([0 if var in free else nbytes(var) for var in made], np.float64)
        self._later = 1.0 + _LATER_DISCOUNT * np.linspace(1.0, 0.0, len(made))
        # An equation may take a value twice; twice endless would be more than the flow's whole numbers hold.
        uses = [(number[var], 2 + i) for i, eqn in enumerate(eqns) for var in _once(eqn.invars) if var in number]
        # A derivative that is a function of the equation's own result does not see what was kept of it.
        anyway = [
            2 + i
            for i, eqn in enumerate(eqns)
            if needs_own_result(eqn) and not active.isdisjoint(variables(eqn.invars))
        ]
        endless = uses + [(number[var], 1) for var in self.needed] + [(place, 1) for place in anyway]
        sources = [(0, 2 + place) for place in range(len(eqns))]
        edges = np.array([*sources, *zip(self._makers, self._values, strict=True), *endless], np.int32).reshape(-1, 2)
        self._rows, self._columns = edges.T
        self._endless = np.full(len(endless), _ENDLESS)
        self._nodes = 2 + len(eqns) + len(made)
        #: Two segments with equal keys have equal frontiers, value for value.
        self.key = (len(eqns), bool(self.needed), edges.tobytes(), self.work.tobytes(), self.sizes.tobytes())

    @property
    def dearest_price(self) -> float:
        """Operations a byte, above which nothing is worth keeping."""
        return 4.0 * (self.work.sum() + len(self.work)) / self.sizes[self.sizes > 0].min(initial=np.inf)

    def cheapest(self, price: float) -> Kept:
        """The cheapest choice where keeping a byte costs as much as ``price`` operations."""
        if not self.needed:
            return Kept(0, 0, frozenset(), 0.0)
        kept, again = self._cut(price)
        values = frozenset(self.made[index] for index in np.flatnonzero(kept))
        priced = float((self.sizes * self._later)[kept].sum())
        return Kept(int(self.sizes[kept].sum()), int(self.work[again].sum()), values, priced)

    def _cut(self, price: float) -> tuple[np.ndarray, np.ndarray]:
        """Which results are kept and which equations are done again."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        # What is computed again never costs nothing, so that of two equal choices the one with less work is taken.
        scale = _ALL / max(self.work.sum() + len(self.work), 1.0)
        work = np.maximum((self.work + 1.0) * scale, 1.0)
        bytes_ = np.minimum(np.ceil(self.sizes * self._later * price * scale), _ENDLESS)
        capacity = np.concatenate([work, bytes_, self._endless]).astype(np.int32)
        shape = (self._nodes, self._nodes)
        network = csr_array((capacity, (self._rows, self._columns)), shape=shape, dtype=np.int32)
        left = network - maximum_flow(network, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        before = np.zeros(self._nodes, bool)
        before[breadth_first_order(left, 0, return_predecessors=False)] = True
        return before[self._makers] & ~before[self._values], ~before[2 : 2 + len(self.work)]
