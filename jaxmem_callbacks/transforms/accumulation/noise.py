"""Random keys whose noise belongs to rows: a batch and its microbatches draw the same numbers for the same rows.

Only the check of an accumulated gradient against a full one uses them. With ordinary keys the two draw different dropout
masks and can't be compared. The key's data say which rows it serves; arrays with one entry a row get the row's own bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

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
