"""What segments keep, inside loops and branches too: a frontier of stored bytes and recomputed operations."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend import core

from jaxmem_callbacks.records.plans import FrontierPoint
from jaxmem_callbacks.transforms.costs import (
    ALIKE,
    NOTABLE,
    SIDE,
    TABLE,
    collective_work,
    equation_flops,
    is_complex,
    is_inexact,
    nbytes,
    needs_own_result,
    residual_values,
)
from jaxmem_callbacks.transforms.tracing import (
    close,
    consts_of,
    derive,
    flatten,
    is_variable,
    name_equation,
    name_template,
    new_variable,
    scan_arity,
    side_effects,
    variables,
)

# Where in an equation's parameters the bodies are that are opened.
_BODIES = {"scan": "jaxpr", "cond": "branches"}
# Derivatives need nothing of what a body is handed and hands out, but the index of a branch.
_HANDED = core.Primitive("add_any")
_CHOSEN = core.Primitive("select_n")


#: Operations, and work.
_Cost = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Inside:
    """A value inside an equation's body, known by its place: equal layers may share one body and its variables.

    Attributes:
        owner: The equation's first result, itself inside another where that is.
        body: Which of the equation's bodies.
        place: Which equation of the flattened body makes it.
        result: Which result of that.
    """

    owner: Any
    body: int
    place: int
    result: int


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """Stands where a body takes what is outside of it, or hands it out; costs nothing."""

    primitive: Any
    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """How often something runs.

    Attributes:
        times: As often as the loops around it; as often is stored what is kept of it.
        part: Of the branches of a conditional one runs, the most expensive at most: each has its part in that one's work.
        branch: The innermost branch around it; 0 outside all.
    """

    times: int = 1
    part: float = 1.0
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment's equations, those of inner bodies among them.

    Attributes:
        eqns: In order, but that a step of a loop takes what the one before made.
        runs: How often each runs.
        flops: Operations of each, as often as its loops run.
        work: The same with what it moves; see `costs.collective_work`.
        conds: For each conditional the branch around it, and its own branches.
        inside: Variables of values inside bodies, and where these are.
        handed: Variables of what bodies are handed, which is kept outside if at all.
    """

    eqns: list[Any] = field(default_factory=list[Any])
    runs: list[_Run] = field(default_factory=list[_Run])
    flops: list[int] = field(default_factory=list[int])
    work: list[float] = field(default_factory=list[float])
    conds: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    inside: dict[Any, Inside] = field(default_factory=dict[Any, Inside])
    handed: set[Any] = field(default_factory=set[Any])

    def add(self, eqn: Any, run: _Run, cost: _Cost = (0, 0.0)) -> None:
        """One more equation, with its operations and its work."""
        self.eqns.append(eqn)
        self.runs.append(run)
        self.flops.append(run.times * cost[0])
        self.work.append(run.times * cost[1])

    def total(self, costs: np.ndarray) -> np.ndarray:
        """What some of the equations cost together, of each conditional the most expensive branch.

        Args:
            costs: float64[equations, ...]: what each costs, 0 for those that are not done.
        """
        if not self.conds:
            return costs.sum(0)
        branches = np.zeros((1 + sum(len(own) for _, own in self.conds), *costs.shape[1:]))
        np.add.at(branches, [run.branch for run in self.runs], costs)
        for around, own in reversed(self.conds):  # inner ones came later
            branches[around] += branches[own].max(0)
        return branches[0]


def opened(eqns: Sequence[Any]) -> Opened:
    """A segment's equations with the expensive ones among its inner loops and branches opened."""
    found, costs = Opened(), [_cost(eqn) for eqn in eqns]
    # What a smaller equation holds is not worth a choice of its own.
    _open(eqns, costs, found, ALIKE * sum(work for _, work in costs), _Run())
    return found


def whole(eqns: Sequence[Any]) -> Opened:
    """A segment's equations, none of them opened."""
    found = Opened()
    for eqn in eqns:
        found.add(eqn, _Run(), _cost(eqn))
    return found


def _cost(eqn: Any) -> _Cost:
    flops = equation_flops(eqn)
    return flops, flops + collective_work(eqn)


def _open(eqns: Sequence[Any], costs: Sequence[_Cost], found: Opened, least: float, run: _Run) -> None:
    for eqn, cost in zip(eqns, costs, strict=True):
        dear = eqn.primitive.name in _BODIES and run.times * run.part * cost[1] > least
        if not dear or not _can_be_named_in(eqn):
            found.add(eqn, run, cost)
        elif eqn.primitive.name == "scan":
            _open_loop(eqn, found, least, run)
        else:
            _open_branches(eqn, found, least, run)


def _can_be_named_in(eqn: Any) -> bool:
    return not side_effects(eqn) and not any(consts_of(body) for body in _bodies(eqn))


def _bodies(eqn: Any) -> Sequence[Any]:
    """The closed jaxprs of an equation that is opened."""
    found = eqn.params[_BODIES[eqn.primitive.name]]
    return found if isinstance(found, (tuple, list)) else [found]


def _open_loop(eqn: Any, found: Opened, least: float, run: _Run) -> None:
    """Each value of the body as often as it runs; a step takes what was carried to it, from before the loop or from a step."""
    consts, carry = scan_arity(eqn)
    within = replace(run, times=run.times * int(eqn.params["length"]))
    flat = flatten(_bodies(eqn)[0], hoist_constants=False)
    taken = [new_variable(var) for var in flat.invars[consts:]]
    known = dict(zip(flat.invars, [*eqn.invars[:consts], *taken], strict=True))
    eqns, made = _copied(flat.eqns, known)
    results = [made[atom] if is_variable(atom) else atom for atom in flat.outvars]
    found.handed.update(taken)
    for place, var in enumerate(taken):
        handed = [eqn.invars[consts + place], *results[place : min(place + 1, carry)]]
        found.add(_Link(_HANDED, handed, [var]), within)
    _record_inside(eqn, 0, eqns, found)
    _open(eqns, [_cost(one) for one in eqns], found, least, within)
    for result, var in zip(results, eqn.outvars, strict=True):
        found.add(_Link(_HANDED, [result], [var]), run)


def _open_branches(eqn: Any, found: Opened, least: float, run: _Run) -> None:
    bodies = [flatten(body, hoist_constants=False) for body in _bodies(eqn)]
    costs = [[_cost(one) for one in body.eqns] for body in bodies]
    works = [sum(work for _, work in own) for own in costs]
    first = 1 + sum(len(own) for _, own in found.conds)
    found.conds.append((run.branch, list(range(first, first + len(bodies)))))
    results = []
    for number, body in enumerate(bodies):
        eqns, made = _copied(body.eqns, dict(zip(body.invars, eqn.invars[1:], strict=True)))
        _record_inside(eqn, number, eqns, found)
        _open(
            eqns,
            costs[number],
            found,
            least,
            replace(run, part=run.part * max(works) / sum(works), branch=first + number),
        )
        results.append([made[atom] if is_variable(atom) else atom for atom in body.outvars])
    for place, var in enumerate(eqn.outvars):
        found.add(_Link(_CHOSEN, [eqn.invars[0], *(each[place] for each in results)], [var]), run)


def _copied(eqns: Sequence[Any], known: Mapping[Any, Any]) -> tuple[list[Any], dict[Any, Any]]:
    """The equations of a body with variables of their own, and what those are called that are ``known`` or made."""
    names, copied = dict(known), []
    for eqn in eqns:
        invars = [names[atom] if is_variable(atom) else atom for atom in eqn.invars]
        outvars = [new_variable(var) for var in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        copied.append(eqn.replace(invars=invars, outvars=outvars))
    return copied, names


def _record_inside(eqn: Any, body: int, eqns: Sequence[Any], found: Opened) -> None:
    owner = found.inside.get(eqn.outvars[0], eqn.outvars[0])
    found.inside.update(
        (var, Inside(owner, body, place, result))
        for place, one in enumerate(eqns)
        for result, var in enumerate(one.outvars)
    )


def named(eqns: Sequence[Any], kept: Mapping[Any, str]) -> tuple[list[Any], dict[Any, Any]]:
    """The equations with the kept values named for the checkpoint's policy, and those values' new variables.

    Args:
        eqns: Of a segment.
        kept: Its values, inputs and what is `Inside` too, and their names.
    """
    if not kept:
        return list(eqns), {}
    made = {var for eqn in eqns for var in eqn.outvars}
    outside = {key for key in kept if not isinstance(key, Inside)}
    inputs = {var: new_variable(var) for var in kept if var in outside and var not in made}
    templates = {name: name_template(name) for name in dict.fromkeys(kept.values())}
    readers = {var: eqn for eqn in reversed(eqns) for var in variables(eqn.invars)}  # the first of each
    found = [name_equation(templates[kept[var]], var, name, readers.get(var, eqns[0])) for var, name in inputs.items()]
    more, names = _Naming(kept, templates).named(eqns, {var: var for var in made}, inputs)
    return [*found, *more], names


class _Naming:
    """Names values in equations and in their bodies.

    Args:
        kept: Values, `Inside` or not, and their names.
        templates: An equation that names, by name.
    """

    def __init__(self, kept: Mapping[Any, str], templates: Mapping[str, Any]) -> None:
        self._kept = kept
        self._templates = templates
        self._owners = set[Any]()
        for key in kept:
            while isinstance(key, Inside):
                key = key.owner  # noqa: PLW2901 - outwards
                self._owners.add(key)

    def named(
        self, eqns: Sequence[Any], keys: Mapping[Any, Any], inputs: Mapping[Any, Any]
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Equations with their kept values named, and those values' new variables.

        Args:
            eqns: In order.
            keys: What the variables they make are called among what is kept.
            inputs: New variables of what they take.
        """
        names, found = dict(inputs), list[Any]()
        for eqn in eqns:
            inner = eqn.replace(params=self._with_bodies(eqn, keys[eqn.outvars[0]])) if self._owns(eqn, keys) else eqn
            invars = [names.get(atom, atom) if is_variable(atom) else atom for atom in eqn.invars]
            found.append(inner.replace(invars=invars))
            for var in eqn.outvars:  # in order: every process traces the same program
                if (name := self._kept.get(keys[var])) is not None:
                    names[var] = new_variable(var)
                    found.append(name_equation(self._templates[name], var, names[var], eqn))
        return found, names

    def _owns(self, eqn: Any, keys: Mapping[Any, Any]) -> bool:
        return bool(eqn.outvars) and keys[eqn.outvars[0]] in self._owners

    def _with_bodies(self, eqn: Any, owner: Any) -> dict[str, Any]:
        word = _BODIES[eqn.primitive.name]
        bodies = tuple(self._body(body, owner, number) for number, body in enumerate(_bodies(eqn)))
        return {**eqn.params, word: bodies if isinstance(eqn.params[word], (tuple, list)) else bodies[0]}

    def _body(self, closed: Any, owner: Any, number: int) -> Any:
        flat = flatten(closed, hoist_constants=False)
        keys = {
            var: Inside(owner, number, place, result)
            for place, eqn in enumerate(flat.eqns)
            for result, var in enumerate(eqn.outvars)
        }
        eqns, names = self.named(flat.eqns, keys, {})
        outvars = [names.get(atom, atom) if is_variable(atom) else atom for atom in flat.outvars]
        return close(derive(flat.template, invars=flat.invars, outvars=outvars, eqns=eqns))


# Capacities are whole numbers of 32 bits in SciPy's flow; all that could be computed again together fits below the limit.
_ALL = 2**30
_ENDLESS = 2**31 - 1
# More points of one segment than this are finer than the estimate.
_MOST_POINTS = round(1 / NOTABLE)
# Of so many values every set is tried, at a few operations on arrays of 2 to this power for each equation.
_MOST_TRIED = SIDE.bit_length()


@dataclass(frozen=True, slots=True, order=True)
class SaveSet:
    """One point of a segment's frontier.

    Attributes:
        bytes: Kept from the forward to the backward pass besides the segment's inputs.
        flops: Operations computed again.
        values: What is kept.
        priced: Its bytes as the search counts them, with the discount for what is kept shortly.
        work: Operations computed again with those in whose time is moved what is moved again; see `costs.collective_work`.
    """

    bytes: int
    flops: int
    values: frozenset[Any] = field(compare=False)
    priced: float = field(compare=False)
    work: float = field(compare=False)

    @property
    def costs(self) -> tuple[float, float]:
        """Operations and work, neither of which is little only because the other is much."""
        return self.flops, self.work


def frontier(eqns: Sequence[Any], free: frozenset[Any] = frozenset(), *, inside: bool = True) -> list[SaveSet]:
    """What a segment may keep: ascending in bytes, descending in work computed again.

    It ends where hardly anything expensive is recomputed: keeping more would cost bytes and save no time.

    Args:
        eqns: The segment's equations, in order, without reports.
        free: Its results that are stored anyway, because a later segment takes them.
        inside: Whether values inside inner loops and branches may be kept too.
    """
    graph = _Graph(opened(eqns) if inside else whole(eqns), free)
    if not (known := _found_of(graph.key)):
        known.append((graph.made, _points(graph)))
    made, points = known[0]  # another thread that traces the same may have found it too
    names = dict(zip(made, graph.keys, strict=True))
    return [replace(point, values=frozenset(names[var] for var in point.values)) for point in points]


@functools.lru_cache(maxsize=SIDE * _MOST_POINTS)
def _found_of(network: Hashable) -> list[tuple[list[Any], list[SaveSet]]]:  # noqa: ARG001 - the key
    """Where the frontier of a network is kept once it is found, with what the network makes.

    Layers that were unrolled are alike, each step of a search traces the loss anew, and a flow is the most expensive thing that
    planning does before it compiles.
    """
    return []


def _points(graph: _Graph) -> list[SaveSet]:
    none, everything = graph.cheapest(graph.dearest_price), graph.cheapest(0.0)
    points = {none.bytes: none, everything.bytes: everything}
    gaps = [_gap(none, everything)]
    while gaps and len(points) < _MOST_POINTS:
        _, left, right = heapq.heappop(gaps)
        if right.priced <= left.priced or right.work >= left.work:
            continue
        middle = graph.cheapest((left.work - right.work) / (right.priced - left.priced))
        if left.bytes < middle.bytes < right.bytes and right.work <= middle.work < left.work:
            points[middle.bytes] = middle
            for gap in (_gap(left, middle), _gap(middle, right)):
                heapq.heappush(gaps, gap)
    return _worth_keeping([*points.values(), *_between(graph, sorted(points.values()))])


def _gap(left: SaveSet, right: SaveSet) -> tuple[float, SaveSet, SaveSet]:
    """Two neighbouring points, those with most between them first in a heap."""
    return -float(left.work - right.work) * (right.bytes - left.bytes), left, right


def _between(graph: _Graph, points: Sequence[SaveSet]) -> list[SaveSet]:
    """What no price finds: sets between neighbouring points, of as many at a time as differ in few values."""
    found: list[SaveSet] = []
    place = 0
    while place < len(points) - 1:
        last = place + 1
        free = points[place].values ^ points[last].values
        while (
            last + 1 < len(points)
            and len(more := free | (points[last].values ^ points[last + 1].values)) <= _MOST_TRIED
        ):
            free, last = more, last + 1
        found += graph.every_set(points[place].values & points[last].values, free)
        place = last
    return found


def _worth_keeping(points: Sequence[SaveSet]) -> list[SaveSet]:
    """Those that no other beats, as long as what they save is expensive; of equals the one that waits shortest."""
    chosen: list[SaveSet] = []
    for point in sorted(points, key=lambda each: (each.bytes, each.work, each.priced)):
        dear = not chosen or any(
            last > ALIKE * most for last, most in zip(chosen[-1].costs, chosen[0].costs, strict=True)
        )
        if dear and (not chosen or point.work < chosen[-1].work):
            chosen.append(point)
    return chosen


def _once(atoms: Sequence[Any]) -> dict[Any, None]:
    """The variables among operands, each once, in order."""
    return dict.fromkeys(variables(atoms))


def _needed(eqns: Sequence[Any], made: Sequence[Any], *, again: bool) -> tuple[list[Any], set[Any]]:
    """The values that derivatives need, and those that are differentiated; ``again`` where some are made after they are taken."""
    inputs = {var for eqn in eqns for var in variables(eqn.invars)}.difference(made)
    active = {var for var in inputs if is_inexact(var)}
    before, needed = -1, list[Any]()
    while before < len(active) and (again or before < 0):
        before, needed = len(active), residual_values(eqns, inputs, active)
    return needed, active


class _Graph:
    """A segment as a flow network: equations cost operations to do again, values cost bytes to keep.

    An edge from the source to an equation is cut where the equation is done again, an edge from an equation to its result
    where the result is kept. What is done again needs its operands, what the backward pass needs must be had: those edges
    are endless.
    """

    def __init__(self, inner: Opened, free: frozenset[Any]) -> None:
        self._opened = inner
        eqns = inner.eqns
        self.made = made = [var for eqn in eqns for var in eqn.outvars]
        #: What is made, as those call it who keep it.
        self.keys = [inner.inside.get(var, var) for var in made]
        number: dict[Any, int] = {var: index for index, var in enumerate(made, 2 + len(eqns))}
        self._has_loops = bool(inner.handed)
        self.needed, active = _needed(eqns, made, again=self._has_loops)
        self._makers = np.array([2 + place for place, eqn in enumerate(eqns) for _ in eqn.outvars], np.int64)
        self._values = np.arange(len(made)) + 2 + len(eqns)
        #: Of each equation its operations, and its work.
        self._costs = np.array([inner.flops, inner.work], np.float64).T
        self.work = self._costs[:, 1] * [run.part for run in inner.runs]
        times = [run.times for eqn, run in zip(eqns, inner.runs, strict=True) for _ in eqn.outvars]
        sizes = [0 if var in free else often * nbytes(var) for var, often in zip(made, times, strict=True)]
        self.sizes = np.array(sizes, np.float64)
        unkeepable = [var in inner.handed or is_complex(getattr(var.aval, "dtype", None)) for var in made]
        self._unkeepable = np.array(unkeepable, bool) & (self.sizes > 0)
        # Values alike in bytes and work would all be kept at one price. A later one is a little cheaper: it waits shorter.
        self._later = 1.0 + NOTABLE * np.linspace(1.0, 0.0, len(made))
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
        self._takes = [[var for var in _once(eqn.invars) if var in number] for eqn in eqns]
        self._anyway = {place - 2 for place in anyway}
        self._results = [list(eqn.outvars) for eqn in eqns]
        self._place = {var: index for index, var in enumerate(made)}
        self._nodes = 2 + len(eqns) + len(made)
        #: Two segments with equal keys have equal frontiers, value for value.
        weights = (self._costs.tobytes(), self.work.tobytes(), self.sizes.tobytes(), self._unkeepable.tobytes())
        branches = tuple(run.branch for run in inner.runs) if inner.conds else ()
        self.key = (
            len(eqns),
            bool(self.needed),
            self._has_loops,
            edges.tobytes(),
            *weights,
            branches,
            repr(inner.conds),
        )

    @property
    def dearest_price(self) -> float:
        """Operations a byte, above which nothing is worth keeping."""
        return 2 * (self.work.sum() + len(self.work)) / self.sizes[self.sizes > 0].min(initial=np.inf)

    def cheapest(self, price: float) -> SaveSet:
        """The cheapest choice where keeping a byte costs as much as ``price`` operations."""
        if not self.needed:
            return SaveSet(0, 0, frozenset(), 0.0, 0.0)
        kept, again = self._cut(price)
        values = frozenset(self.made[index] for index in np.flatnonzero(kept))
        priced = float((self.sizes * self._later)[kept].sum())
        flops, work = self._opened.total(self._costs * again[:, None])
        return SaveSet(int(self.sizes[kept].sum()), int(flops), values, priced, float(work))

    def every_set(self, always: frozenset[Any], free: frozenset[Any]) -> list[SaveSet]:
        """The best of every set of the ``free`` values, with those that are kept ``always``.

        All sets are followed at once through the equations, last first: an array holds for each whether a value must be had.
        Of more than the most that can be tried, the largest are varied and the others kept.
        """
        ordered = sorted(free, key=lambda var: (-self.sizes[self._place[var]], self._place[var]))
        varied = {var: place for place, var in enumerate(ordered[:_MOST_TRIED])}
        always |= frozenset(ordered[_MOST_TRIED:])
        sets = np.arange(1 << len(varied))
        wanted = dict.fromkeys(self.needed, np.ones(len(sets), bool))
        if self._has_loops:
            before = -1  # a step's want is that of the one before it, which comes later in the list
            while (count := sum(int(each.sum()) for each in wanted.values())) > before:
                before = count
                self._followed(sets, always, varied, wanted)
        bytes_, priced, again, stored = self._followed(sets, always, varied, wanted)
        work = self._opened.total(self._costs[:, 1:] * again)
        order = np.lexsort((priced, work, bytes_))
        best = order[np.r_[True, np.diff(np.minimum.accumulate(work[order])) < 0]]
        flops = self._opened.total(self._costs[:, :1] * again[:, best])
        values = [frozenset(var for var, kept in stored.items() if kept[place]) for place in best]
        rows = zip(bytes_[best], flops, values, priced[best], work[best], strict=True)
        return [SaveSet(int(size), int(done), some, float(dear), float(cost)) for size, done, some, dear, cost in rows]

    def _followed(
        self, sets: np.ndarray, always: frozenset[Any], varied: dict[Any, int], wanted: dict[Any, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[Any, np.ndarray]]:
        """Of every set the bytes, those as they are priced, which equations are done again, and what is stored, in one pass.

        ``wanted`` learns what must be had.
        """
        (bytes_, priced), done = np.zeros((2, len(sets))), np.zeros((len(self.work), len(sets)), bool)
        stored: dict[Any, np.ndarray] = {}
        for place in reversed(range(len(self.work))):
            again = np.full(len(sets), place in self._anyway)
            for var in self._results[place]:
                if (missing := wanted.get(var)) is None:
                    continue
                if var in always or var in varied:
                    kept = missing & (sets >> varied[var] & 1 == 1) if var in varied else missing
                    stored[var], missing = kept, missing & ~kept
                    bytes_ += self.sizes[self._place[var]] * kept
                    priced += (self.sizes * self._later)[self._place[var]] * kept
                again |= missing
            done[place] = again
            for var in self._takes[place]:
                wanted[var] = wanted[var] | again if var in wanted else again
        return bytes_, priced, done, stored

    def _cut(self, price: float) -> tuple[np.ndarray, np.ndarray]:
        """Which results are kept and which equations are done again."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        # What is computed again never costs nothing, so that of two equal choices the one with less work is taken.
        scale = _ALL / max(self.work.sum() + len(self.work), 1.0)
        work = np.maximum((self.work + 1.0) * scale, 1.0)
        bytes_ = np.minimum(np.ceil(self.sizes * self._later * price * scale), _ENDLESS)
        bytes_[self._unkeepable] = _ENDLESS
        capacity = np.concatenate([work, bytes_, self._endless]).astype(np.int32)
        shape = (self._nodes, self._nodes)
        network = csr_array((capacity, (self._rows, self._columns)), shape=shape, dtype=np.int32)
        left = network - maximum_flow(network, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        before = np.zeros(self._nodes, bool)
        before[breadth_first_order(left, 0, return_predecessors=False)] = True
        return before[self._makers] & ~before[self._values], ~before[2 : 2 + len(self.work)]


# Points of a joined frontier, besides those that are cheapest for some price, which are as many at most.
_MOST_BETWEEN = SIDE // 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedFrontier:
    """The frontier of some segments together.

    Attributes:
        bytes: int64[points], ascending: kept besides the values at the cuts.
        flops: float64[points]: operations computed again.
        work: float64[points], descending: these with what is moved again; see `costs.collective_work`.
        peaks: int64[points]: estimated bytes alive at most while one of the segments is differentiated.
        parts: The two that it was joined of; none for a single segment.
        chosen: int64[points, 2]: which point of each of these.
        values: What a single segment keeps at each point.
    """

    bytes: np.ndarray
    flops: np.ndarray
    work: np.ndarray
    peaks: np.ndarray
    parts: tuple[MergedFrontier, ...] = ()
    chosen: np.ndarray
    values: tuple[frozenset[Any], ...] = ()

    def kept(self, point: int) -> list[frozenset[Any]]:
        """What each segment keeps at one point, in their order."""
        if not self.parts:
            return list(self.values[point : point + 1])
        return [each for part, own in zip(self.parts, self.chosen[point], strict=True) for each in part.kept(int(own))]

    def points(self) -> list[FrontierPoint]:
        """The points, each with its share of what the last one keeps."""
        whole, segments = int(self.bytes[-1]), len(self.kept(0))
        return [
            FrontierPoint(int(kept) / whole if whole else 0.0, int(kept), int(again), int(peak), segments, float(work))
            for kept, again, peak, work in zip(self.bytes, self.flops, self.peaks, self.work, strict=True)
        ]

    def within(self, share: float) -> int:
        """The last point under one limit for all segments, as a share of what the last point of all keeps."""
        # Bytes are whole: a share that came from bytes means those bytes.
        limit = share * int(self.bytes[-1]) + 0.5
        return int(np.searchsorted(self.bytes, limit, side="right")) - 1


def merge_frontiers(
    frontiers: Sequence[Sequence[SaveSet]], trips: Sequence[int], peaks: Sequence[int] = ()
) -> MergedFrontier:
    """The frontier of a whole loss: from nothing kept to hardly anything expensive recomputed.

    Of equal savings those of later segments come first: the backward pass frees them first.

    Args:
        frontiers: One a segment, in the order of the forward pass.
        trips: How often each segment runs, and so how often its kept values are stored.
        peaks: Estimated bytes alive while each is differentiated, where nothing is kept; where unknown 0.
    """
    known: dict[tuple[bytes, ...], np.ndarray] = {}
    alive = peaks or [0] * len(frontiers)
    whole = [_single(points, times, peak) for points, times, peak in zip(frontiers, trips, alive, strict=True)]
    while len(whole) > 1:
        pairs = [whole[place : place + 2] for place in range(0, len(whole), 2)]
        whole = [_both(*pair, known) if len(pair) > 1 else pair[0] for pair in pairs]
    return whole[0] if whole else _single([SaveSet(0, 0, frozenset(), 0.0, 0.0)], 1, 0)


def least_work(frontiers: Sequence[MergedFrontier], worth: float) -> tuple[MergedFrontier, list[tuple[int, int]]]:
    """Of several cuts of one loss, at each point of the first the one with least work under that point's peak.

    Args:
        frontiers: One for each choice of cuts.
        worth: How much less work than the first has other cuts must have.

    Returns:
        The first with that work, and for each of its points which of the frontiers it is, and which point of that.
    """
    first, *others = frontiers
    work, flops, limit = first.work.copy(), first.flops.copy(), first.work - worth
    chosen = [(0, point) for point in range(len(work))]
    for number, other in enumerate(others, 1):
        order = np.lexsort((other.work, other.peaks))
        least = np.minimum.accumulate(other.work[order])
        best = order[np.maximum.accumulate(np.where(other.work[order] <= least, np.arange(len(order)), 0))]
        under = np.searchsorted(other.peaks[order], first.peaks, side="right") - 1
        for point in np.flatnonzero((under >= 0) & (other.work[best[under]] < np.minimum(work, limit))).tolist():
            place = int(best[under[point]])
            chosen[point], work[point], flops[point] = (number, place), other.work[place], other.flops[place]
    return replace(first, work=work, flops=flops), chosen


def _single(points: Sequence[SaveSet], times: int, peak: int) -> MergedFrontier:
    bytes_ = np.array([point.bytes for point in points], np.int64) * times
    return MergedFrontier(
        bytes=bytes_,
        # What a segment keeps is there anyway while it is differentiated itself; a loop differentiates one step at a time.
        peaks=peak + (bytes_ if times > 1 else np.zeros_like(bytes_)),
        flops=np.array([point.flops for point in points], np.float64) * times,
        work=np.array([point.work for point in points], np.float64) * times,
        chosen=np.zeros((len(points), 0), np.int64),
        values=tuple(point.values for point in points),
    )


def _both(left: MergedFrontier, right: MergedFrontier, known: dict[tuple[bytes, ...], np.ndarray]) -> MergedFrontier:
    """Two frontiers joined; layers that were unrolled are alike, and so are the sums of theirs."""
    key = tuple(array.tobytes() for part in (left, right) for array in (part.bytes, part.work))
    if key not in known:
        enough = len(left.bytes) * len(right.bytes) <= TABLE
        known[key] = _every_sum(left, right) if enough else _by_price(left, right)
    one, other = known[key].T
    return MergedFrontier(
        bytes=left.bytes[one] + right.bytes[other],
        flops=left.flops[one] + right.flops[other],
        work=left.work[one] + right.work[other],
        peaks=np.maximum(left.peaks[one], left.bytes[one] + right.peaks[other]),
        parts=(left, right),
        chosen=known[key],
    )


def _every_sum(left: MergedFrontier, right: MergedFrontier) -> np.ndarray:
    """The points of two frontiers whose sums no others beat; of too many those with a price, and some between."""
    one, other = (places.ravel() for places in np.indices((len(left.bytes), len(right.bytes))))
    bytes_, work = left.bytes[one] + right.bytes[other], left.work[one] + right.work[other]
    order = np.lexsort((one, work, bytes_))
    order = order[_falls(work[order])]
    if len(order) > _MOST_BETWEEN:
        bytes_, work = bytes_[order], work[order]
        bucket = (bytes_ - bytes_[0]) * _MOST_BETWEEN // max(int(bytes_[-1] - bytes_[0]), 1)
        last_of_bucket = np.r_[np.diff(bucket) != 0, True]
        last_of_bucket[_with_a_price(bytes_, work)] = True
        order = order[last_of_bucket]
    return np.stack([one[order], other[order]], 1)


def _falls(work: np.ndarray) -> np.ndarray:
    """Which are below all before them."""
    return np.r_[True, work[1:] < np.minimum.accumulate(work)[:-1]]


def _by_price(left: MergedFrontier, right: MergedFrontier) -> np.ndarray:
    """The points with a price, from one to the next along that frontier where a byte saves more."""
    hulls = [_with_a_price(part.bytes, part.work) for part in (left, right)]
    gains = [
        -np.diff(part.work[hull]) / np.diff(part.bytes[hull]) for part, hull in zip((left, right), hulls, strict=True)
    ]
    is_left = np.repeat([True, False], [len(each) for each in gains])
    steps = is_left[np.lexsort((is_left, -np.concatenate(gains)))]
    taken = np.r_[0, np.cumsum(steps)]
    return np.stack([hulls[0][taken], hulls[1][np.arange(len(taken)) - taken]], 1)


def _with_a_price(bytes_: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Places of the points that are cheapest for some price of a byte: the lower convex hull."""
    hull: list[int] = []
    kept, again = bytes_.tolist(), work.tolist()
    for place in range(len(kept)):
        while len(hull) > 1:
            before, last = hull[-2:]
            rise = (again[last] - again[before]) * (kept[place] - kept[before])
            if rise <= (again[place] - again[before]) * (kept[last] - kept[before]):
                break
            hull.pop()
        hull.append(place)
    return np.array(hull)
