"""Costs of equations: operations, bytes kept for the backward pass, and live bytes.

Operations are counted by equation, from shapes alone: no device, no compile. One multiply-add is two operations; an elementwise
operation is one a result element, whatever it is; a reduction one an operand element; moving data costs nothing. What a
program computes and never uses is not counted, since every compiler drops it. XLA's own ``cost_analysis()`` is no
substitute: it counts a scan's body once, and answers None for an absent GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, final

import jax
import numpy as np
from jax.extend import core

from jaxmem_callbacks.transforms.tracing import flatten, is_stop, is_variable, scan_arity, subjaxprs, variables

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
        loops_once: While loops in it, whose trip count no trace has: their bodies are counted once.
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
        """What the more expensive branch of a conditional has more of."""
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

    Scan bodies count as often as they run, while bodies once (see ``loops_once``), of a conditional the most expensive branch, a
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
        """What the more expensive branch of a conditional has more of."""
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


# Same elements, other shape or order: keeping the result and keeping the operand is the same thing.
_VIEWS = set(
    "broadcast_in_dim copy expand_dims name reshape rev sharding_constraint squeeze stop_gradient transpose".split()
)
# Linear in every operand: the derivative needs none of them. A loop's own residuals are counted by `inner_residual_bytes`.
_LINEAR = _VIEWS | set(
    "add add_any all_gather concatenate convert_element_type copy_p cumsum imag neg optimization_barrier pad psum psum2 "
    "psum_invariant pvary real reduce_scatter reduce_sum reduce_window_sum reshard scan slice split sub while".split()
)
# The derivative is a function of the result.
_BY_RESULT = set("cbrt exp exp2 logistic rsqrt sqrt tanh".split())
# Each of the first two operands is needed for the derivative by the other.
_BILINEAR = set("conv_general_dilated dot_general mul ragged_dot_general".split())
# Only a slice of the operands is needed: indices and predicates.
_BY_OPERANDS = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, None),
    "scatter": slice(1, None),
    "scatter-add": slice(1, None),
    "select_n": slice(0, 1),
}

# Cheap to do twice: elementwise or of layout only, and counter-based random bits.
CHEAP = _VIEWS | set(
    "abs add and bitcast_convert_type clamp concatenate convert_element_type cos div dynamic_slice eq exp floor ge gt "
    "integer_pow iota is_finite le log lt max min mul ne neg not or pad pow random_bits random_fold_in random_seed "
    "random_split random_unwrap random_wrap rem round rsqrt select_n shift_left shift_right_logical sign sin slice sqrt "
    "square sub threefry2x32 xor".split()
)


def nbytes(atom: Any) -> int:
    """Bytes of one value; typed random keys count as their words, tokens and other non-arrays as nothing."""
    aval = atom.aval
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return array_bytes(aval.shape, aval.dtype)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array, without a device's padding; typed random keys count as their words."""
    itemsize = 16 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize
    return math.prod(shape) * itemsize


def is_inexact(atom: Any) -> bool:
    """Whether a value can have a derivative."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


def is_complex(dtype: Any) -> bool:
    """Whether values of a dtype, or None, are complex: JAX (to 0.12 at least) fails to round those that a checkpoint keeps."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.complexfloating)


def residual_bytes(eqns: Sequence[Any], resident: set[Any]) -> np.ndarray:
    """Bytes each equation makes that the backward pass of a plain (not checkpointed) list would keep.

    Args:
        eqns: Flat equations.
        resident: Values that cost nothing to keep: arguments, constants and sinkable values.

    Returns:
        int64[len(eqns)]: a value counts once, at the equation that makes it.
    """
    maker = {var: index for index, eqn in enumerate(eqns) for var in eqn.outvars}
    kept = np.zeros(len(eqns), np.int64)
    active = {var for var in resident if is_inexact(var)}
    for var in residual_values(eqns, resident, active):
        kept[maker[var]] += nbytes(var)
    for index, eqn in enumerate(eqns):
        if not active.isdisjoint(variables(eqn.invars)):
            kept[index] += inner_residual_bytes(eqn)
    return kept


def residual_values(eqns: Sequence[Any], resident: set[Any], active: set[Any]) -> list[Any]:
    """The values that the backward pass of a plain list keeps, each once, views as what they are views of.

    Args:
        eqns: Flat equations.
        resident: Values that are there anyway, and so are not listed.
        active: Those of them that are differentiated; everything that follows from them is added.
    """
    root = view_roots(eqns)
    found: dict[Any, None] = {}
    for eqn in eqns:
        if is_differentiated(eqn, active):
            found.update((root.get(var, var), None) for var in needed_by(eqn, active))
    return [var for var in found if var not in resident]


def is_differentiated(eqn: Any, active: set[Any]) -> bool:
    """Whether an equation has a derivative: something that it takes is ``active``. Its results are added to that."""
    if is_stop(eqn) or active.isdisjoint(variables(eqn.invars)):
        return False
    active.update(var for var in eqn.outvars if is_inexact(var))
    return True


def view_roots(eqns: Sequence[Any]) -> dict[Any, Any]:
    """For each value that is a view of another, such as a reshaped one, what it is a view of in the end."""
    root: dict[Any, Any] = {}
    for eqn in eqns:
        operands = variables(eqn.invars)
        if eqn.primitive.name in _VIEWS and operands:
            root.update((var, root.get(operands[0], operands[0])) for var in eqn.outvars)
    return root


def needs_own_result(eqn: Any) -> bool:
    """Whether an equation's derivative is a function of its result, which nobody else can hand to it."""
    return eqn.primitive.name in _BY_RESULT


def needed_by(eqn: Any, active: set[Any]) -> list[Any]:
    """Operands and results of one equation that its derivative needs."""
    name = eqn.primitive.name
    if name in _LINEAR:
        return []
    if name in _BY_RESULT:
        return list(eqn.outvars)
    if name in _BILINEAR:
        first, second = eqn.invars[:2]
        return [a for a, b in ((first, second), (second, first)) if is_variable(a) and is_variable(b) and b in active]
    if name == "div" and not (is_variable(eqn.invars[1]) and eqn.invars[1] in active):
        return variables(eqn.invars[1:])  # a quotient is linear in what is divided
    return variables(eqn.invars[_BY_OPERANDS.get(name, slice(None))])


def alive(spans: np.ndarray, length: int) -> np.ndarray:
    """Bytes alive at each position of ``length`` equations, int64[length + 1]; spans of bytes, first and last position."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, spans[:, 1], spans[:, 0])
    np.add.at(change, spans[:, 2] + 1, -spans[:, 0])
    return np.cumsum(change)[: length + 1]


def inner_residual_bytes(eqn: Any) -> int:
    """What an equation with bodies of its own keeps for the backward pass: a loop stacks every step's residuals."""
    name = eqn.primitive.name
    if name == "scan":
        return int(eqn.params["length"]) * scan_step_bytes(eqn) + scan_carry_bytes(eqn)
    if name == "cond":
        return max((_body_bytes(body) for body in subjaxprs(eqn)), default=0)
    if name in {"jit", "pjit", "closed_call", "core_call", "shard_map"}:
        return copies(eqn) * sum(_body_bytes(body) for body in subjaxprs(eqn))
    return 0


def scan_step_bytes(eqn: Any) -> int:
    """Residual bytes of one step of a `scan` besides its carry: what the body keeps of itself."""
    return _body_bytes(subjaxprs(eqn)[0])


def scan_carry_bytes(eqn: Any) -> int:
    """Bytes that a `scan` keeps when its body is checkpointed: the carry before every step."""
    consts, carry = scan_arity(eqn)
    return int(eqn.params["length"]) * sum(nbytes(atom) for atom in eqn.invars[consts : consts + carry])


def _body_bytes(body: Any) -> int:
    flat = flatten(body)
    return int(residual_bytes(flat.eqns, set(flat.invars)).sum())


# How near figures are before a plan takes them for the same. Nearer than what the estimates of bytes and times resolve, another
# compile or another cut is a matter of chance.
# Tuned: of a step's operations. A search ends where what fits is within half a percent of all that may fit.
WORTH = 0.005
# Tuned: of bytes or time. Estimates between compiled points are wrong by 0.0, 0.2 and 0.7 % in the median, on three targets.
SAME = 0.01
# Tuned: of bytes or operations. Plans are compared with remat by hand to within it (results/plan_bench).
ALIKE = 0.02
# Tuned: of bytes. Four of five of those estimates are nearer than this (37 of 50 points, 44 of 51, 38 of 47).
NOTABLE = 0.05
# Tuned: of bytes. None of them is higher by more than this, so of a smaller difference a compiler may make the opposite.
MARGIN = 0.1
# Tuned: numbers in one table of a search, half a MiB of float64, which stays in a core's cache. All sizes follow from it.
TABLE = 2**16
# Places of which every pair is in such a table.
SIDE = math.isqrt(TABLE)

# Operations of bfloat16 products in the time in which a byte goes through a device's links to others: the middle of the data
# sheets' figures: A100 (1040), v4 (1833), v5e (1970), H100 (2198), B200 (2500) and v6e (4098).
LINK_BYTE = 2000
_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "ppermute"),
    *("psum", "psum2", "psum_invariant", "ragged_all_to_all", "reduce_scatter"),
}


def collective_work(eqn: Any) -> float:
    """Operations in whose time the collectives of one equation, its bodies included, move what they move."""
    return equation_cost(eqn, _leaf, Amount(0.0), Amount(0.0)).weight if subjaxprs(eqn) else _leaf(eqn).weight


def _leaf(eqn: Any) -> Amount:
    if eqn.primitive.name not in _COLLECTIVES:
        return Amount(0.0)
    return Amount(float(LINK_BYTE * max(sum(map(nbytes, atoms)) for atoms in (eqn.invars, eqn.outvars))))


PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
# Elementwise, if not always cheap: done inside a fusion all the same.
_FUSED = CHEAP | {
    *("atan2", "cbrt", "cosh", "erf", "erf_inv", "erfc", "exp2", "expm1"),
    *("log1p", "logistic", "nextafter", "sinh", "tan", "tanh"),
}
# Functions with a derivative of their own, and the jits in them, are as their bodies.
_WITH_OWN_RULE = {"custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


def is_fused(eqn: Any) -> bool:
    """Whether compilers compute an equation inside another, so that its result need not be in memory."""
    if eqn.primitive.name in _WITH_OWN_RULE:  # such as jax.nn.relu
        return all(is_fused(inner) for body in subjaxprs(eqn) for inner in body.eqns)
    return eqn.primitive.name in _FUSED


def has_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product, or has one in its bodies."""
    inner = (each for body in subjaxprs(eqn) for each in body.eqns)
    return eqn.primitive.name in PRODUCTS or any(map(has_product, inner))
