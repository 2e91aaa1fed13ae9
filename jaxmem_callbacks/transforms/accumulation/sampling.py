"""A few rows of a batch, in variants of what later batches may hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.transforms.accumulation.accumulate import SplitCall, explicit_place
from jaxmem_callbacks.transforms.accumulation.batch import KEY, ROWS, is_key
from jaxmem_callbacks.transforms.tracing import is_variable

_UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def shared_key(like: jax.Array, *, first: Any, stride: int, rows: int) -> jax.Array:
    """A key, or keys, of the shape of ``like`` for the rows ``first``, ``first + stride``, ... of a batch.

    Args:
        like: The user's typed key or keys; only the shape is used.
        first: Row of the batch that is row 0 here.
        stride: Rows of the batch from one row here to the next.
        rows: Rows here.
    """
    salts = jnp.arange(math.prod(like.shape), dtype=jnp.uint32).reshape(*like.shape, 1)
    place = jnp.stack([jnp.asarray(part).astype(jnp.uint32) for part in (first, stride, rows)])
    data = jnp.concatenate([jnp.broadcast_to(place, (*like.shape, 3)), salts], axis=-1)
    return jax.random.wrap_key_data(data, impl=_implementation())


@functools.cache
def _implementation() -> Any:
    """JAX's own interface for new generators; made on first use, because it is JAX's business until then."""
    return define_prng_impl(
        key_shape=(4,), seed=_seed, split=_split, random_bits=_bits, fold_in=_fold_in, name="rows", tag="rows"
    )


def _mix(value: jax.Array) -> jax.Array:
    """A hash of 32 bits; see Wellons' "lowbias32"."""
    value = value.astype(jnp.uint32)
    value = (value ^ (value >> 16)) * jnp.uint32(0x7FEB352D)
    value = (value ^ (value >> 15)) * jnp.uint32(0x846CA68B)
    return value ^ (value >> 16)


def _seed(seed: jax.Array) -> jax.Array:
    """A key that serves no rows: what is drawn from it is the same for a batch and for its microbatches."""
    return jnp.zeros(4, jnp.uint32).at[3].set(_mix(seed))


def _fold_in(data: jax.Array, number: Any) -> jax.Array:
    return data.at[3].set(_mix(data[3] + _mix(jnp.asarray(number)) + jnp.uint32(1)))


def _numbered(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each element, in which a row's elements are those that it has in the whole batch."""
    first, stride, rows, _ = data
    lead, inner = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    row = jnp.arange(lead, dtype=jnp.uint32)
    row = jnp.where(rows == lead, row * stride + first, row)
    return row[:, None] * jnp.uint32(inner) + jnp.arange(inner, dtype=jnp.uint32)


def _split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # `key, other = split(key)` is far more common than one key for each of two rows.
    place = data.at[2].set(0) if shape == (2,) else data
    salts = _mix(_mix(data[3]) + _numbered(place, shape) + jnp.uint32(7)).reshape(*shape, 1)
    return jnp.concatenate([jnp.broadcast_to(data[:3], (*shape, 3)), salts], axis=-1)


def _bits(data: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = _mix(_numbered(data, shape) + _mix(data[3]))
    if width == 64:  # noqa: PLR2004 - bits
        bits = (bits.astype(jnp.uint64) << 32) | _mix(bits)
    return bits.reshape(shape).astype(_UINTS[width])


# Each is one more comparison, of a few rows.
_MOST = 8
# What hands a literal on.
_PASSING = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}


def compared_with(program: Any) -> tuple[int, ...]:
    """Whole numbers that a program compares something with by ``==`` or ``!=``, in order, each once, the first few.

    Args:
        program: A jaxpr, open or closed.
    """
    found: dict[int, None] = {}
    _walk(getattr(program, "jaxpr", program), {}, found)
    return tuple(found)[:_MOST]


def _walk(jaxpr: Any, known: dict[Any, int], found: dict[int, None]) -> None:
    """Through a jaxpr, some of whose inputs are known numbers."""

    def number(atom: Any) -> int | None:
        return known.get(atom) if is_variable(atom) else _whole(atom.val)

    for eqn in jaxpr.eqns:
        values = [number(atom) for atom in eqn.invars]
        if eqn.primitive.name in {"eq", "ne"}:
            found.update((value, None) for value in values if value is not None)
        elif eqn.primitive.name in _PASSING and values[0] is not None:
            known[eqn.outvars[0]] = values[0]
        for body in subjaxprs(eqn):
            inner = getattr(body, "jaxpr", body)
            given = zip(inner.invars, values, strict=False) if len(inner.invars) == len(values) else ()
            _walk(inner, {var: value for var, value in given if value is not None}, found)


def _whole(value: Any) -> int | None:
    array = np.asarray(value)
    return int(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else None


_MASKS = (0, -100)
_ROWS_EACH = 2
_ROWS_OF_NOISE = 5  # a number that hardly any other dimension has: by it noise is known to belong to rows


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

    batch: SplitCall
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


def sample(batch: SplitCall, count: int, program: Any, shards: int) -> Sample:
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
