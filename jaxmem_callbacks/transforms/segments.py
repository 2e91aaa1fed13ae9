"""Segments of a loss: what is between two cuts, loops among them, and what each keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy
from jaxmem_callbacks.transforms.costs import (
    NOTABLE,
    WORTH,
    equation_flops,
    is_inexact,
    nbytes,
    residual_values,
    view_roots,
)
from jaxmem_callbacks.transforms.loss_profile import CheapValues
from jaxmem_callbacks.transforms.save_frontier import MergedFrontier, SaveSet, frontier
from jaxmem_callbacks.transforms.tracing import (
    flatten,
    is_movable,
    operands_of,
    refuse_effects,
    scan_arity,
    subjaxprs,
    variables,
)

# What is left as it is keeps nothing more.
_AS_IT_IS = [SaveSet(0, 0, frozenset(), 0.0, 0.0)]


class Segment:
    """A stretch of equations, with the cheap values it uses made inside it.

    Args:
        eqns: Flat equations.
        cheap: Values that are made again in each segment.
        results: What a later segment or the function's result uses.
        stored: Those of its results that are in memory until the backward pass anyway; None for all.
    """

    def __init__(
        self, eqns: Sequence[Any], cheap: CheapValues, results: frozenset[Any], stored: frozenset[Any] | None = None
    ) -> None:
        self.cheap = cheap
        self.reports = [eqn for eqn in eqns if is_movable(eqn)]
        own = [eqn for eqn in eqns if not is_movable(eqn)]
        self.own = [*cheap.equations_for(operands_of(own)), *own]
        self.report_makers = cheap.equations_for(operands_of(self.reports))
        self.results = results
        self._stored = results if stored is None else stored

    @property
    def eqns(self) -> list[Any]:
        """The equations as they are, reports included."""
        return [*self.own, *self.report_makers, *self.reports]

    def frontier(self, *, inside: bool = True) -> list[SaveSet]:
        """What the segment may keep besides its inputs and what is stored of its results anyway; see `frontier`."""
        return frontier(self.own, self._stored, inside=inside)

    def dear_values(self, resident: Sequence[Any], flops: float) -> frozenset[Any] | None:
        """What a checkpoint around it keeps, so that hardly any operations are done again.

        Args:
            resident: What is there anyway, such as arguments.
            flops: Operations of the whole loss, for comparison.

        Returns:
            None where that is no less than JAX keeps without a checkpoint, or where a loop or custom rule would run again
            whatever is kept of it.
        """
        unnoticed = WORTH * flops
        if any(subjaxprs(eqn) and equation_flops(eqn) > unnoticed for eqn in self.own):
            return None
        points = self.frontier()
        kept = next((point for point in points if point.flops <= unnoticed), points[-1])
        made, roots = {var for eqn in self.own for var in eqn.outvars}, view_roots(self.own)
        inputs = operands_of(self.own).keys() - made
        needed = residual_values(self.own, set(), {var for var in inputs if is_inexact(var)})
        anyway = {roots.get(var, var) for var in self._stored}
        without = sum(nbytes(var) for var in made.intersection(needed) - anyway)
        inputs_too = sum(nbytes(var) for var in inputs.difference(needed, resident))
        return kept.values if kept.bytes + inputs_too < without else None


class Loop:
    """A `scan` whose body is to keep only its inputs, and what is worth keeping in every step.

    Args:
        eqn: The scan.
        chunk: How many steps one checkpoint is put around.
        offload: The policy's words for what waits in host memory.
    """

    def __init__(self, eqn: Any, chunk: int, offload: Collection[str]) -> None:
        self.eqn = eqn
        self.chunk = chunk
        self.trips = int(eqn.params["length"])
        self.keeps_on_host = OFFLOAD_KEPT in offload
        self.moved = _worth_moving(eqn) if OFFLOAD_CUTS in offload else frozenset[int]()
        self.flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
        refuse_effects(self.flat.eqns)
        own = [inner for inner in self.flat.eqns if not is_movable(inner)]
        self.body = Segment(own, CheapValues({}, {}), frozenset(variables(self.flat.outvars)), stored=frozenset())

    def frontier(self) -> list[SaveSet]:
        """What each step may keep."""
        # XLA for GPUs fails at a loop in a loop that stacks host memory.
        return self.body.frontier(inside=not self.keeps_on_host)


def _worth_moving(eqn: Any) -> frozenset[int]:
    """Places among a loop's carried values of those that hold most of the bytes it stores between its steps."""
    consts, count = scan_arity(eqn)
    carried = eqn.invars[consts : consts + count]
    least = NOTABLE * sum(map(nbytes, carried))  # less is not worth a transfer of its own
    return frozenset(place for place, atom in enumerate(carried) if is_inexact(atom) and nbytes(atom) >= least)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is between two cuts.

    Attributes:
        segment: Its equations.
        loop: The loop over layers that it is, which gets checkpoints in its body; None for all others.
        is_checkpointed: Whether it is put under a checkpoint. The end of a loss, which is differentiated first, is not.
        kept: What it keeps, or each step of the loop, besides its inputs.
    """

    segment: Segment
    loop: Loop | None
    is_checkpointed: bool
    kept: frozenset[Any] = frozenset()

    @property
    def trips(self) -> int:
        """How often it runs, and so how often its kept values are stored."""
        return 1 if self.loop is None else self.loop.trips

    def frontier(self) -> list[SaveSet]:
        """What it may keep; nothing where it is left as it is."""
        if self.loop is not None:
            return self.loop.frontier()
        return self.segment.frontier() if self.is_checkpointed else _AS_IT_IS


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Where a loss is cut, and what its pieces keep.

    Attributes:
        pieces: In the order of the forward pass.
        shared: Cheap values that are made once, in front of all pieces.
        cheap: The others, which are made again in each piece.
        levels: 2 for checkpoints around groups of segments and loops of loops too.
        groups: After how many segments each group but the last ends; none for groups of equally many.
        frontier: What the pieces could keep instead; None where nobody asked.
    """

    pieces: tuple[Piece, ...]
    shared: tuple[Any, ...]
    cheap: CheapValues
    levels: int
    groups: tuple[int, ...]
    frontier: MergedFrontier | None


def offloads_by_kind(policy: StepPolicy) -> bool:
    """Whether a policy moves values to the host that have no names, which JAX combines with nothing that is kept by name."""
    return policy.remat == "offload_dot_with_no_batch_dims"


def results_by_segment(eqns: Sequence[Any], outvars: Sequence[Any], bounds: Sequence[int]) -> list[frozenset[Any]]:
    """What each segment makes that a later one, or the function's result, uses."""
    last: dict[Any, int] = {}
    spans = [eqns[start:end] for start, end in itertools.pairwise(bounds)]
    for position, span in enumerate(spans):
        last.update(dict.fromkeys(operands_of(span), position))
    last.update(dict.fromkeys(variables(outvars), len(spans)))
    return [
        frozenset(var for eqn in span for var in eqn.outvars if last.get(var, -1) > position)
        for position, span in enumerate(spans)
    ]


def sizes(length: int) -> list[int]:
    """How many steps may share a checkpoint, ascending: divisors, which leave nothing over, and others where those are sparse."""
    divisors = [part for part in range(1, length) if length % part == 0]
    # As many parts as of about that size, each as short as they may be: little is left over.
    between = (
        -(-length // round(length / (low << doubled)))
        for low, high in itertools.pairwise([*divisors, length])
        for doubled in range(1, math.ceil(math.log2(high / low)))
    )
    return sorted({*divisors, *(part for part in between if part < length)})
