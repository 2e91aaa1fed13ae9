"""The parts of a sharded array, one a device, without leaving anything behind.

JAX's public ways (``addressable_shards``, ``addressable_data``) make the parts once and keep them with the array, and
``jax.live_arrays()`` counts them from then on. A clone shares the array's memory, donation included, and its parts go
with it. Where arrays cannot be cloned there are no parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def parts_of(array: jax.Array) -> Sequence[Any]:
    """The array on each local device; none where that cannot be said."""
    if len(array.sharding.device_set) == 1:
        return (array,)
    try:
        clone: Any = array
        return tuple(clone.clone()._arrays)  # noqa: SLF001 - there is no public one
    except (AttributeError, RuntimeError):
        return ()


def clone_of(array: jax.Array) -> jax.Array:
    """A second handle on the array's memory, which takes with it what reading leaves behind; the array itself where none is."""
    try:
        clone: Any = array
        return clone.clone()
    except (AttributeError, RuntimeError):
        return array
