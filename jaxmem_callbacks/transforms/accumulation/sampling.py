"""A gradient call's batch enters; a few of its rows leave, in variants of what later batches may hold, with keys for them.

A first batch need not show what later ones have. So besides the rows as they are there are variants of them: each row
repeated, and half of every second microbatch's entries masked as 0, as -100 and as each number that the loss compares
something with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem_callbacks.transforms.accumulation.accumulate import Whole, explicit_place
from jaxmem_callbacks.transforms.accumulation.batch import KEY, ROWS, is_key
from jaxmem_callbacks.transforms.accumulation.noise import shared_key
from jaxmem_callbacks.transforms.accumulation.padding import compared_with

_MASKS = (0, -100)
_ROWS_EACH = 2
_ROWS_OF_NOISE = 5  # a number that hardly any other dimension has: noise is told by it to belong to rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Some rows of a batch, for ``few`` microbatches of them.

    Attributes:
        batch: The whole batch.
        rows: Rows taken.
        few: Microbatches that they are divided into.
        masks: What some rows are masked with, in the variants after the first two.
        stacked: By the index of each array that has rows: the rows in all variants, one behind the other.
    """

    batch: Whole
    rows: int
    few: int
    masks: tuple[int, ...]
    stacked: dict[int, jax.Array] = field(repr=False)

    def variant(self, stacked: dict[int, jax.Array]) -> list[Any]:
        """The arrays of the call in one variant: an entry of ``self.stacked``, mapped over."""
        return [stacked.get(i, array) for i, array in enumerate(self.batch.arrays)]

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of one call on all rows; each row has the noise that it has in its microbatch."""
        return [
            _noise(array, 0, 1, self.rows) if role == KEY else array
            for array, role in zip(arrays, self.batch.roles, strict=True)
        ]

    def key(self, key: jax.Array, number: Any) -> jax.Array:
        """Stands for one of the user's keys in microbatch ``number``."""
        return _noise(key, number, self.few, self.rows // self.few)


def sample(batch: Whole, count: int, program: Any, shards: int) -> Sample:
    """A few rows of a batch.

    Args:
        batch: The arguments of a gradient call.
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
    stacked = {
        i: _variants(array, rows, few, masks)
        for i, (array, role) in enumerate(zip(batch.arrays, batch.roles, strict=True))
        if role == ROWS
    }
    return Sample(batch=batch, rows=rows, few=few, masks=masks, stacked=stacked)


def _noise(key: jax.Array, first: Any, stride: int, rows: int) -> jax.Array:
    """Stands for one of the user's keys, typed or ``uint32``."""
    like = key if is_key(key) else key[..., 0]
    return shared_key(like, first=first, stride=stride, rows=rows)


def _variants(array: jax.Array, rows: int, few: int, masks: Sequence[int]) -> jax.Array:
    """The rows to compare in all variants, one behind the other."""
    step = array.shape[0] // rows
    taken = _rows(array, np.arange(rows) * step)
    repeated = _rows(array, np.arange(rows) % few * step)
    if is_key(array):
        return jnp.stack([taken, repeated, *([taken] * len(masks))])
    return jnp.stack([taken, repeated, *(_masked(taken, few, mask) for mask in masks)])


def _rows(array: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Some rows of an array; they lie as all of them do."""
    place = explicit_place(array)
    return array[numbers] if place is None else array.at[numbers].get(out_sharding=place)


def _masked(taken: jax.Array, few: int, mask: int) -> jax.Array:
    """The rows with half of every second microbatch's entries set to what masks and padding look like."""
    if (
        jnp.issubdtype(taken.dtype, jnp.integer)
        and not jnp.iinfo(taken.dtype).min <= mask <= jnp.iinfo(taken.dtype).max
    ):
        mask = 0
    row = np.arange(taken.shape[0])
    inner = math.prod(taken.shape[1:])
    late = np.arange(inner) >= inner / 2 if inner > 1 else np.ones(inner, bool)
    often = (row // few) % 2 == 0 if inner <= 1 else np.ones(taken.shape[0], bool)
    where = (((row % few) % 2 == 1) & often)[:, None] & late
    replaced = jnp.where(
        where.reshape(taken.shape), jnp.asarray(mask != 0 if taken.dtype == bool else mask, taken.dtype), taken
    )
    if taken.dtype == bool or jnp.issubdtype(taken.dtype, jnp.integer):
        return replaced
    # Weights that are alike in the first batch need not be in later ones.
    is_mask = jnp.all((taken == 0) | (taken == 1))
    if taken.size and jnp.issubdtype(taken.dtype, jnp.floating):
        is_mask |= taken.max() == taken.min()
    return jnp.where(is_mask, jnp.abs(jnp.clip(replaced, -1, 1)), taken)
