"""Gradients summed or averaged over microbatches; `jm.weighted` for losses that are a quotient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.tree_util import register_dataclass

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.transforms.accumulation.batch import KeyOf, SplitCall, folded
from jaxmem_callbacks.transforms.tracing import (
    evaluate_closed,
    is_weak,
    open_jaxpr,
    split_arrays,
    subjaxprs,
    trace,
    typed,
)

_NUMBERS = (jax.Array, np.ndarray, np.generic, complex, float, int)


@functools.partial(register_dataclass, data_fields=["total", "weight"], meta_fields=[])
@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """A quotient whose two parts can be added up over microbatches. Made by `weighted`.

    Attributes:
        total: Sum over the rows, a scalar.
        weight: What the sum is divided by, a scalar added up in the same way.
    """

    total: Any
    weight: Any


def weighted(total: Any, weight: Any) -> Weighted:
    """The value ``total / weight`` of a batch, in a form that microbatches can add up exactly.

        def loss(params, batch):
            losses = cross_entropy(params, batch)
            return jm.weighted((losses * batch["mask"]).sum(), batch["mask"].sum())

    A loss returns it in place of its scalar (``return jm.weighted(...), aux`` with ``has_aux``); in ``aux`` it may stand
    for any metric. Gradients are those of ``total / weight`` with the weight held constant. A weight of 0 gives 0.

    Args:
        total: Sum over the rows of the batch, each row's share computed from that row alone: a scalar.
        weight: Sum over the rows of what they count, usually of tokens or rows: a scalar.

    Returns:
        The pair, which `jm.value_and_grad`, `jm.grad` and `jm.nnx.value_and_grad` understand, under a policy or without.

    Raises:
        TypeError: a part is no number.
        LossRefusedError: which is a ValueError: a part is no scalar, or the weight is not a number.
    """
    for name, part in (("total", total), ("weight", weight)):
        if not (isinstance(part, _NUMBERS) or hasattr(part, "__jax_array__")):
            refuse("jm.weighted", name, part, "a scalar, such as (losses * mask).sum()")
        if name == "weight" and isinstance(part, float) and math.isnan(part):
            msg = "jm.weighted: weight=nan weighs nothing. Expected what the rows count, such as mask.sum()."
            raise LossRefusedError(msg)
        if jnp.shape(part) != ():
            msg = (
                f"jm.weighted: {name} has the shape {jnp.shape(part)}, expected a scalar. Sum over the rows: "
                f"{advise('loss.weighted', arguments='(losses * mask).sum(), mask.sum()')}."
            )
            raise LossRefusedError(msg)
    return Weighted(total=jnp.asarray(total), weight=jnp.asarray(weight))


def is_weighted(leaf: Any) -> bool:
    """For flattening: a `Weighted` is one entry."""
    return isinstance(leaf, Weighted)


def in_parts(loss: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """The loss as one with aux, always: to ``(scalar, (weight or None, aux or None))``."""

    @functools.wraps(loss)
    def loss_in_parts(*args: Any, **kwargs: Any) -> Any:
        result = loss(*args, **kwargs)
        value, aux = result, None
        if has_aux:
            if isinstance(result, Weighted):
                name = getattr(loss, "__qualname__", type(loss).__name__)
                msg = (
                    f"The loss {name} returned what jm.weighted gave alone, and has_aux=True expects a pair. Return the "
                    "pair of it and the aux, or leave has_aux out where it is called."
                )
                raise LossRefusedError(msg)
            if not isinstance(result, (tuple, list)) or len(result) != 2:  # noqa: PLR2004 - a pair
                return result  # no pair: JAX refuses it in its own words
            value, aux = result
        if isinstance(value, Weighted):
            return value.total, (value.weight, aux)
        return value, (None, aux)

    return loss_in_parts


def ratio(total: Any, weight: Any) -> Any:
    """``total / weight``, and 0 where nothing was weighed; what is no array (a gradient of integers) stays as it is."""
    if not isinstance(total, jax.Array) or total.dtype == jax.dtypes.float0:
        return total
    quotient = total / jnp.where(weight == 0, 1, weight).astype(total.dtype)
    return typed(quotient, quotient.dtype, weak=is_weak(total))


def ratios(aux: Any) -> Any:
    """``aux`` with each `Weighted` in it as its value."""
    return jax.tree.map(
        lambda leaf: ratio(_inexact(leaf.total), leaf.weight) if is_weighted(leaf) else leaf, aux, is_leaf=is_weighted
    )


def of_whole_batch(parts: Any, gradients: Any) -> tuple[Any, Any, Any]:
    """Value, aux and gradients of one batch that was taken whole."""
    value, (weight, aux) = parts
    if weight is None:
        return value, ratios(aux), gradients
    return ratio(value, weight), ratios(aux), jax.tree.map(lambda leaf: ratio(leaf, weight), gradients)


def _inexact(total: Any) -> Any:
    return total if jnp.issubdtype(total.dtype, jnp.inexact) else total.astype(jnp.float32)


# What only brings an array elsewhere or into another shape, of whatever dtype it is.
MOVES = {
    "broadcast_in_dim", "copy", "dynamic_slice", "gather", "mesh_cast", "name", "reshape", "reshard", "rev", "slice", "squeeze",
    "stop_gradient", "transpose",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCall:
    """One gradient as a function of a batch or of a microbatch, its arguments pure trees of arrays.

    Attributes:
        name: The loss's own name.
        differentiate: ``(args, kwargs) -> ((scalar, (weight or None, aux)), gradients)``.
        evaluate: ``(args, kwargs) -> ((scalar, (weight or None, aux)), state)``, nothing differentiated.
    """

    name: str
    differentiate: Callable[[Any, Any], Any]
    evaluate: Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where array ``index`` of a result belongs."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """What a gradient call gave over microbatches.

    Attributes:
        parts: ``(scalar, (weight or None, aux))``, each array with a leading dimension of one entry a microbatch.
        gradients: Their sums, in float32 where they have 16 and fewer bits.
        types: What the gradients' own arrays are like, in flattening order.
        program: What computes one microbatch, as traced.
    """

    parts: Any
    gradients: Any
    types: Sequence[Any]
    program: Any = field(repr=False)


def accumulate(call: GradientCall, batch: SplitCall, count: int, key_of: KeyOf = folded) -> Accumulated:
    """The call's results over ``count`` microbatches: gradients summed, everything else stacked."""

    def one(number: Any, *arrays: Any) -> Any:
        args, kwargs = batch.microbatch(arrays, number, count, key_of)
        return call.differentiate(args, kwargs)

    traced, join = trace(one, [jnp.int32(0), *batch.arrays])
    avals = cast("Sequence[Any]", traced.out_avals)
    slots = join([Slot(index) for index in range(len(avals))])
    nothing = {
        i: np.zeros(a.shape, a.dtype) for i, a in enumerate(avals) if a.dtype == jax.dtypes.float0
    }  # of integers
    summed = {slot.index for slot in _slots(slots[1])} - set(nothing)

    def body(sums: dict[int, Any], number: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        values = evaluate_closed(traced, [number, *batch.arrays])
        sums = {i: total + values[i].astype(total.dtype) for i, total in sums.items()}
        return sums, {i: value for i, value in enumerate(values) if i not in {*summed, *nothing}}

    zeros = {i: zeros_like(aval) for i, aval in enumerate(avals) if i in summed}
    sums, stacks = jax.lax.scan(body, zeros, jnp.arange(count, dtype=jnp.int32))
    filled = {**sums, **stacks, **nothing}
    parts, gradients = join([filled[i] for i in range(len(filled))])
    types = [avals[slot.index] for slot in _slots(slots[1]) if slot.index in summed]
    return Accumulated(parts=parts, gradients=gradients, types=types, program=traced)


def coarsest(program: Any) -> Any:
    """The floating dtype with the fewest bits among all that a closed jaxpr computes, float64 where it computes none."""
    return _coarsest(open_jaxpr(program))


def _coarsest(jaxpr: Any) -> Any:
    found = [
        var.aval.dtype
        for eqn in jaxpr.eqns
        for var in eqn.outvars
        if eqn.primitive.name not in {*MOVES, "bitcast_convert_type"}  # nothing is rounded there
        and jnp.issubdtype(getattr(var.aval, "dtype", np.int32), jnp.floating)
    ]
    found += [_coarsest(body) for eqn in jaxpr.eqns for body in subjaxprs(eqn)]
    return min(found, key=lambda dtype: jnp.finfo(dtype).bits, default=np.dtype("float64"))


def _slots(tree: Any) -> list[Slot]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Slot)]


def wide(dtype: Any) -> Any:
    """A dtype to add up in: float32 for floating ones of fewer bits, else the same."""
    few = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(jnp.float32).bits
    return jnp.dtype("float32") if few else dtype


def zeros_like(aval: Any) -> jax.Array:
    """A sum that nothing was added to yet, where the gradient is."""
    dtype = wide(aval.dtype)
    place = getattr(aval, "sharding", None)
    explicit = place is not None and not place.mesh.empty and AxisType.Explicit in place.mesh.axis_types
    zeros = jax.lax.full(aval.shape, 0, dtype, **({"sharding": place} if explicit else {}))
    varying = tuple(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))  # axes of a shard_map around
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros


def joined(call: GradientCall, batch: SplitCall, count: int, done: Accumulated) -> tuple[Any, Any, Any]:
    """Value, aux and gradients of the whole batch from those of its microbatches.

    Args:
        call: What was accumulated; its loss is traced once on the whole batch where aux has arrays.
        batch: The whole batch.
        count: Number of microbatches.
        done: What `accumulate` gave.

    Raises:
        PolicyError: an entry of aux that can't be joined.
    """
    values, (weights, aux) = done.parts
    aux = _joined_aux(call, batch, count, aux)
    if weights is None:
        gradients = jax.tree.map(lambda leaf: _over(leaf, count), done.gradients)
        return _mean(values), aux, narrowed(gradients, done.types)
    weight = weights.sum(0)
    gradients = jax.tree.map(lambda leaf: ratio(leaf, weight), done.gradients)
    total = typed(values.sum(0), values.dtype, weak=is_weak(values))
    return ratio(total, weight), aux, narrowed(gradients, done.types)


def _over(total: Any, count: int) -> Any:
    return total / count if isinstance(total, jax.Array) else total


def _mean(several: jax.Array) -> jax.Array:
    return typed(several.mean(0), several.dtype, weak=is_weak(several))


def narrowed(gradients: Any, types: Sequence[Any]) -> Any:
    """Gradients in the dtypes that they have without microbatches, weak ones weakly, in flattening order."""
    arrays, join = split_arrays(gradients)
    return join([typed(array, like.dtype, weak=is_weak(like)) for array, like in zip(arrays, types, strict=True)])


def _joined_aux(call: GradientCall, batch: SplitCall, count: int, aux: Any) -> Any:
    """Scalars as means, weighted values exactly, arrays with one entry a row in the order of the batch."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(aux, is_leaf=is_weighted)
    scales = [isinstance(leaf, jax.Array) and leaf.ndim > 1 for _, leaf in flat]
    full: list[Any] = [None] * len(flat)
    if any(scales):

        def of_whole(*arrays: Any) -> Any:
            (_, (_, found)), _ = call.evaluate(*batch.join(arrays))
            return found

        whole_batch, join = trace(of_whole, batch.arrays)
        full = jax.tree.leaves(join(whole_batch.out_avals), is_leaf=is_weighted)
    joined_leaves = [
        _joined_leaf(leaf, whole, f"aux{jax.tree_util.keystr(path)}", batch.rows, count)
        for (path, leaf), whole in zip(flat, full, strict=True)
    ]
    return ratios(jax.tree.unflatten(treedef, joined_leaves))


def in_order(several: jax.Array) -> jax.Array:
    """What the microbatches gave for their rows, in the order of the batch."""
    return jnp.moveaxis(several, 0, 1).reshape(-1, *several.shape[2:])


def _joined_leaf(leaf: Any, whole: Any, path: str, rows: int, count: int) -> Any:
    if isinstance(leaf, Weighted):
        return Weighted(total=leaf.total.sum(0), weight=leaf.weight.sum(0))
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _mean(leaf)
    each = rows // count
    if leaf.ndim > 1 and leaf.shape[1] == each and whole is not None and whole.shape == (rows, *leaf.shape[2:]):
        return in_order(leaf)
    msg = (
        f"microbatches={count}: {path} is {leaf.dtype}[{','.join(map(str, leaf.shape[1:]))}] for a microbatch of {each} rows, "
        "and how to join those of all microbatches is not known. Expected a floating scalar (their mean is taken), an array "
        f"whose leading dimension is the batch's, or {advise('loss.weighted', arguments='sum, weight')}. Statistics of a whole "
        "batch, such as those of "
        "BatchNorm, are other numbers for microbatches: take this gradient without microbatches."
    )
    raise PolicyError(msg)
