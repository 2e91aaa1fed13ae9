"""Flat equations into the same function with checkpointed segments.

Enters: `Equations`, cut positions and a checkpoint policy. Leaves: an open jaxpr. Cheap values that depend on arguments
alone are made again inside each segment that uses them; debug output is moved behind its segment, so that it runs once;
what brings its own checkpoint (a scan over layers, the user's own remat) and the last segment are left outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem_callbacks._compat.jaxprs import (
    checkpoint_equation,
    checkpoint_template,
    close,
    derive,
    subjaxprs,
)
from jaxmem_callbacks.transforms.equations import (
    Equations,
    flatten,
    is_movable,
    is_variable,
    new_variable,
    refuse_effects,
    reports_inside,
    side_effects,
    unused_dropped,
    variables,
)
from jaxmem_callbacks.transforms.residuals import Sunk, scan_step_bytes
from jaxmem_callbacks.transforms.sharing import Sharing

_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


def has_own_checkpoint(eqn: Any) -> bool:
    """Whether an equation is checkpointed by its author, or is a loop whose body is."""
    if eqn.primitive.name in _CHECKPOINTS:
        return True
    return any(has_own_checkpoint(inner) for body in subjaxprs(eqn) for inner in body.eqns)


def is_layer_scan(eqn: Any, enough: int) -> bool:
    """Whether an equation is a loop whose stacked residuals, at least ``enough`` bytes, are worth a checkpointed body.

    A body that itself holds a loop or branch which reports is left as it is: its reports would come twice.
    """
    if eqn.primitive.name != "scan" or has_own_checkpoint(eqn):
        return False
    if side_effects(eqn) and any(map(reports_inside, flatten(eqn.params["jaxpr"], hoist_constants=False).eqns)):
        return False
    return int(eqn.params["length"]) * scan_step_bytes(eqn) >= max(enough, 1)


def checkpoint_body(eqn: Any, policy: Callable[..., Any] | None) -> Any:
    """A `scan` whose body keeps only its inputs (and what the policy saves).

    Inside a loop the barriers that keep XLA from merging the recomputation with the original are not needed.
    """
    body = eqn.params["jaxpr"]
    flat = flatten(body, hoist_constants=False)
    refuse_effects(flat.eqns)
    reports = [inner for inner in flat.eqns if is_movable(inner)]
    # JAX (to 0.12 at least) cannot differentiate a scan whose report uses a checkpoint's result: what a report needs is
    # computed beside the checkpoint, where XLA merges it with the same values inside.
    beside = unused_dropped(flat.eqns, [var for report in reports for var in report.invars])
    inner = Segment([inner for inner in flat.eqns if not is_movable(inner)], Sunk({}, {}))
    results = set(variables(flat.outvars))
    template = checkpoint_template(policy, prevent_cse=False)
    eqns = [*_renamed(beside), *inner.checkpointed(flat, results.__contains__, template, Sharing())]
    derived = derive(body, invars=flat.invars, outvars=flat.outvars, eqns=eqns)
    return eqn.replace(params={**eqn.params, "jaxpr": close(derived)})


def _renamed(eqns: Sequence[Any]) -> list[Any]:
    """The same equations making variables of their own."""
    names: dict[Any, Any] = {}
    renamed = []
    for eqn in eqns:
        invars = [names.get(atom, atom) if is_variable(atom) else atom for atom in eqn.invars]
        outvars = [new_variable(var) for var in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        renamed.append(eqn.replace(invars=invars, outvars=outvars))
    return renamed


class Segment:
    """A stretch of equations, with the cheap values it uses made inside it."""

    def __init__(self, eqns: Sequence[Any], sunk: Sunk) -> None:
        self._reports = [eqn for eqn in eqns if is_movable(eqn)]
        own = [eqn for eqn in eqns if not is_movable(eqn)]
        self._sunk = sunk
        self._eqns = [*sunk.equations_for(_operands(own)), *own]
        self._report_makers = sunk.equations_for(_operands(self._reports))

    @property
    def eqns(self) -> list[Any]:
        """The equations as they are, reports included."""
        return [*self._eqns, *self._report_makers, *self._reports]

    def checkpointed(
        self, flat: Equations, is_used_later: Callable[[Any], bool], template: Any, sharing: Sharing
    ) -> list[Any]:
        """One checkpoint equation, and the reports behind it.

        Args:
            flat: The function being cut.
            is_used_later: Whether an equation after this segment, or the function's results, use a variable.
            template: A checkpoint equation to fill in.
            sharing: The segments made before, for one that is equal.
        """
        made = dict.fromkeys(var for eqn in self._eqns for var in eqn.outvars)
        reported = _operands(self._reports)
        invars = [var for var in _operands(self._eqns) if var not in made]
        outvars = [var for var in made if var not in self._sunk.makers and (var in reported or is_used_later(var))]
        if not outvars:
            return [*self._report_makers, *self._reports]
        jaxpr = derive(flat.template, invars=invars, outvars=outvars, eqns=self._eqns)
        one = checkpoint_equation(template, sharing.shared(jaxpr), invars, outvars)
        return [one, *self._report_makers, *self._reports]


def _operands(eqns: Sequence[Any]) -> dict[Any, None]:
    """The variables that equations use, each once, in order."""
    return dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))


def cut(flat: Equations, places: Sequence[int], sunk: Sunk, plain: Callable[[int, int], bool], template: Any) -> Any:
    """The function as a jaxpr with one checkpoint a segment.

    Args:
        flat: The function.
        places: Cut positions, ascending, without the ends.
        sunk: Values that are made again in each segment.
        plain: Whether the segment between two positions is left without a checkpoint.
        template: The checkpoint equation to fill in.
    """
    bounds = [0, *places, len(flat.eqns)]
    last = _last_segment_of(flat, bounds)
    eqns: list[Any] = []
    sharing = Sharing()
    for position, (start, end) in enumerate(itertools.pairwise(bounds)):
        segment = Segment(flat.eqns[start:end], sunk)
        if plain(start, end):
            eqns += segment.eqns
        else:
            eqns += segment.checkpointed(flat, lambda var, here=position: last.get(var, -1) > here, template, sharing)
    eqns += sunk.equations_for(variables(flat.outvars))
    # Outside the segments a sunk value may have been asked for more than once: it is made at the first place.
    once = {id(eqn): eqn for eqn in eqns}
    return derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=list(once.values()))


def _last_segment_of(flat: Equations, bounds: Sequence[int]) -> dict[Any, int]:
    """The last segment that uses each variable; results count as used behind the last."""
    last: dict[Any, int] = {}
    for position, (start, end) in enumerate(itertools.pairwise(bounds)):
        last.update(dict.fromkeys(_operands(flat.eqns[start:end]), position))
    return last | dict.fromkeys(variables(flat.outvars), len(bounds))
