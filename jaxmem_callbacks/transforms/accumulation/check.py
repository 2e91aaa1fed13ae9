"""Does accumulation leave a loss's gradient as it is? Asked of a few real rows, once for each new signature of a step.

A traced gradient call enters; the relative difference between one full and one accumulated gradient leaves, as an array that
is computed where the data are. Besides the rows as they are, variants of them are compared, because a first batch need not show
what later ones have: each row repeated, and half of every second microbatch's entries masked as 0, as -100 and as each number
that the loss compares something with.
For a loss that is a mean over rows of what each row determines alone, the two gradients are equal on any data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms import leaves
from jaxmem_callbacks.transforms.accumulation.accumulate import (
    Accumulated,
    GradientCall,
    Whole,
    accumulate,
    explicit_place,
)
from jaxmem_callbacks.transforms.accumulation.batch import KEY, ROWS, is_key
from jaxmem_callbacks.transforms.accumulation.noise import shared_key
from jaxmem_callbacks.transforms.accumulation.padding import compared_with
from jaxmem_callbacks.transforms.accumulation.weighted import is_weighted

# Largest relative difference that rounding explains, by the bits of the coarsest dtype that the loss computes with.
TOLERANCE = {64: 1e-6, 32: 1e-4, 16: 3e-2, 8: 2e-1}
_MASKS = (0, -100)
_ROWS_EACH = 2
_ROWS_OF_NOISE = 5  # a number that hardly any other dimension has: noise is told by it to belong to rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One full against one accumulated gradient, still to be read.

    Attributes:
        name: The loss's name.
        count: Microbatches asked for.
        rows: Rows compared.
        what: What each column is: the gradient, the value, entries of aux.
        tolerance: What rounding explains.
        masks: What some rows were masked with, in the variants after the first two.
        differences: Relative, one row a variant.
    """

    name: str
    count: int
    rows: int
    what: tuple[str, ...]
    tolerance: float
    masks: tuple[int, ...] = _MASKS
    differences: Any = field(repr=False)

    @property
    def variants(self) -> tuple[str, ...]:
        """What was compared, in the order of the rows of ``differences``."""
        masked = (f"with {mask or 'zeros'} in some rows" for mask in self.masks)
        return ("on rows of this batch", "on rows of this batch, each repeated", *masked)


def compare(call: GradientCall, batch: Whole, count: int, program: Any, shards: int = 1) -> Comparison:
    """Trace the comparison for a loss that returned a plain scalar.

    Args:
        call: The gradient to take.
        batch: Its arguments.
        count: Microbatches asked for.
        program: The gradient of one microbatch, traced.
        shards: Devices that the step runs on; every microbatch keeps a row for each.
    """
    available = batch.rows // count
    wanted = _ROWS_OF_NOISE if KEY in batch.roles else _ROWS_EACH
    each = min(shards * math.ceil(wanted / shards), available)
    few = max(2, min(count, available // each))
    rows = few * each
    masks = tuple(dict.fromkeys((*_MASKS, *compared_with(program))))
    variants = [_variants(array, role, rows, few, masks) for array, role in zip(batch.arrays, batch.roles, strict=True)]
    varied = [i for i, role in enumerate(batch.roles) if role == ROWS]
    told: dict[str, Any] = {}

    def one(stacked: dict[int, Any]) -> jax.Array:
        arrays = [stacked.get(i, array) for i, array in enumerate(batch.arrays)]
        small = batch.replaced(arrays, rows)
        whole = [
            _noise(array, 0, 1, rows) if role == KEY else array for array, role in zip(arrays, batch.roles, strict=True)
        ]
        full = call.differentiate(*batch.join(whole))
        done = accumulate(call, small, few, lambda key, number: _noise(key, number, few, rows // few))
        told["what"], columns = _distances(full, done, few)
        told["coarsest"] = done.coarsest
        return jnp.stack(columns)

    with jax.default_matmul_precision("highest"):
        differences = jax.lax.map(one, {i: variants[i] for i in varied})
    tolerance = TOLERANCE.get(jnp.finfo(told["coarsest"]).bits, TOLERANCE[8])
    return Comparison(
        name=call.name,
        count=count,
        rows=rows,
        what=told["what"],
        tolerance=tolerance,
        masks=masks,
        differences=differences,
    )


def _noise(key: jax.Array, first: Any, stride: int, rows: int) -> jax.Array:
    """Stands for one of the user's keys, typed or ``uint32``."""
    like = key if is_key(key) else key[..., 0]
    return shared_key(like, first=first, stride=stride, rows=rows)


def _variants(array: jax.Array, role: str, rows: int, few: int, masks: Sequence[int]) -> Any:
    """The rows to compare in all variants, one behind the other; None for what has no rows."""
    if role != ROWS:
        return None
    step = array.shape[0] // rows
    sample = _rows(array, np.arange(rows) * step)
    repeated = _rows(array, np.arange(rows) % few * step)
    if is_key(array):
        return jnp.stack([sample, repeated, *([sample] * len(masks))])
    return jnp.stack([sample, repeated, *(_masked(sample, few, mask) for mask in masks)])


def _rows(array: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Some rows of an array; they lie as all of them do."""
    place = explicit_place(array)
    return array[numbers] if place is None else array.at[numbers].get(out_sharding=place)


def _masked(sample: jax.Array, few: int, mask: int) -> jax.Array:
    """The sample with half of every second microbatch's entries set to what masks and padding look like."""
    if (
        jnp.issubdtype(sample.dtype, jnp.integer)
        and not jnp.iinfo(sample.dtype).min <= mask <= jnp.iinfo(sample.dtype).max
    ):
        mask = 0
    row = np.arange(sample.shape[0])
    inner = math.prod(sample.shape[1:])
    late = np.arange(inner) >= inner / 2 if inner > 1 else np.ones(inner, bool)
    often = (row // few) % 2 == 0 if inner <= 1 else np.ones(sample.shape[0], bool)
    where = (((row % few) % 2 == 1) & often)[:, None] & late
    replaced = jnp.where(
        where.reshape(sample.shape), jnp.asarray(mask != 0 if sample.dtype == bool else mask, sample.dtype), sample
    )
    if sample.dtype == bool or jnp.issubdtype(sample.dtype, jnp.integer):
        return replaced
    # Weights that are alike in the first batch need not be in later ones.
    is_mask = jnp.all((sample == 0) | (sample == 1))
    if sample.size and jnp.issubdtype(sample.dtype, jnp.floating):
        is_mask |= sample.max() == sample.min()
    return jnp.where(is_mask, jnp.abs(jnp.clip(replaced, -1, 1)), sample)


def _distances(full: Any, done: Accumulated, few: int) -> tuple[tuple[str, ...], list[jax.Array]]:
    """The relative distance of the gradients, of the value, and of each entry of aux that has a mean."""
    (value, (_, aux)), gradients = full
    values, (_, auxes) = done.parts
    ours, theirs = (
        [leaf for leaf in leaves.split(tree)[0] if leaf.dtype != jax.dtypes.float0]
        for tree in (done.gradients, gradients)
    )
    size = _norm(theirs)
    apart = _norm([a / few - b.astype(a.dtype) for a, b in zip(ours, theirs, strict=True)])
    what, columns = ["gradient", "loss"], [_relative(apart, size), _mean_distance(values, value)]
    stacked = jax.tree_util.tree_flatten_with_path(auxes, is_leaf=is_weighted)[0]
    for (path, several), one in zip(stacked, jax.tree.leaves(aux, is_leaf=is_weighted), strict=True):
        if isinstance(several, jax.Array) and several.ndim == 1 and jnp.issubdtype(several.dtype, jnp.floating):
            what.append(f"aux{jax.tree_util.keystr(path)}")
            columns.append(_mean_distance(several, one))
    return tuple(what), columns


def _norm(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum((jnp.vdot(a, a).real.astype(jnp.float32) for a in arrays), jnp.float32(0)))


def _mean_distance(several: jax.Array, one: jax.Array) -> jax.Array:
    several, one = several.astype(jnp.float32), one.astype(jnp.float32)
    return _relative(jnp.abs(several.mean() - one), jnp.maximum(jnp.abs(several).max(), jnp.abs(one)))


def _relative(apart: jax.Array, size: jax.Array) -> jax.Array:
    return jnp.where((apart == 0) & (size == 0), 0.0, apart / size).astype(jnp.float32)


def require_equal(comparison: Comparison, differences: Any) -> None:
    """Refuse a loss whose accumulated gradient is another one.

    Args:
        comparison: What was compared.
        differences: Its differences, computed.

    Raises:
        PolicyError: says by how much they differ, and what to write instead.
    """
    found = np.asarray(differences, np.float64).reshape(-1, len(comparison.variants), len(comparison.what)).max(axis=0)
    decided = np.isfinite(found)
    way_out = f"return jm.weighted(loss_sum, weight_sum) in {comparison.name}, which adds up exactly"
    if not decided[0].all():  # the other variants need not be finite: a row may divide by what was masked
        msg = (
            f"microbatches={comparison.count}: whether {comparison.name} may be accumulated could not be checked, because its "
            f"gradient or loss on {comparison.rows} rows of the batch is not finite. Begin with ordinary data, or {way_out}."
        )
        raise PolicyError(msg)
    wrong = np.where(decided, found, 0.0) > comparison.tolerance
    if not wrong.any():
        return
    variant = int(np.argmax(wrong.any(axis=1)))
    column = int(np.argmax(wrong[variant]))
    advice = (
        f"Expected a mean over rows, each computed from that row alone. For a masked mean, {way_out}. A loss or layer that "
        "compares rows with each other (in-batch contrast, BatchNorm, balance of experts) has no microbatches: take it whole, "
        "with remat='full'."
    )
    if comparison.what[column].startswith("aux"):
        advice = "Expected a mean over rows there, an array with one entry a row, or jm.weighted(sum, weight), which is exact."
    msg = (
        f"microbatches={comparison.count} would change the numbers of {comparison.name}: its accumulated "
        f"{comparison.what[column]} differs by {found[variant, column]:.1%} from the full one {comparison.variants[variant]} "
        f"({comparison.rows} rows; {comparison.tolerance:.2%} allowed). {advice}"
    )
    raise PolicyError(msg)
