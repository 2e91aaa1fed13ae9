"""The check that accumulation leaves a loss's gradient as it is, computed in float32 where the loss has fewer bits.

Of a whole step it is made before the first call, by the gradients that the step takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend import core

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.accumulation.accumulate import (
    MOVES,
    Accumulated,
    GradientCall,
    accumulate,
    coarsest,
    in_order,
    is_weighted,
    wide,
    zeros_like,
)
from jaxmem_callbacks.transforms.accumulation.batch import WHOLE, SplitCall, sample
from jaxmem_callbacks.transforms.costs import ALIKE
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import (
    CHECKPOINTS,
    Equations,
    consts_of,
    derive,
    evaluate,
    flatten,
    inlined,
    is_jit,
    is_variable,
    needed_equations,
    new_variable,
    open_jaxpr,
    scan_arity,
    side_effects,
    split_arrays,
    trace,
    variables,
    with_first_checkpoints,
)

_STAND_IN = 3  # what a scalar argument is taken to be: a weight that adds up does so for any


class _Quotient(NamedTuple):
    """One `jm.weighted` of a traced loss: what it is, and the variables or literals of its parts."""

    what: str
    total: Any
    weight: Any


def require_weights_that_add_up(call: GradientCall, batch: SplitCall, count: int) -> None:
    """Refuse a weight, of the loss or in its aux, that is not ``count`` times as large for the whole batch as for a microbatch.

    Args:
        call: The gradient; its loss is traced once, and once more where a weight has no part of the rows.
        batch: Its arguments.
        count: Number of microbatches.

    Raises:
        PolicyError: names the weight, and what to write instead.
    """
    flat, quotients = _traced(call, batch, count)
    fixed = [
        index
        for index, (_, total, weight) in enumerate(quotients)
        if _varies(flat, batch, total) and not _varies(flat, batch, weight)
    ]
    if not fixed:
        return
    whole, of_whole = _traced(call, batch, 1)
    for index in fixed:
        part, total = _value(flat, quotients[index].weight), _value(whole, of_whole[index].weight)
        if part is None or total is None or _add_up(part, total, count):
            continue
        msg = (
            f"microbatches={count}: {quotients[index].what} of {call.name} is jm.weighted by a weight that does not add up: for "
            f"{batch.rows} rows it is not {count} times what it is for {batch.rows // count}, so the sum would be divided by a "
            "wrong number. Expected the sum over the rows of what they count: "
            f"{advise('loss.weighted', arguments='losses.sum(), losses.size')}, or by the "
            "sum of a mask. Or return the plain mean, which is compared."
        )
        raise PolicyError(msg)


def _traced(call: GradientCall, batch: SplitCall, count: int) -> tuple[Equations, list[_Quotient]]:
    """The loss on one of ``count`` microbatches."""

    def of_first(*arrays: Any) -> Any:
        args, kwargs = batch.microbatch(arrays, 0, count, lambda key, _: key)
        return call.evaluate(args, kwargs)[0]

    closed, join = trace(of_first, batch.arrays)
    flat = flatten(closed)
    return flat, list(_quotients(join(flat.outvars)))


def _quotients(parts: Any) -> Iterator[_Quotient]:
    value, (weight, aux) = parts
    if weight is not None:
        yield _Quotient("the loss", value, weight)
    for path, leaf in jax.tree_util.tree_flatten_with_path(aux, is_leaf=is_weighted)[0]:
        if is_weighted(leaf):
            yield _Quotient(f"aux{jax.tree_util.keystr(path)}", leaf.total, leaf.weight)


def _inputs(flat: Equations, atom: Any) -> tuple[list[Any], list[Any]]:
    """The equations that make a value, and the constants and arguments of the loss that have a part in it."""
    eqns = needed_equations([atom], flat.eqns)
    used = {var for part in [[atom], *(eqn.invars for eqn in eqns)] for var in variables(part)}
    return eqns, [var for var in flat.invars if var in used]


def _varies(flat: Equations, batch: SplitCall, atom: Any) -> bool:
    """Whether rows or random keys have a part in a value."""
    arguments = flat.invars[-len(batch.arrays) :]
    varying = {var for var, role in zip(arguments, batch.roles, strict=True) if role != WHOLE}
    return not varying.isdisjoint(_inputs(flat, atom)[1])


def _value(flat: Equations, atom: Any) -> Any:
    """A value in which no row has a part, scalars among its arguments being `_STAND_IN`; None where more than that goes in."""
    eqns, inputs = _inputs(flat, atom)
    known = dict(zip(flat.invars, flat.consts, strict=False))
    values = [known.get(var) for var in inputs]
    given = [value is not None and not isinstance(value, Tracer) for value in values]
    if any(eqn.effects for eqn in eqns) or any(
        var.aval.shape for var, is_given in zip(inputs, given, strict=True) if not is_given
    ):
        return None
    if not is_variable(atom):
        return np.asarray(atom.val)
    program = derive(flat.template, invars=inputs, outvars=[atom], eqns=eqns)
    with jax.ensure_compile_time_eval():
        filled = [
            value if is_given else jnp.asarray(_STAND_IN, var.aval.dtype)
            for var, value, is_given in zip(inputs, values, given, strict=True)
        ]
        return np.asarray(evaluate(program, filled)[0])


def _add_up(part: np.ndarray, whole: np.ndarray, count: int) -> bool:
    bits = jnp.finfo(part.dtype).bits if jnp.issubdtype(part.dtype, jnp.floating) else max(TOLERANCE)
    apart, size = abs(float(whole) - count * float(part)), abs(float(whole))
    return not apart > TOLERANCE[bits] * size


# Tuned: documented. Largest relative difference that rounding explains, by the bits of the coarsest dtype that is computed
# with. Fewer than 32 are those of what cannot be computed otherwise, such as a kernel.
TOLERANCE = {64: 1e-6, 32: 1e-4, 16: 3e-2, 8: 2e-1}
_FLOAT32_BITS = 32
# Tuned: times that rounding is provoked, since one time may by chance move a part of a gradient hardly at all.
_NUDGES = 3
# Tuned: rounding moves a part of a gradient this many times as far between two programs as between two nudges, at most ...
_OF_NUDGES = 10.0
# Tuned: ... and no part less than this many units in the last place of the whole.
_OF_WHOLE = 4.0
_PERCENT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One full against one accumulated gradient, still to be read.

    Attributes:
        name: The loss's name.
        count: Microbatches asked for.
        rows: Rows compared.
        what: What each of the first columns is: the gradient, the value, entries of aux.
        allowed: What rounding explains of each of these.
        tolerance: What it explains of anything as large as what it is made of.
        parts: The parts of the gradient and floating entries of aux, of which the last columns are: how far apart each is, then
            its size.
        moved: Of each of these, its place among the results of `rounding`.
        epsilon: Relative size of a unit in the last place, of float32 where the loss computes with fewer bits.
        masks: What some rows were masked with, in the variants after the first two.
        differences: One row a variant; relative in the first columns.
    """

    name: str
    count: int
    rows: int
    what: tuple[str, ...]
    allowed: tuple[float, ...]
    tolerance: float
    parts: tuple[str, ...]
    moved: tuple[int, ...]
    epsilon: float
    masks: tuple[int, ...]
    differences: Any = field(repr=False)

    @property
    def variants(self) -> tuple[str, ...]:
        """What was compared, in the order of the rows of ``differences``."""
        masked = (f"with {mask or 'zeros'} in some rows" for mask in self.masks)
        return ("on rows of this batch", "on rows of this batch, each repeated", *masked)


def compare(call: GradientCall, batch: SplitCall, count: int, program: Any, shards: int = 1) -> Comparison:
    """Trace the comparison for a loss that returned a plain scalar.

    Args:
        call: The gradient to take.
        batch: Its arguments.
        count: Microbatches asked for.
        program: The gradient of one microbatch, traced.
        shards: Devices that the step runs on; every microbatch keeps a row for each.
    """
    few = sample(batch, count, program, shards)
    call, program = _precise(call, batch, program)
    bits = jnp.finfo(coarsest(program))
    tolerance = TOLERANCE.get(bits.bits, TOLERANCE[8])
    labels: dict[str, Any] = {}

    def one(stacked: dict[int, Any]) -> jax.Array:
        arrays = few.variant(stacked)
        full = call.differentiate(*batch.join(few.whole(arrays)))
        done = accumulate(call, batch.replaced(arrays, few.rows), few.few, few.key)
        ours, theirs, names = _both(full[1], done, few.few)
        gradients = {
            name: (_norm(a - b), jnp.maximum(_norm(a), _norm(b)), place)
            for place, (name, a, b) in enumerate(zip(names, ours, theirs, strict=True))
        }
        unlike, entries = _aux_apart(full, done, few.rows, _turned(tolerance), len(names))
        columns = {
            "gradient": (
                _relative(_norm(*(apart for apart, *_ in gradients.values())), _norm(*theirs), _norm(*ours)),
                tolerance,
            ),
            "loss": (_mean_distance(done.parts[0], full[0][0]), tolerance),
            **unlike,
        }
        parts = gradients | entries
        labels["what"], labels["allowed"] = tuple(columns), tuple(allowed for _, allowed in columns.values())
        labels["parts"], labels["moved"] = tuple(parts), tuple(place for *_, place in parts.values())
        apart, sizes = ([each[index] for each in parts.values()] for index in (0, 1))
        return jnp.stack([*(column for column, _ in columns.values()), *apart, *sizes])

    with jax.default_matmul_precision("highest"):
        differences = jax.lax.map(one, few.stacked)
    return Comparison(
        name=call.name,
        count=count,
        rows=few.rows,
        tolerance=tolerance,
        epsilon=float(min(bits.eps, jnp.finfo("float32").eps)),
        masks=few.masks,
        differences=differences,
        **labels,
    )


def rounding(call: GradientCall, batch: SplitCall, count: int, program: Any, shards: int = 1) -> jax.Array:
    """Trace how far each part of the full gradient, and each floating entry of aux, moves by rounding: one row a variant.

    Args:
        call: What `compare` was given.
        batch: Likewise.
        count: Likewise.
        program: Likewise.
        shards: Likewise.
    """
    few = sample(batch, count, program, shards)
    call, program = _precise(call, batch, program)
    unit = float(jnp.finfo(coarsest(program)).eps)

    def one(stacked: dict[int, Any]) -> jax.Array:
        arrays = few.whole(few.variant(stacked))

        def parts(number: Any) -> list[Any]:
            nudged = [
                _nudged(array, i, number, unit) if role == WHOLE else array
                for i, (array, role) in enumerate(zip(arrays, batch.roles, strict=True))
            ]
            (_, (_, aux)), gradients = call.differentiate(*batch.join(nudged))
            return [*_parts(gradients)[0], *_floating(aux)]

        def body(before: list[Any], number: Any) -> tuple[list[Any], jax.Array]:
            now = [part.astype(last.dtype) for part, last in zip(parts(number), before, strict=True)]
            return now, jnp.stack([_norm(_difference(a, b)[0]) for a, b in zip(now, before, strict=True)])

        like = jax.make_jaxpr(parts)(jnp.int32(0)).out_avals
        moved = jax.lax.scan(body, [zeros_like(aval) for aval in like], jnp.arange(1 + _NUDGES, dtype=jnp.int32))[1]
        return moved[1:].max(axis=0)  # the first is how far the gradient is from nothing

    with jax.default_matmul_precision("highest"):
        return jax.lax.map(one, few.stacked)


def _precise(call: GradientCall, batch: SplitCall, program: Any) -> tuple[GradientCall, Any]:
    """A gradient, and that of one microbatch as traced, with what has 16 and fewer bits computed in float32."""
    dtypes = [array.dtype for array in batch.arrays if jnp.issubdtype(array.dtype, jnp.floating)]
    if min(jnp.finfo(dtype).bits for dtype in [coarsest(program), *dtypes]) >= _FLOAT32_BITS:
        return call, program
    return in_float32(call, batch.arrays), program_in_float32(program, [jnp.int32(0), *batch.arrays])


def _nudged(array: jax.Array, index: int, number: Any, unit: float) -> jax.Array:
    """An array scaled by up to three units in the last place, each array by its own; as it is for number 0."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    array = _wide(array)
    way = jnp.where(number % 2 == index % 2, number, -number)
    return array * (1 + unit * way).astype(array.dtype)


def _parts(gradients: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The arrays of a gradient and what each is called."""
    flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
    found = [
        (f"gradient{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in flat
        if isinstance(leaf, jax.Array) and leaf.dtype != jax.dtypes.float0
    ]
    return [leaf for _, leaf in found], tuple(name for name, _ in found)


def _both(full: Any, done: Accumulated, few: int) -> tuple[list[jax.Array], list[jax.Array], tuple[str, ...]]:
    """The parts of the accumulated and of the full gradient, of the same dtypes, and what each is called."""
    (theirs, names), (ours, _) = _parts(full), _parts(done.gradients)
    return [a / few for a in ours], [b.astype(a.dtype) for a, b in zip(ours, theirs, strict=True)], names


def _floating(aux: Any) -> list[jax.Array]:
    """The floating arrays of aux, in flattening order."""
    every = jax.tree.leaves(aux, is_leaf=is_weighted)
    return [leaf for leaf in every if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _aux_apart(
    full: Any, done: Accumulated, rows: int, turned: float, first: int
) -> tuple[dict[str, tuple[jax.Array, float]], dict[str, tuple[jax.Array, jax.Array, int]]]:
    """What of aux that has a mean, or a value for each row, is another one.

    Args:
        full: What the whole rows gave.
        done: What their microbatches gave.
        rows: How many rows.
        turned: The share of whole numbers that rounding makes other ones.
        first: The place of the first floating entry among the results of `rounding`.

    Returns:
        By entry, the share of it that is another number, or finite in one of the two alone, and what rounding explains of that.
        By floating entry how far it is apart otherwise, its size, and its place among the results of `rounding`.
    """
    (_, (_, aux)), _ = full
    stacked = jax.tree_util.tree_flatten_with_path(done.parts[1][1], is_leaf=is_weighted)[0]
    unlike: dict[str, tuple[jax.Array, float]] = {}
    entries: dict[str, tuple[jax.Array, jax.Array, int]] = {}
    place = first - 1
    for (path, several), one in zip(stacked, jax.tree.leaves(aux, is_leaf=is_weighted), strict=True):
        if not isinstance(several, jax.Array):
            continue
        is_floating = jnp.issubdtype(several.dtype, jnp.inexact)
        place += is_floating
        has_rows = several.ndim > 1 and one.shape == (rows, *several.shape[2:]) and one.size > 0
        if not has_rows and (several.ndim > 1 or not is_floating):
            continue
        name = f"aux{jax.tree_util.keystr(path)}"
        if not is_floating:
            unlike[name] = (in_order(several) != one).astype(jnp.float32).mean(), turned
            continue
        ours = in_order(several) if has_rows else _wide(several).mean()
        difference, share = _difference(ours, one)
        unlike[name] = share, turned
        size = _norm(_finite(one)) if has_rows else jnp.maximum(_norm(_finite(one)), _norm(_finite(several)))
        entries[name] = _norm(difference), size, place
    return unlike, entries


def _turned(tolerance: float) -> float:
    """The share of rows in which rounding turns the largest of several numbers that are almost equal."""
    return max(ALIKE, math.sqrt(tolerance))


def _difference(ours: jax.Array, theirs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where both are finite their difference, and the share of them where only one is, or they are infinite otherwise."""
    finite = jnp.isfinite(ours) & jnp.isfinite(theirs)
    unlike = ~finite & (ours != theirs) & ~(jnp.isnan(ours) & jnp.isnan(theirs))
    return jnp.where(finite, _wide(ours) - _wide(theirs), 0), unlike.astype(jnp.float32).mean()


def _finite(array: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(array), array, 0)


def _wide(array: jax.Array) -> jax.Array:
    """In a dtype to add up in: squares of float16 are soon infinite."""
    return array.astype(wide(array.dtype))


def _norm(*arrays: jax.Array) -> jax.Array:
    """Of all together; a sum, since a product of arrays that a mesh divides would need a sharding."""
    squares = (jnp.square(jnp.abs(_wide(array))).sum().astype(jnp.float32) for array in arrays)
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _mean_distance(several: jax.Array, one: jax.Array) -> jax.Array:
    several, one = several.astype(jnp.float32), one.astype(jnp.float32)
    size = jnp.where(jnp.isfinite(one), jnp.maximum(jnp.abs(_finite(several)).max(), jnp.abs(one)), one)
    return _relative(jnp.abs(several.mean() - one), size, several.mean())


def _relative(apart: jax.Array, size: jax.Array, ours: jax.Array) -> jax.Array:
    """How far apart two values are; infinite where the full one is finite and ours is not, not a number where neither is."""
    relative = jnp.where((apart == 0) & (size == 0), 0.0, apart / size)
    return jnp.where(jnp.isfinite(size) & ~jnp.isfinite(ours), jnp.inf, relative).astype(jnp.float32)


def require_equal(comparison: Comparison, differences: Any, moved: Callable[[], Any]) -> None:
    """Refuse a loss whose accumulated gradient is another one.

    Args:
        comparison: What was compared.
        differences: Its differences, computed.
        moved: Computes what `rounding` traces; called only where a part differs, of the gradient or of aux, and no whole does.

    Raises:
        PolicyError: by how much they differ, and what to write instead.
    """
    table = np.asarray(differences, np.float64)
    table = table.reshape(-1, len(comparison.variants), table.shape[-1]).max(axis=0)
    found, parts = np.split(table, [len(comparison.what)], axis=1)
    decided = ~np.isnan(
        found
    )  # of one variant nothing is known where a row divides by what was masked, in a whole batch too
    if not np.isfinite(found[0]).all():
        msg = (
            f"microbatches={comparison.count}: whether {comparison.name} may be accumulated could not be checked, because its "
            f"gradient or loss on {comparison.rows} rows of the batch is not finite. Begin with ordinary data, or "
            f"{_way_out(comparison)}."
        )
        raise PolicyError(msg)
    wrong = np.where(decided, found, 0.0) > comparison.allowed
    if wrong.any():
        variant = int(np.argmax(wrong.any(axis=1)))
        column = int(np.argmax(wrong[variant]))
        raise _refusal(comparison, variant, comparison.what[column], found[variant, column], comparison.allowed[column])
    apart, sizes = np.split(parts, 2, axis=1)
    doubtful = _beyond_rounding(apart, sizes, comparison)
    if not doubtful.any():
        return
    noise = np.asarray(moved(), np.float64)
    noise = noise.reshape(-1, len(comparison.variants), noise.shape[-1]).max(axis=0)[:, comparison.moved]
    doubtful &= apart > _OF_NUDGES * np.where(np.isfinite(noise), noise, np.inf)
    if doubtful.any():
        variant = int(np.argmax(doubtful.any(axis=1)))
        relative = np.divide(apart, sizes, out=np.zeros_like(apart), where=doubtful)[variant]
        column = int(np.argmax(relative))
        raise _refusal(comparison, variant, comparison.parts[column], relative[column], comparison.tolerance)


def _beyond_rounding(apart: np.ndarray, sizes: np.ndarray, comparison: Comparison) -> np.ndarray:
    """Which parts, by variant, are further apart than rounding explains at first sight."""
    of_gradient = np.array([not name.startswith("aux") for name in comparison.parts])
    whole = np.sqrt((np.where(of_gradient, sizes, 0.0) ** 2).sum(axis=1, keepdims=True))
    finite = np.isfinite(apart) & np.isfinite(sizes)
    floor = np.where(of_gradient & np.isfinite(whole), _OF_WHOLE * comparison.epsilon * whole, 0.0)
    least = np.maximum(comparison.tolerance * sizes, floor)
    return finite & (np.where(finite, apart, 0.0) > np.where(finite, least, np.inf))


def _way_out(comparison: Comparison) -> str:
    return f"return {advise('loss.weighted', arguments='loss_sum, weight_sum')} in {comparison.name}, which adds up exactly"


def _refusal(comparison: Comparison, variant: int, what: str, found: float, allowed: float) -> PolicyError:
    advice = (
        f"Expected a mean over rows, each computed from that row alone. For a masked mean, {_way_out(comparison)}. A loss or "
        "layer that compares rows with each other (in-batch contrast, BatchNorm, balance of experts) has no microbatches: take "
        "it whole, with remat='full'."
    )
    if what.startswith("aux"):
        advice = (
            "Expected a mean over rows there, an array with one entry a row, each computed from that row alone, or "
            f"{advise('loss.weighted', arguments='sum, weight')}, which is exact."
        )
    return PolicyError(
        f"microbatches={comparison.count} would change the numbers of {comparison.name}: its accumulated {what} differs by "
        f"{_percent(found)} from the full one {comparison.variants[variant]} ({comparison.rows} rows; {_percent(allowed)} "
        f"allowed). {advice}"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= _PERCENT else f"{100 * share:.2g}%"


_PUBLISHED = {
    value for module in (core.primitives, jax.lax) for name, value in vars(module).items() if name.endswith("_p")
}
# Calls of another jaxpr, and the parameter that holds it. Their rules of differentiation were obeyed when they were traced.
_CALLS = {
    **dict.fromkeys(["jit", "pjit", *CHECKPOINTS], "jaxpr"),
    **dict.fromkeys(["core_call", "closed_call", "custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
}
# Other bits would be another result, or what it was traced with would not fit.
_BY_BITS = {"bitcast_convert_type", "nextafter", "custom_linear_solve"}
_EXACT = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def in_float32(call: GradientCall, arrays: Sequence[Any]) -> GradientCall:
    """The same gradient, computed in float32 wherever it is computed with fewer bits.

    Args:
        call: The gradient.
        arrays: The arrays among its arguments, in flattening order. It is traced for their floating dtypes, whatever it is
            called with.
    """
    dtypes = [array.dtype for array in arrays]

    def differentiate(args: Any, kwargs: Any) -> Any:
        given, join = split_arrays((args, kwargs))

        def traced(*values: Any) -> Any:
            inner_args, inner_kwargs = join(values)
            return call.differentiate(inner_args, inner_kwargs)

        pairs = zip(given, dtypes, strict=True)
        narrow = [value.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else value for value, dtype in pairs]
        closed, joined = trace(traced, narrow)
        return joined(_evaluated(with_first_checkpoints(closed), given))

    return replace(call, differentiate=differentiate)


def program_in_float32(program: Any, arguments: Sequence[Any]) -> Any:
    """A traced function as one that computes in float32, of arguments as they are."""
    return jax.make_jaxpr(lambda *values: _evaluated(program, values))(*arguments)


def _evaluated(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, in float32 where it makes them with fewer bits."""
    opened = open_jaxpr(jaxpr)
    known: dict[Any, Any] = dict(zip(opened.constvars, consts_of(jaxpr), strict=True))
    known.update(zip(opened.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return known[atom] if is_variable(atom) else np.asarray(atom.val, atom.aval.dtype)

    for eqn in opened.eqns:
        with eqn.ctx.manager:
            results = _results(eqn, [read(atom) for atom in eqn.invars], opened)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def _results(eqn: Any, operands: Sequence[Any], within: Any) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _evaluated(eqn.params[_CALLS[name]], operands)
    if name in _OTHERWISE:
        return _OTHERWISE[name](eqn, operands)
    if name in MOVES:
        return _bound(eqn, operands, eqn.params)
    is_narrow = any(_is_narrow(atom) for atom in (*eqn.invars, *eqn.outvars))
    if not is_narrow or name in _BY_BITS or eqn.primitive not in _PUBLISHED or side_effects(eqn):
        return _as_it_is(eqn, operands, within)
    params = {key: _wide_parameter(key, value) for key, value in eqn.params.items()}
    return _bound(eqn, [_wide_value(operand) for operand in operands], params)


def _bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]


def _as_it_is(eqn: Any, operands: Sequence[Any], within: Any) -> list[Any]:
    """What an equation makes of operands in the dtypes that it was traced for."""
    given = {
        atom: jax.lax.convert_element_type(value, atom.aval.dtype) if _is_narrow(atom) else value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if is_variable(atom)
    }
    outvars = [new_variable(var) for var in eqn.outvars]  # nobody reads some of them, and these may be no variables
    alone = derive(within, invars=list(given), outvars=outvars, eqns=[eqn.replace(outvars=outvars)])
    return evaluate(alone, list(given.values()))


def _scan(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    consts, carried = scan_arity(eqn)
    before, params = operands[:consts], eqn.params

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = _evaluated(params["jaxpr"], [*before, *carry, *slices])
        return [_wide_value(value) for value in results[:carried]], results[carried:]

    carry = [_wide_value(value) for value in operands[consts : consts + carried]]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(body, carry, operands[consts + carried :], **options)
    return [*last, *stacked]


def _while(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    goes_on, ahead = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
    body, carried = eqn.params["body_jaxpr"], ahead + eqn.params["body_nconsts"]
    return jax.lax.while_loop(
        lambda carry: _evaluated(goes_on, [*operands[:ahead], *carry])[0],
        lambda carry: [_wide_value(value) for value in _evaluated(body, [*operands[ahead:carried], *carry])],
        [_wide_value(value) for value in operands[carried:]],
    )


def _cond(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    def taken(branch: Any) -> Callable[..., list[Any]]:
        return lambda *values: [_wide_value(value) for value in _evaluated(branch, values)]

    return jax.lax.switch(operands[0], [taken(branch) for branch in eqn.params["branches"]], *operands[1:])


_OTHERWISE = {"scan": _scan, "while": _while, "cond": _cond, "reduce_precision": lambda _, operands: operands}


def _is_narrow(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and wide(dtype) != dtype


def _wide_value(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return value if dtype is None or wide(dtype) == dtype else jax.lax.convert_element_type(value, wide(dtype))


def _wide_parameter(name: str, value: Any) -> Any:
    if name == "precision":
        return _EXACT  # another would round the operands after all
    if isinstance(value, np.dtype):
        return wide(value)
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):  # how a reduction or a scatter puts two numbers together
        types = [jax.ShapeDtypeStruct(var.aval.shape, wide(var.aval.dtype)) for var in open_jaxpr(value).invars]
        traced = program_in_float32(value, types)
        return traced if isinstance(value, core.ClosedJaxpr) else open_jaxpr(traced)
    return value


# The context in which a step is traced under its policy; each gradient that is accumulated is handed to a function.
Under = Callable[[Callable[..., None]], AbstractContextManager[None]]
_MARK = "jaxmem_comparison_"


def require_accumulable(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    under: Under,
) -> None:
    """Compare the gradients of a step with their accumulation; compiles and runs one small program, or two.

    Args:
        step: The step as it will be called, jitted or not.
        args: Its arguments with real arrays; they are read only.
        kwargs: Likewise.
        under: Its policy, which has microbatches.

    Raises:
        PolicyError: a loss of the step would have another gradient, or could not be checked.
    """
    arrays, join = _arrays((args, kwargs))
    shards = _shards(arrays)
    comparisons: list[Comparison] = []

    def called(*values: Any) -> None:
        inner_args, inner_kwargs = join(values)
        step(*inner_args, **inner_kwargs)

    def compared(*gradient: Any) -> Any:
        comparison = compare(*gradient, shards=shards)
        # A tracer kept here would outlive its trace, which `jax.checking_leaks()` calls a leak.
        comparisons.append(replace(comparison, differences=None))
        return comparison.differences

    @functools.cache
    def moved() -> list[Any]:
        return _at_gradients(called, arrays, under, lambda *gradient: rounding(*gradient, shards=shards))

    # What looks for the user's transfers and NaNs would find ours: a row that is masked may divide by nothing.
    with jax.transfer_guard("allow"), jax.debug_nans(False):
        found = _at_gradients(called, arrays, under, compared)
        for index, (comparison, differences) in enumerate(zip(comparisons, found, strict=True)):
            require_equal(comparison, differences, lambda index=index: moved()[index])


def _at_gradients(
    called: Callable[..., None], arrays: Sequence[Any], under: Under, computed: Callable[..., Any]
) -> list[Any]:
    """What a function of each gradient call computes, as the step reaches them; of the step only what that needs is run."""
    met: list[tuple[str, int]] = []  # the loss, and its microbatches

    def mark(call: GradientCall, batch: SplitCall, count: int, program: Any) -> None:
        gradient = computed(call, batch, count, program)
        checkpoint_name(gradient, f"{_MARK}{len(met)}")  # so that it is found again from outside
        met.append((call.name, count))

    def traced(*values: Any) -> None:
        with under(mark):
            called(*values)

    flat = inlined(jax.make_jaxpr(traced)(*arrays), is_inlined=is_jit)
    places = {
        int(eqn.params["name"].removeprefix(_MARK)): eqn.outvars[0]
        for eqn in flat.eqns
        if eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(_MARK)
    }
    for index, (name, count) in enumerate(met):
        if index not in places:
            msg = (
                f"microbatches={count}: the gradient of {name} is taken inside a loop, a branch or a "
                "shard_map, where it can't be compared with a full one. Expected it directly in the step. Return "
                f"{advise('loss.weighted', arguments='loss_sum, weight_sum')} in {name}, which needs no check."
            )
            raise PolicyError(msg)
    if not met:
        return []
    outvars = [places[index] for index in range(len(met))]
    # Whatever else the step reports is reported when it runs.
    needed = derive(flat.template, invars=flat.invars, outvars=outvars, eqns=needed_equations(outvars, flat.eqns))

    def jaxmem_accumulation_check(consts: Any, values: Any) -> list[Any]:
        return evaluate(needed, [*consts, *values])

    return jax.jit(jaxmem_accumulation_check)(flat.consts, arrays)


def _arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a step's arguments, NumPy's included, and a copy of the arguments around others."""
    framework = framework_of(tree)
    if framework is not None:
        return framework.apart(tree)
    arrays, join = split_arrays(tree, is_leaf=lambda leaf: isinstance(leaf, np.ndarray))
    return [jnp.asarray(array) for array in arrays], join


def _shards(arrays: Sequence[Any]) -> int:
    """Devices that the step's arrays are on, at most."""
    return max((len(array.sharding.device_set) for array in arrays if isinstance(array, jax.Array)), default=1)
