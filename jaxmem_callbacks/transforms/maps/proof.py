"""The proof that equations are a map along a dimension.

They are one where each position of a result is computed from the same position of the operands, and from operands that all
positions share. `prove` goes forwards through them, by the table of `places.py`, and into loops, branches, checkpoints and
functions with a derivative of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.transforms.costs import is_inexact
from jaxmem_callbacks.transforms.maps.places import (
    SUM,
    NotAMapError,
    Passing,
    Place,
    Result,
    Where,
    from_operand,
    from_result,
    place_of,
    refusal,
)
from jaxmem_callbacks.transforms.tracing import Equations, evaluate_equation, flatten, is_variable, scan_arity


@dataclass(frozen=True, slots=True)
class Mapped:
    """An equation of a map.

    Attributes:
        eqn: It.
        ins: Where the dimension is in each operand.
        outs: And in each result.
        bodies: The maps that its own functions are.
    """

    eqn: Any
    ins: tuple[Where, ...]
    outs: tuple[Result, ...]
    bodies: tuple[Body, ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """A function that is a map.

    Attributes:
        flat: The function.
        steps: Its equations.
        ins: Where the dimension is in its arguments.
        outs: And in its results.
    """

    flat: Equations
    steps: tuple[Mapped, ...]
    ins: tuple[Where, ...]
    outs: tuple[Where, ...]


def passing(eqn: Any, known: Mapping[Any, Result]) -> Passing:
    """Where the dimension must be in all operands and results of an equation, by the first that is known of them.

    Results come first: where a value is made it is placed in one way.

    Raises:
        NotAMapError: there is no such way.
    """
    for place, var in enumerate(eqn.outvars):
        if (at := known.get(var)) is not None:
            return (
                _inferred(eqn, known) if eqn.primitive.name in _BODIES else from_result(eqn, place, place_of(eqn, at))
            )
    for place, atom in enumerate(eqn.invars):
        if is_variable(atom) and (at := known.get(atom)) is not None:
            return (
                _inferred(eqn, known) if eqn.primitive.name in _BODIES else from_operand(eqn, place, place_of(eqn, at))
            )
    return (None,) * len(eqn.invars), (None,) * len(eqn.outvars)


def prove(
    eqns: Sequence[Any], known: Mapping[Any, Where], asked: Sequence[Passing] | None = None, *, has_rules: bool = True
) -> list[Mapped]:
    """The equations as a map.

    Args:
        eqns: In order of evaluation.
        known: Where the dimension is in what they use of others; None for what all positions share. What is not listed may be
            used in several ways, as ``asked`` says.
        asked: Where it is to be in the operands that are not known, and in what an equation makes without any that has it, such
            as a constant; None for all positions alike.
        has_rules: Whether functions keep the derivatives that they were given. Inside such a derivative they do not: it may be
            made of the function that it is of.

    Raises:
        NotAMapError: they are none.
    """
    places: dict[Any, Result] = {**known}
    return [
        _proved(eqn, places, None if asked is None else asked[index], has_rules=has_rules)
        for index, eqn in enumerate(eqns)
    ]


def _proved(eqn: Any, places: dict[Any, Result], asked: Passing | None, *, has_rules: bool) -> Mapped:
    whole: Passing = (None,) * len(eqn.invars), (None,) * len(eqn.outvars)
    ins, outs = whole if asked is None else asked
    given = tuple(
        (places.get(atom, at)) if is_variable(atom) else None for atom, at in zip(eqn.invars, ins, strict=True)
    )
    if any(at == SUM for at in given):
        raise refusal(eqn, "needs a sum over all positions")
    first = next(((place, at) for place, at in enumerate(given) if isinstance(at, Place)), None)
    made = next(((place, at) for place, at in enumerate(outs) if isinstance(at, Place)), None)
    if first is not None and eqn.primitive.name in _BODIES:
        step = _BODIES[eqn.primitive.name][0](eqn, [at if isinstance(at, Place) else None for at in given], has_rules)
    elif first is not None:
        step = Mapped(eqn, *from_operand(eqn, *first))
    elif made is not None and eqn.primitive.name not in _BODIES:
        step = Mapped(eqn, *from_result(eqn, *made))
    else:
        step = Mapped(eqn, *whole)
    for atom, at, needed in zip(eqn.invars, given, step.ins, strict=True):
        if at is not None and atom in places and needed != at:
            what = "needs all positions of a value that has the dimension" if needed is None else "mixes positions"
            raise refusal(eqn, what)
    if eqn.primitive.name == "iota":
        _require_counts(eqn, step)
    places.update(zip(eqn.outvars, step.outs, strict=True))
    return step


def _require_counts(eqn: Any, step: Mapped) -> None:
    """Refuse an iota along the dimension that does not hold the positions themselves."""
    at = step.outs[0]
    if not isinstance(at, Place) or at.axis != eqn.params["dimension"]:
        return
    if not at.is_whole_axis or not np.issubdtype(eqn.params["dtype"], np.integer):
        raise refusal(eqn, "counts along the dimension")


def _body(
    jaxpr: Any, ins: Sequence[Where], outs: Sequence[Where] | None = None, *, has_rules: bool, is_exact: bool = False
) -> Body:
    """A function as a map.

    Args:
        jaxpr: The function.
        ins: Where the dimension is in its arguments.
        outs: Where it is to be in its results, at least; None for where it comes out.
        has_rules: As in `prove`.
        is_exact: Whether results that all positions share must be so in ``outs`` too.

    Raises:
        NotAMapError: it is none.
    """
    flat = flatten(jaxpr, hoist_constants=False)
    places = dict(
        zip(flat.invars, (*(None,) * (len(flat.invars) - len(ins)), *ins), strict=True)
    )  # constants come first
    steps = _proved_body(flat.eqns, places, has_rules=has_rules)
    known: dict[Any, Result] = {**places}
    for step in steps:
        known.update(zip(step.eqn.outvars, step.outs, strict=True))
    found: list[Where] = []
    for place, atom in enumerate(flat.outvars):
        at = known.get(atom) if is_variable(atom) else None
        if at == SUM:
            msg = "a loop or branch adds up all positions inside"
            raise NotAMapError(msg)
        assert at is None or isinstance(at, Place)
        asked = None if outs is None else outs[place]
        if at is not None and outs is not None and at != asked and (asked is not None or is_exact):
            msg = "the dimension is in one place before a loop or branch and in another behind it"
            raise NotAMapError(msg)
        found.append(at if at is not None else asked)
    return Body(flat, tuple(steps), tuple(ins), tuple(found))


def _proved_body(eqns: Sequence[Any], places: Mapping[Any, Where], *, has_rules: bool) -> list[Mapped]:
    """A function's equations as a map; constants in it are made at the positions alone where all that uses them has them.

    Raises:
        NotAMapError: they are none.
    """
    maker = {var: index for index, eqn in enumerate(eqns) for var in eqn.outvars}
    asked: list[Passing] = [((None,) * len(eqn.invars), (None,) * len(eqn.outvars)) for eqn in eqns]
    steps = prove(eqns, places, asked, has_rules=has_rules)
    while wanted := _constants(steps, maker):
        for index, passed in wanted.items():
            asked[index] = passed
        try:
            steps = prove(eqns, places, asked, has_rules=has_rules)
        except NotAMapError:  # something needs one of them whole
            break
    return steps


def _constants(steps: Sequence[Mapped], maker: Mapping[Any, int]) -> dict[int, Passing]:
    """How equations that make what all positions share can make it at some positions instead, where that is needed of it."""
    found: dict[int, Passing] = {}
    for step in steps:
        for atom, at in zip(step.eqn.invars, step.ins, strict=True):
            if at is None or not is_variable(atom) or atom not in maker:
                continue
            made = steps[maker[atom]]
            if len(made.outs) == 1 and made.outs[0] is None and made.eqn.primitive.name not in _BODIES:
                with contextlib.suppress(NotAMapError):
                    found[maker[atom]] = from_result(made.eqn, 0, at)
    return found


def _moved(at: Where, by: int) -> Where:
    return None if at is None else replace(at, axis=at.axis + by)


def _prove_scan(eqn: Any, given: Sequence[Where], has_rules: bool) -> Mapped:  # noqa: FBT001 - called by a table
    consts, carries = scan_arity(eqn)
    jaxpr = eqn.params["jaxpr"]
    start = list(given[consts : consts + carries])
    stacked = given[consts + carries :]
    if any(at is not None and at.axis == 0 for at in stacked):
        raise refusal(eqn, "steps along the dimension")
    slices = [_moved(at, -1) for at in stacked]
    while True:
        body = _body(jaxpr, [*given[:consts], *start, *slices], has_rules=has_rules)
        wider = [made if own is None else own for own, made in zip(start, body.outs[:carries], strict=True)]
        if wider == start:
            break
        start = wider
    ends = [*start, *body.outs[carries:]]
    body = _body(jaxpr, [*given[:consts], *start, *slices], ends, has_rules=has_rules, is_exact=True)
    outs = [*start, *(_moved(at, 1) for at in body.outs[carries:])]
    return Mapped(eqn, (*given[:consts], *start, *stacked), tuple(outs), (body,))


def _prove_cond(eqn: Any, given: Sequence[Where], has_rules: bool) -> Mapped:  # noqa: FBT001 - called by a table
    if given[0] is not None:
        raise refusal(eqn, "takes one branch for all positions")
    branches = eqn.params["branches"]
    bodies = [_body(branch, given[1:], has_rules=has_rules) for branch in branches]
    outs = [next((at for at in each if at is not None), None) for each in zip(*(b.outs for b in bodies), strict=True)]
    bodies = [_body(branch, given[1:], outs, has_rules=has_rules, is_exact=True) for branch in branches]
    return Mapped(eqn, tuple(given), tuple(outs), tuple(bodies))


def _prove_checkpoint(eqn: Any, given: Sequence[Where], has_rules: bool) -> Mapped:  # noqa: FBT001 - called by a table
    body = _body(eqn.params["jaxpr"], given, has_rules=has_rules)
    return Mapped(eqn, tuple(given), body.outs, (body,))


def _prove_custom_jvp(eqn: Any, given: Sequence[Where], has_rules: bool) -> Mapped:  # noqa: FBT001 - called by a table
    """The function and the derivative that it was given, both: the latter as JAX applies it to all positions."""
    if not all(map(is_inexact, eqn.outvars)):
        raise refusal(eqn, "has a rule for what has no derivative")
    value = _body(eqn.params["call_jaxpr"], given, has_rules=has_rules)
    if not has_rules:
        return Mapped(eqn, tuple(given), value.outs, (value,))
    moving = moving_operands(eqn)
    tangents = [given[place] for place in moving]
    rule = _body(_rule_of(eqn, moving), [*given, *tangents], value.outs, has_rules=False, is_exact=True)
    return Mapped(eqn, tuple(given), value.outs, (value, rule))


def moving_operands(eqn: Any) -> list[int]:
    """The places of the operands that can have a derivative."""
    return [place for place, atom in enumerate(eqn.invars) if is_variable(atom) and is_inexact(atom)]


def _rule_of(eqn: Any, moving: Sequence[int]) -> Any:
    """The derivative that an equation has, traced: from operands and tangents to the tangents of its results."""
    avals = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=atom.aval.weak_type) for atom in eqn.invars
    ]

    def rule(*values: Any) -> Any:
        primals, tangents = values[: len(avals)], values[len(avals) :]

        def of_moving(*moved: Any) -> Any:
            filled = list(primals)
            for place, value in zip(moving, moved, strict=True):
                filled[place] = value
            return evaluate_equation(eqn, filled)

        return jax.jvp(of_moving, [primals[place] for place in moving], list(tangents))[1]

    return jax.make_jaxpr(rule)(*avals, *(avals[place] for place in moving))


def _inferred(eqn: Any, known: Mapping[Any, Result]) -> Passing:
    """Where the dimension may be in an equation with a function of its own, by all that is known of it; `prove` decides."""
    _, inside, ends = _BODIES[eqn.primitive.name]
    flat = flatten(inside(eqn), hoist_constants=False)
    (operands, into), (results, out_of) = ends(eqn)
    places: dict[Any, Place] = {}
    for var, atom, by in (
        *zip(flat.invars, operands, into, strict=True),
        *zip(flat.outvars, results, out_of, strict=True),
    ):
        at = known.get(atom) if is_variable(atom) and is_variable(var) else None
        if isinstance(at, Place):
            if at.axis < by:
                raise refusal(eqn, "steps along the dimension")
            places.setdefault(var, replace(at, axis=at.axis - by))
    _spread(flat, places)

    def outside(atom: Any, by: int) -> Where:
        return _moved(places.get(atom) if is_variable(atom) else None, by)

    found = [outside(var, by) for var, by in zip(flat.invars, into, strict=True)]
    lead = [None] * (len(eqn.invars) - len(found))
    return (*lead, *found), tuple(outside(var, by) for var, by in zip(flat.outvars, out_of, strict=True))


def _spread(flat: Equations, places: dict[Any, Place]) -> None:
    """Note where the dimension is in all that is connected with what is known, forwards and backwards."""
    count = 0
    while count != len(places):
        count = len(places)
        for eqn in (*flat.eqns, *reversed(flat.eqns)):
            atoms = [atom for atom in (*eqn.invars, *eqn.outvars) if is_variable(atom)]
            if not any(atom in places for atom in atoms):
                continue
            ins, outs = passing(eqn, places)
            for atom, at in (*zip(eqn.invars, ins, strict=True), *zip(eqn.outvars, outs, strict=True)):
                if isinstance(at, Place) and is_variable(atom):
                    places.setdefault(atom, at)


_Ends = tuple[tuple[Sequence[Any], Sequence[int]], tuple[Sequence[Any], Sequence[int]]]


def _plain_ends(eqn: Any) -> _Ends:
    return (eqn.invars, [0] * len(eqn.invars)), (eqn.outvars, [0] * len(eqn.outvars))


def _cond_ends(eqn: Any) -> _Ends:
    return (eqn.invars[1:], [0] * (len(eqn.invars) - 1)), (eqn.outvars, [0] * len(eqn.outvars))


def _scan_ends(eqn: Any) -> _Ends:
    consts, carries = scan_arity(eqn)
    fixed = consts + carries
    ins = [0] * fixed + [1] * (len(eqn.invars) - fixed)
    return (eqn.invars, ins), (eqn.outvars, [0] * carries + [1] * (len(eqn.outvars) - carries))


def _jaxpr_param(eqn: Any) -> Any:
    return eqn.params["jaxpr"]


# How an equation with a function of its own is proved, which function says where the dimension may be, and what of it is stacked.
_BODIES: dict[
    str, tuple[Callable[[Any, Sequence[Where], bool], Mapped], Callable[[Any], Any], Callable[[Any], _Ends]]
] = {
    "scan": (_prove_scan, _jaxpr_param, _scan_ends),
    "cond": (_prove_cond, lambda eqn: eqn.params["branches"][0], _cond_ends),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), (_prove_checkpoint, _jaxpr_param, _plain_ends)),
    "custom_jvp_call": (_prove_custom_jvp, lambda eqn: eqn.params["call_jaxpr"], _plain_ends),
}
