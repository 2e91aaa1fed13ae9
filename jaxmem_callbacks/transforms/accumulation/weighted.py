"""Losses that say what they sum and what they divide by, so that microbatches add up to exactly the whole batch.

A loss's result enters; it leaves as ``(scalar to differentiate, (weight or None, aux))``, and later as value and gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse
from jaxmem_callbacks.records.errors import LossRefusedError
from jaxmem_callbacks.transforms.weak_types import is_weak, typed

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
    """The value ``total / weight`` of a batch, said in a way that microbatches can add up exactly.

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
                return result  # no pair: JAX says so in its own words
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


def whole(parts: Any, gradients: Any) -> tuple[Any, Any, Any]:
    """Value, aux and gradients of one batch that was taken whole."""
    value, (weight, aux) = parts
    if weight is None:
        return value, ratios(aux), gradients
    return ratio(value, weight), ratios(aux), jax.tree.map(lambda leaf: ratio(leaf, weight), gradients)


def _inexact(total: Any) -> Any:
    return total if jnp.issubdtype(total.dtype, jnp.inexact) else total.astype(jnp.float32)
