"""Flat equations into the same function with checkpointed segments.

Enters: `Equations`, cut positions and a checkpoint policy. Leaves: an open jaxpr. Cheap values that depend on arguments
alone are made again inside each segment that uses them; debug output is moved behind its segment, so that it runs once;
what brings its own checkpoint (a scan over layers, the user's own remat) and the last segment are left outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem_callbacks._compat.jaxprs import (
    checkpoint_equation,
    checkpoint_template,
    close,
    derive,
    subjaxprs,
)
from jaxmem_callbacks.transforms.equations import Equations, flatten, is_movable, refuse_effects, variables
from jaxmem_callbacks.transforms.residuals import scan_step_bytes

_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


def has_own_checkpoint(eqn: Any) -> bool:
    """Whether an equation is checkpointed by its author, or is a loop whose body is."""
    if eqn.primitive.name in _CHECKPOINTS:
        return True
    return any(has_own_checkpoint(inner) for body in subjaxprs(eqn) for inner in body.eqns)


def is_layer_scan(eqn: Any, enough: int) -> bool:
    """Whether an equation is a loop whose stacked residuals, at least ``enough`` bytes, are worth a checkpointed body."""
    if eqn.primitive.name != "scan" or has_own_checkpoint(eqn):
        return False
    return int(eqn.params["length"]) * scan_step_bytes(eqn) >= max(enough, 1)


def checkpoint_body(eqn: Any, policy: Callable[..., Any] | None) -> Any:
    """A `scan` whose body keeps only its inputs (and what the policy saves).

    Inside a loop the barriers that keep XLA from merging the recomputation with the original are not needed.
    """
    body = eqn.params["jaxpr"]
    flat = flatten(body)
    refuse_effects(flat.eqns)
    assert not flat.consts, "the body of a traced scan takes its constants as operands"
    reports = [inner for inner in flat.eqns if is_movable(inner)]
    inner = Segment(flat.eqns, set(), {})
    eqns = inner.checkpointed(flat, flat.outvars, checkpoint_template(policy, prevent_cse=False))
    derived = derive(body, invars=flat.invars, outvars=flat.outvars, eqns=[*eqns, *reports])
    return eqn.replace(params={**eqn.params, "jaxpr": close(derived)})


class Segment:
    """A stretch of equations, with the cheap values it uses made inside it."""

    def __init__(self, eqns: Sequence[Any], sunk: set[Any], maker: dict[Any, Any]) -> None:
        self._reports = [eqn for eqn in eqns if is_movable(eqn)]
        own = [eqn for eqn in eqns if not is_movable(eqn) and not sunk.issuperset(eqn.outvars)]
        self._eqns = [*_makers(own, sunk, maker), *own]
        self.report_makers = _makers(self._reports, sunk, maker)

    @property
    def eqns(self) -> list[Any]:
        """The equations as they are, reports included."""
        return [*self._eqns, *self.report_makers, *self._reports]

    def checkpointed(self, flat: Equations, used_later: Sequence[Any], template: Any) -> list[Any]:
        """One checkpoint equation, and the reports behind it.

        Args:
            flat: The function being cut.
            used_later: Variables that equations after this segment, or the function's results, use.
            template: A checkpoint equation to fill in.
        """
        made = dict.fromkeys(var for eqn in self._eqns for var in eqn.outvars)
        wanted = {*variables(used_later), *variables(atom for eqn in self._reports for atom in eqn.invars)}
        invars = [v for v in variables(atom for eqn in self._eqns for atom in eqn.invars) if v not in made]
        outvars = [var for var in made if var in wanted]
        if not outvars:
            return [*self.report_makers, *self._reports]
        jaxpr = derive(flat.template, invars=invars, outvars=outvars, eqns=self._eqns)
        return [checkpoint_equation(template, jaxpr), *self.report_makers, *self._reports]


def _makers(eqns: Sequence[Any], sunk: set[Any], maker: dict[Any, Any]) -> list[Any]:
    """The equations that make the sunk values which ``eqns`` use, in order."""
    found: dict[int, Any] = {}
    pending = [var for eqn in eqns for var in variables(eqn.invars) if var in sunk]
    while pending:
        index, eqn = maker[pending.pop()]
        if index not in found:
            found[index] = eqn
            pending.extend(var for var in variables(eqn.invars) if var in sunk)
    return [found[index] for index in sorted(found)]


def cut(
    flat: Equations, places: Sequence[int], sunk: set[Any], plain: Callable[[int, int], bool], template: Any
) -> Any:
    """The function as a jaxpr with one checkpoint a segment.

    Args:
        flat: The function.
        places: Cut positions, ascending, without the ends.
        sunk: Values that are made again in each segment.
        plain: Whether the segment between two positions is left without a checkpoint.
        template: The checkpoint equation to fill in.
    """
    bounds = [0, *places, len(flat.eqns)]
    maker = {var: (index, eqn) for index, eqn in enumerate(flat.eqns) for var in eqn.outvars}
    later = _used_from(flat, bounds, sunk, maker)
    eqns: list[Any] = []
    known: set[Any] = set()
    for position, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        segment = Segment(flat.eqns[start:end], sunk, maker)
        if plain(start, end):
            added = segment.eqns
        else:
            added = segment.checkpointed(flat, later[position + 1], template)
        # The same sunk value may be needed by two stretches outside any checkpoint: it is made there once.
        for eqn in added:
            if known.isdisjoint(eqn.outvars) or not eqn.outvars:
                eqns.append(eqn)
                known.update(eqn.outvars)
    results = _makers_of(flat.outvars, sunk, maker)
    eqns.extend(eqn for eqn in results if known.isdisjoint(eqn.outvars))
    return derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=eqns)


def _makers_of(outvars: Sequence[Any], sunk: set[Any], maker: dict[Any, Any]) -> list[Any]:
    wanted = [var for var in variables(outvars) if var in sunk]
    eqns = [maker[var][1] for var in wanted]
    index = {id(eqn): maker[var][0] for var, eqn in zip(wanted, eqns, strict=True)}
    before = _makers(eqns, sunk, maker)
    index |= {id(eqn): maker[eqn.outvars[0]][0] for eqn in before}
    return sorted({id(eqn): eqn for eqn in [*before, *eqns]}.values(), key=lambda eqn: index[id(eqn)])


def _used_from(
    flat: Equations, bounds: Sequence[int], sunk: set[Any], maker: dict[Any, Any]
) -> dict[int, list[Any]]:
    """For each bound, the variables that are used at or after it, or are results; sunk values stand for what they use."""
    used: dict[Any, None] = dict.fromkeys(variables(flat.outvars))
    found = {len(bounds) - 1: list(used)}
    for position in range(len(bounds) - 2, -1, -1):
        segment = flat.eqns[bounds[position] : bounds[position + 1]]
        for eqn in [*_makers(segment, sunk, maker), *segment]:
            used.update(dict.fromkeys(variables(eqn.invars)))
        found[position] = list(used)
    return found
