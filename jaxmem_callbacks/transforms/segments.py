"""The flat equations as the same function with checkpointed segments."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxmem_callbacks._compat.jaxprs import (
    checkpoint_equation,
    checkpoint_template,
    close,
    consts_of,
    derive,
    open_jaxpr,
    scan_arity,
    subjaxprs,
)
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT
from jaxmem_callbacks.transforms.costs import (
    Sunk,
    equation_flops,
    is_inexact,
    nbytes,
    residual_values,
    scan_step_bytes,
    view_roots,
)
from jaxmem_callbacks.transforms.names import KEPT, ON_HOST
from jaxmem_callbacks.transforms.own_checkpoints import has_own_checkpoint
from jaxmem_callbacks.transforms.save_frontier import Kept, Known, Share, frontier, join, named
from jaxmem_callbacks.transforms.tracing import (
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


class Sharing:
    """Jaxprs seen so far, by what they compute."""

    def __init__(self) -> None:
        self._alike: dict[Hashable, list[_Seen]] = {}

    def shared(self, jaxpr: Any) -> Any:
        """An equal jaxpr that was seen before, or ``jaxpr`` itself."""
        alike = self._alike.setdefault(_glance(jaxpr), [])
        new = _Seen(jaxpr)
        match = next((seen for seen in alike if seen.key == new.key), None)
        if match is None:
            alike.append(new)
        return jaxpr if match is None else match.jaxpr


class _Seen:
    """One jaxpr with its key, which is worked out only once a second one looks like it."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    @functools.cached_property
    def key(self) -> Hashable:
        return _key(self.jaxpr)


def _glance(jaxpr: Any) -> Hashable:
    """What two equal jaxprs agree in and most others differ in, for almost nothing."""
    eqns = jaxpr.eqns
    return len(eqns), len(jaxpr.invars), *(str(eqn.source_info.name_stack) for eqn in (eqns[0], eqns[-1]))


def _key(jaxpr: Any) -> Hashable:
    numbers = {var: number for number, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    lines = []
    for eqn in jaxpr.eqns:
        operands = tuple(numbers[atom] if is_variable(atom) else _literal(atom) for atom in eqn.invars)
        results = tuple((type(var), var.aval) for var in eqn.outvars)
        numbers |= {var: number for number, var in enumerate(eqn.outvars, len(numbers))}
        params = tuple((name, _parameter(value)) for name, value in eqn.params.items())
        source = (str(eqn.source_info.name_stack), eqn.source_info.traceback)
        lines.append((eqn.primitive, operands, params, results, eqn.ctx, source))
    outvars = tuple(numbers[atom] if is_variable(atom) else _literal(atom) for atom in jaxpr.outvars)
    return tuple(var.aval for var in jaxpr.invars), tuple(lines), outvars


def _literal(atom: Any) -> Hashable:
    return atom.aval, np.asarray(atom.val).tobytes()


def _parameter(value: Any) -> Hashable:
    if hasattr(open_jaxpr(value), "eqns"):
        # Constants are compared by identity: both jaxprs are alive, and reading arrays could wait for a device.
        return _key(open_jaxpr(value)), tuple(id(const) for const in consts_of(value))
    if isinstance(value, (tuple, list)):
        return tuple(_parameter(item) for item in value)
    return value


# Computing again up to this share of a loss's operations goes unnoticed: a step does about three times as many.
_UNNOTICED = 0.003
# Of what a loop carries, values under this share of its bytes are not worth a transfer of their own.
_WORTH_MOVING = 0.05


def is_layer_scan(eqn: Any, enough: int) -> bool:
    """Whether an equation is a loop whose stacked residuals, at least ``enough`` bytes, are worth a checkpointed body.

    A body that itself holds a loop or branch which reports is left as it is: its reports would come twice.
    """
    if eqn.primitive.name != "scan" or has_own_checkpoint(eqn):
        return False
    if side_effects(eqn) and any(map(reports_inside, flatten(eqn.params["jaxpr"], hoist_constants=False).eqns)):
        return False
    return int(eqn.params["length"]) * scan_step_bytes(eqn) >= max(enough, 1)


class Loop:
    """A `scan` whose body is to keep only its inputs, and what is worth keeping in every step.

    Args:
        eqn: The scan.
        chunk: How many steps one checkpoint is put around.
        offload: The policy's words for what waits in host memory.
    """

    def __init__(self, eqn: Any, chunk: int = 1, offload: Collection[str] = ()) -> None:
        self._eqn = eqn
        self._on_host = OFFLOAD_KEPT in offload
        self._kept_name = ON_HOST[OFFLOAD_KEPT] if self._on_host else KEPT
        self.moved = _worth_moving(eqn) if OFFLOAD_CUTS in offload else frozenset[int]()
        self._flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
        refuse_effects(self._flat.eqns)
        self._inner = Segment([inner for inner in self._flat.eqns if not is_movable(inner)], Sunk({}, {}), frozenset())
        self.chunk = chunk
        self.trips = int(eqn.params["length"])

    def frontier(self, known: Known) -> list[Kept]:
        """What each step may keep; ``known`` as in `keeping.frontier`."""
        # XLA for GPUs fails at a loop in a loop that stacks host memory.
        return self._inner.frontier(known, inside=not self._on_host)

    def checkpointed(
        self, policy: Callable[..., Any] | None, kept: frozenset[Any], moved: frozenset[int] = frozenset()
    ) -> Any:
        """The loop with a checkpointed body. Inside a loop nothing merges the recomputation with the original: no barrier.

        Args:
            policy: What the body keeps, as JAX's checkpoint policy.
            kept: Values of the body that it keeps.
            moved: Which of the carried values wait in host memory.
        """
        flat = self._flat
        consts, _ = scan_arity(self._eqn)
        names = dict.fromkeys(kept, self._kept_name)
        names |= {flat.invars[consts + place]: ON_HOST[OFFLOAD_CUTS] for place in moved}
        reports = [inner for inner in flat.eqns if is_movable(inner)]
        # JAX (to 0.12 at least) cannot differentiate a scan whose report uses a checkpoint's result: what a report needs is
        # computed beside the checkpoint, where XLA merges it with the same values inside.
        beside = unused_dropped(flat.eqns, [var for report in reports for var in report.invars])
        self._inner.results = frozenset(variables(flat.outvars))
        template = checkpoint_template(policy, prevent_cse=False)
        eqns = [*_renamed(beside), *self._inner.checkpointed(flat, template, names, Sharing())]
        derived = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=eqns)
        return self._with_body(derived)

    def named(self, kept: frozenset[Any]) -> Any:
        """The loop as it is, its kept values named: for a checkpoint around several of its steps."""
        flat = self._flat
        eqns, names = named(flat.eqns, dict.fromkeys(kept, self._kept_name))
        outvars = [names.get(var, var) if is_variable(var) else var for var in flat.outvars]
        return self._with_body(derive(flat.template, invars=flat.invars, outvars=outvars, eqns=eqns))

    def _with_body(self, body: Any) -> Any:
        return self._eqn.replace(params={**self._eqn.params, "jaxpr": close(body)})


def _worth_moving(eqn: Any) -> frozenset[int]:
    """Places among a loop's carried values of those that hold most of the bytes it stores between its steps."""
    consts, count = scan_arity(eqn)
    carried = eqn.invars[consts : consts + count]
    least = _WORTH_MOVING * sum(map(nbytes, carried))
    return frozenset(place for place, atom in enumerate(carried) if is_inexact(atom) and nbytes(atom) >= least)


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
    """A stretch of equations, with the cheap values it uses made inside it.

    Args:
        eqns: Flat equations.
        sunk: Values that are made again in each segment.
        results: What a later segment or the function's result uses.
        stored: Those of its results that are in memory until the backward pass anyway; None for all.
    """

    trips = 1

    def __init__(
        self, eqns: Sequence[Any], sunk: Sunk, results: frozenset[Any], stored: frozenset[Any] | None = None
    ) -> None:
        self._reports = [eqn for eqn in eqns if is_movable(eqn)]
        own = [eqn for eqn in eqns if not is_movable(eqn)]
        self._sunk = sunk
        self._eqns = [*sunk.equations_for(_operands(own)), *own]
        self._report_makers = sunk.equations_for(_operands(self._reports))
        self.results = results
        self._stored = results if stored is None else stored

    @property
    def eqns(self) -> list[Any]:
        """The equations as they are, reports included."""
        return [*self._eqns, *self._report_makers, *self._reports]

    def frontier(self, known: Known, *, inside: bool = True) -> list[Kept]:
        """What the segment may keep besides its inputs and what is stored of its results anyway; see `keeping.frontier`."""
        return frontier(self._eqns, self._stored, known, inside=inside)

    def dear_values(self, resident: Sequence[Any], flops: float) -> frozenset[Any] | None:
        """What a checkpoint around it keeps, so that hardly any operations are done again.

        Args:
            resident: What is there anyway, such as arguments.
            flops: Operations of the whole loss, for comparison.

        Returns:
            None where that is no less than JAX keeps without a checkpoint, or where a loop or custom rule would run again
            whatever is kept of it.
        """
        unnoticed = _UNNOTICED * flops
        if any(subjaxprs(eqn) and equation_flops(eqn) > unnoticed for eqn in self._eqns):
            return None
        points = self.frontier({})
        kept = next((point for point in points if point.flops <= unnoticed), points[-1])
        made, roots = {var for eqn in self._eqns for var in eqn.outvars}, view_roots(self._eqns)
        inputs = _operands(self._eqns).keys() - made
        needed = residual_values(self._eqns, set(), {var for var in inputs if is_inexact(var)})
        anyway = {roots.get(var, var) for var in self._stored}
        without = sum(nbytes(var) for var in made.intersection(needed) - anyway)
        inputs_too = sum(nbytes(var) for var in inputs.difference(needed, resident))
        return kept.values if kept.bytes + inputs_too < without else None

    def checkpointed(self, flat: Equations, template: Any, kept: Mapping[Any, str], sharing: Sharing) -> list[Any]:
        """One checkpoint equation, and the reports behind it.

        Args:
            flat: The function being cut.
            template: A checkpoint equation to fill in.
            kept: Values that it keeps, inputs too, and the names by which its policy knows them.
            sharing: The segments made before, for one that is equal.
        """
        made = dict.fromkeys(var for eqn in self._eqns for var in eqn.outvars)
        reported = _operands(self._reports)
        invars = [var for var in _operands(self._eqns) if var not in made]
        outvars = [var for var in made if var not in self._sunk.makers and (var in reported or var in self.results)]
        if not outvars:
            return [*self._report_makers, *self._reports]
        eqns, names = named(self._eqns, kept)
        inner = derive(flat.template, invars=invars, outvars=[names.get(var, var) for var in outvars], eqns=eqns)
        one = checkpoint_equation(template, sharing.shared(inner), invars, outvars)
        return [one, *self._report_makers, *self._reports]


def _operands(eqns: Sequence[Any]) -> dict[Any, None]:
    """The variables that equations use, each once, in order."""
    return dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))


Policy = Callable[..., Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Where a list of equations is cut, and what stands alone between two cuts.

    Attributes:
        places: Positions, ascending, without the ends.
        loops: Equations whose bodies are checkpointed, with the number of steps under one checkpoint.
        whole: Equations that are left as they are.
        loop: What is put in a loop's place: its checkpointed form, for a policy and what it keeps.
        offload: The policy's words for what waits in host memory.
        head: Position of the last product, before which the rest of the last segment gets a checkpoint that keeps what is dear;
            None where it gets none.
        differentiated: Arguments that are; None where that is not known.
    """

    places: Sequence[int]
    loops: Mapping[int, int] = field(default_factory=dict[int, int])
    whole: frozenset[int] = frozenset()
    loop: Callable[[Loop, Policy, frozenset[Any]], list[Any]]
    offload: Sequence[str] = ()
    head: int | None = None
    differentiated: Collection[Any] | None = None


Keep = Callable[[Sequence["Segment | Loop | None"]], Sequence[frozenset[Any]]]
# What is left as it is keeps nothing besides.
_AS_IT_IS = [Kept(0, 0, frozenset(), 0.0, 0.0)]


def no_more(pieces: Sequence[Segment | Loop | None]) -> list[frozenset[Any]]:
    """Nothing besides what the policy says."""
    return [frozenset()] * len(pieces)


def keeping(
    share: float,
    survey: Callable[[list[Share]], None] | None = None,
    peaks: Callable[[], Sequence[int]] = tuple,
) -> Keep:
    """Values that are dear to compute again, within a share of their bytes.

    Args:
        share: From 0 to 1.
        survey: Told what other shares would keep and compute again.
        peaks: Tells for it how many bytes are alive while each segment is differentiated, where nothing is kept.
    """
    if not share and survey is None:
        return no_more

    def keep(pieces: Sequence[Segment | Loop | None]) -> Sequence[frozenset[Any]]:
        known: Known = {}
        frontiers = [_AS_IT_IS if piece is None else piece.frontier(known) for piece in pieces]
        trips = [1 if piece is None else piece.trips for piece in pieces]
        joined = join(frontiers, trips, () if survey is None else peaks())
        if survey is not None:
            survey(joined.shares())
        return joined.keep_within(share) if share else no_more(pieces)

    return keep


def cut(flat: Equations, cuts: Cuts, sunk: Sunk, policy: Callable[..., Any] | None, keep: Keep = no_more) -> Any:
    """The function as a jaxpr with one checkpoint a segment.

    Args:
        flat: The function.
        cuts: Where.
        sunk: Values that are made again in each segment.
        policy: What segments keep, as JAX's checkpoint policy.
        keep: What each segment and loop keeps besides.
    """
    head = [] if cuts.head is None else [cuts.head]
    bounds = [0, *cuts.places, *head, len(flat.eqns)]
    shared = _shared(flat, bounds, sunk, cuts.differentiated)
    first, sunk = sunk.equations_for(shared), sunk.without(shared)
    segments: list[Segment] = []
    pieces: list[Segment | Loop | None] = []
    results = results_by_segment(flat.eqns, flat.outvars, bounds)
    stored = [*_stored_results(flat, bounds), None]
    for position, (start, end) in enumerate(itertools.pairwise(bounds)):
        segments.append(Segment(flat.eqns[start:end], sunk, results[position], stored[position]))
        if start in cuts.loops:
            pieces.append(Loop(flat.eqns[start], cuts.loops[start], cuts.offload))
        else:
            plain = start in cuts.whole or end in (cuts.head, len(flat.eqns))
            pieces.append(None if plain else segments[-1])
    kept = [*keep(pieces[: len(pieces) - len(head)]), *[frozenset[Any]() for _ in head]]
    there = [*flat.invars, *shared]
    dear = segments[-2].dear_values(there, sum(map(equation_flops, flat.eqns))) if head else None
    if dear is not None:
        pieces[-2], kept[-2] = segments[-2], dear
    template, sharing = checkpoint_template(policy, prevent_cse=True), Sharing()
    eqns: list[Any] = list(first)
    for segment, piece, values in zip(segments, pieces, kept, strict=True):
        if isinstance(piece, Loop):
            segment = Segment(cuts.loop(piece, policy, values), sunk, segment.results)  # noqa: PLW2901 - itself
        if isinstance(piece, Segment):
            eqns += piece.checkpointed(flat, template, dict.fromkeys(values, KEPT), sharing)
        else:
            eqns += segment.eqns
    eqns += sunk.equations_for(variables(flat.outvars))
    # Outside the segments a sunk value may have been asked for more than once: it is made at the first place.
    once = {id(eqn): eqn for eqn in eqns}
    return derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=list(once.values()))


def _shared(flat: Equations, bounds: Sequence[int], sunk: Sunk, differentiated: Collection[Any] | None) -> list[Any]:
    """Sunk values that several segments use and differentiate: casts, such as that of an embedding that is also the head.

    Made again in each segment a cast would have a gradient in each, and these would be added behind it: in another dtype than
    in the loss as it is written, and by some compilers not before all are there. A v5e's then makes the head's product at the
    end of the step, and the logits' gradient waits for it. What each segment uses another part of, such as a stack of all
    layers' weights, or computes something else from is made again all the same: its gradients would need what it is made of.
    """
    spans = (flat.eqns[start:end] for start, end in itertools.pairwise(bounds))
    uses = collections.Counter(var for span in spans for var in sunk.casts_for(_operands(span), differentiated))
    return [var for var, count in uses.items() if count > 1]


def _stored_results(flat: Equations, bounds: Sequence[int]) -> list[frozenset[Any]]:
    """What of each segment but the last is in memory until the backward pass, whatever the segment keeps.

    A checkpoint stores all that it takes, and so may a loop or branch. The last segment, which has no checkpoint, stores what
    derivatives need: not what it only adds.
    """
    *bounds, end = bounds
    last = flat.eqns[bounds[-1] : end]
    needed = residual_values(last, set(), {var for var in _operands(last) if is_inexact(var)})
    inside = _operands([eqn for eqn in last if subjaxprs(eqn)])
    return results_by_segment(flat.eqns, [*needed, *inside, *flat.outvars], bounds)


def results_by_segment(eqns: Sequence[Any], outvars: Sequence[Any], bounds: Sequence[int]) -> list[frozenset[Any]]:
    """What each segment makes that a later one, or the function's result, uses."""
    last: dict[Any, int] = {}
    spans = [eqns[start:end] for start, end in itertools.pairwise(bounds)]
    for position, span in enumerate(spans):
        last.update(dict.fromkeys(_operands(span), position))
    last.update(dict.fromkeys(variables(outvars), len(spans)))
    return [
        frozenset(var for eqn in span for var in eqn.outvars if last.get(var, -1) > position)
        for position, span in enumerate(spans)
    ]
