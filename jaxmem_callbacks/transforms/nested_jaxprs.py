"""Equations inside the loops and branches of a segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend import core

from jaxmem_callbacks._compat.jaxprs import close, consts_of, derive, name_equation, name_template, scan_arity
from jaxmem_callbacks.transforms.flops import equation_flops
from jaxmem_callbacks.transforms.residuals import collective_work
from jaxmem_callbacks.transforms.tracing import flatten, is_variable, new_variable, side_effects, variables

# Where in an equation's parameters the bodies are that are opened.
_BODIES = {"scan": "jaxpr", "cond": "branches"}
# An equation below this share of a segment's work is chosen as a whole: what it holds is not worth a choice of its own.
_WORTH_OPENING = 0.02
# Derivatives need nothing of what a body is handed and hands out, but the index of a branch.
_HANDED = core.Primitive("add_any")
_CHOSEN = core.Primitive("select_n")


#: Operations, and work.
_Cost = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Inside:
    """A value inside an equation's body, told by its place: equal layers may share one body and its variables.

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
        part: Of the branches of a conditional one runs, the dearest at most: each has its part in that one's work.
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
        work: The same with what it moves; see `work.py`.
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
        """What some of the equations cost together, of each conditional the dearest branch.

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
    """A segment's equations with the dear ones among its inner loops and branches opened."""
    found, costs = Opened(), [_cost(eqn) for eqn in eqns]
    _open(eqns, costs, found, _WORTH_OPENING * sum(work for _, work in costs), _Run())
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
    _tell_inside(eqn, 0, eqns, found)
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
        _tell_inside(eqn, number, eqns, found)
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


def _tell_inside(eqn: Any, body: int, eqns: Sequence[Any], found: Opened) -> None:
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
