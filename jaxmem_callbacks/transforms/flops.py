"""A traced program in, the floating-point operations it does out: what a policy's recomputation costs.

Counted by equation, from shapes alone: no device, no compile. One multiply-add is two operations; an elementwise
operation is one a result element, whatever it is; a reduction one an operand element; moving data costs nothing. What a
program computes and never uses is not counted, since every compiler drops it. XLA's own ``cost_analysis()`` is no
substitute: it counts a scan's body once, and answers None for an absent GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, final

from jax.extend import core

_MOVES = (
    " broadcast broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice "
    "dynamic_update_slice expand_dims gather iota name opt_barrier optimization_barrier pad pvary rev reshape "
    "scatter sharding_constraint slice split squeeze stop_gradient transpose bitcast_convert_type mesh_cast "
    "all_gather all_to_all ppermute axis_index random_wrap random_unwrap random_seed create_token "
)
_REDUCTIONS = ("reduce_", "argmax", "argmin", "cum", "psum", "pmax", "pmin", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """Operations of one program.

    Attributes:
        flops: All of them.
        dot_flops: Those of matrix products and convolutions, a part of ``flops``.
        loops_once: While loops in it, whose trip count no trace tells: their bodies are counted once.
    """

    flops: int
    dot_flops: int = 0
    loops_once: int = 0

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(
            flops=self.flops + other.flops,
            dot_flops=self.dot_flops + other.dot_flops,
            loops_once=self.loops_once + other.loops_once,
        )

    def __sub__(self, other: FlopCount) -> FlopCount:
        return self + other.times(-1)

    @property
    def weight(self) -> float:
        """What the dearer branch of a conditional has more of."""
        return self.flops

    def times(self, trips: int) -> FlopCount:
        """As often as a loop runs; its inner while loops are still as many loops."""
        loops = self.loops_once if trips >= 0 else -self.loops_once
        return FlopCount(flops=self.flops * trips, dot_flops=self.dot_flops * trips, loops_once=loops)


_NOTHING = FlopCount(flops=0)


def jaxpr_flops(closed_jaxpr: Any) -> int:
    """Operations of a traced program, such as ``jax.make_jaxpr(step)(*args)``; see `count_flops` for what is in it."""
    return count_flops(closed_jaxpr).flops


def count_flops(closed_jaxpr: Any) -> FlopCount:
    """Operations of a traced program, by kind.

    Scan bodies count as often as they run, while bodies once (and are told), of a conditional the dearest branch, a
    `shard_map` body on every device of its mesh.
    """
    return total_cost(closed_jaxpr, leaf_flops, _NOTHING, FlopCount(flops=0, loops_once=1))


def equation_flops(eqn: Any) -> int:
    """Operations of one equation, its bodies included, all of whose results are used."""
    return equation_cost(eqn, leaf_flops, _NOTHING, FlopCount(flops=0, loops_once=1)).flops


class Cost(Protocol):
    """What can be added up over a program."""

    @property
    def weight(self) -> float:
        """What the dearer branch of a conditional has more of."""
        ...

    def __add__(self, other: Self) -> Self: ...

    def times(self, trips: int) -> Self:
        """As often as a loop runs."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Amount:
    """A plain number, such as seconds, as `total_cost` adds it up."""

    weight: float

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.weight + other.weight)

    def times(self, trips: int) -> Amount:
        """As often as a loop runs."""
        return Amount(self.weight * trips)


C = TypeVar("C", bound=Cost)


def total_cost(closed_jaxpr: Any, leaf: Callable[[Any], C], nothing: C, loop: C) -> C:
    """The cost of a traced program, from the costs of its equations without bodies.

    Args:
        closed_jaxpr: The program.
        leaf: Cost of one such equation.
        nothing: No cost.
        loop: What a while loop costs besides its bodies, which are counted once.
    """
    jaxpr = _open(closed_jaxpr)
    return _Walk(leaf, nothing, loop).jaxpr(jaxpr, (True,) * len(jaxpr.outvars))


def equation_cost(eqn: Any, leaf: Callable[[Any], C], nothing: C, loop: C) -> C:
    """The cost of one equation, its bodies included, all of whose results are used; the rest as `total_cost`."""
    return _Walk(leaf, nothing, loop).equation(eqn, (True,) * len(eqn.outvars))


class _Walk(Generic[C]):
    """Adds up jaxprs, each inner one once for each set of its results that is used."""

    def __init__(self, leaf: Callable[[Any], C], nothing: C, loop: C) -> None:
        self._leaf = leaf
        self._nothing = nothing
        self._loop = loop
        self._known: dict[tuple[int, tuple[bool, ...]], C] = {}
        self._kept: list[Any] = []  # keeps the ids in `_known` from being given out again

    def jaxpr(self, jaxpr: Any, used: tuple[bool, ...]) -> C:
        key = (id(jaxpr), used)
        if key not in self._known:
            self._kept.append(jaxpr)
            self._known[key] = self._added_up(jaxpr, used)
        return self._known[key]

    def _added_up(self, jaxpr: Any, used: tuple[bool, ...]) -> C:
        """Backwards, so that equations without a reader are passed over."""
        total = self._nothing
        needed = {var for var, keep in zip(jaxpr.outvars, used, strict=True) if keep and isinstance(var, core.Var)}
        for eqn in reversed(jaxpr.eqns):
            outs = tuple(var in needed for var in eqn.outvars)
            if not (any(outs) or eqn.effects):
                continue
            total += self.equation(eqn, outs)
            needed.update(var for var in eqn.invars if isinstance(var, core.Var))
        return total

    def equation(self, eqn: Any, outs: tuple[bool, ...]) -> C:
        """The cost of one equation, some of whose results are used."""
        inner = list(_inner_jaxprs(eqn))
        name = eqn.primitive.name
        if not inner or name.startswith(("reduce", "scatter", "argm", "select_and")):
            return self._leaf(eqn)
        if name == "scan":
            body = inner[0]
            # What a loop carries has the body's own shape; what it stacks has one axis more, and may have no reader.
            carried = (_shape(out) == _shape(part) for out, part in zip(eqn.outvars, body.outvars, strict=True))
            keep = tuple(carry or used for carry, used in zip(carried, outs, strict=True))
            return self.jaxpr(body, keep).times(eqn.params["length"])
        if name == "while":
            parts = [self.jaxpr(body, (True,) * len(body.outvars)) for body in inner]
            return sum(parts, self._loop)
        if name == "cond":
            return max((self.jaxpr(branch, outs) for branch in inner), key=lambda cost: cost.weight)
        if name == "custom_linear_solve":
            solve = _open(eqn.params["jaxprs"].solve)
            return self.jaxpr(solve, (True,) * len(solve.outvars))
        costs = (
            self.jaxpr(part, outs if len(part.outvars) == len(outs) else (True,) * len(part.outvars)) for part in inner
        )
        return sum(costs, self._nothing).times(copies(eqn))


def copies(eqn: Any) -> int:
    """How many devices or grid points run an equation's body, on shapes of one part each."""
    if eqn.primitive.name == "shard_map":
        manual = eqn.params.get("newly_manual_axes", eqn.params["mesh"].axis_names)
        return math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
    if eqn.primitive.name == "pallas_call":
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        return math.prod(size for size in grid if isinstance(size, int))
    return 1


def leaf_flops(eqn: Any) -> FlopCount:  # noqa: PLR0911 - one line a kind
    """Operations of an equation that has no body (or whose body only combines two elements)."""
    name = eqn.primitive.name
    if name in _DOTS:
        flops = _DOTS[name](eqn)
        return FlopCount(flops=flops, dot_flops=flops)
    if f" {name} " in _MOVES:
        return _NOTHING
    if name.startswith(("reduce_window", "select_and")):
        return FlopCount(flops=_size(eqn.outvars[0]) * math.prod(eqn.params.get("window_dimensions", ())))
    if name.startswith("scatter"):
        return FlopCount(flops=_size(eqn.invars[2]))
    if name == "sort":
        length = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return FlopCount(flops=_size(eqn.invars[0]) * max(1, math.ceil(math.log2(max(length, 2)))))
    if name.startswith(_REDUCTIONS) and name != "reduce_precision":
        return FlopCount(flops=sum(map(_size, eqn.invars)))
    return FlopCount(flops=sum(map(_size, eqn.outvars)))


def _dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def _ragged_dot_flops(eqn: Any) -> int:
    # One group at a time: each row meets one of the right side's matrices.
    lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return 2 * math.prod(lhs) * out[-1]


def _conv_flops(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    # Dilating the left side inserts zeros (the gradient of a strided convolution); they cost nothing.
    zeros = math.prod(eqn.params["lhs_dilation"])
    return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // features // zeros


def _cholesky_flops(eqn: Any) -> int:
    return _size(eqn.invars[0]) * eqn.invars[0].aval.shape[-1] // 3


def _solve_flops(eqn: Any) -> int:
    return _size(eqn.invars[1]) * eqn.invars[0].aval.shape[-1]


_DOTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_flops,
    "ragged_dot": _ragged_dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
    "cholesky": _cholesky_flops,
    "triangular_solve": _solve_flops,
}


def _size(var: Any) -> int:
    return math.prod(_shape(var))


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
        yield from (_open(part) for part in parts if hasattr(part, "eqns"))


def _open(jaxpr: Any) -> Any:
    """The jaxpr without its constants; JAX 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)
