"""JAX's weak types, those of ``jnp.asarray(1.5)``: an array and what it should be like enter, the array with that type leaves.

A gradient has its parameter's weak type. Were it lost, the parameter would be another type after one update, and the step be
traced and compiled again.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import primitives


def is_weak(array: Any) -> bool:
    """Whether an array's dtype gives way to any other's; also of shapes and of what tracing knows."""
    return bool(getattr(array, "weak_type", False))


def typed(array: jax.Array, dtype: Any, *, weak: bool) -> jax.Array:
    """The array in a dtype, weakly or not."""
    if array.dtype == dtype and is_weak(array) == weak:
        return array
    if not weak:
        return jax.lax.convert_element_type(array, dtype)
    return primitives.convert_element_type_p.bind(array, new_dtype=dtype, weak_type=True, sharding=None)
