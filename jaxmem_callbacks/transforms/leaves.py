"""Arguments and results as traced arrays and everything else; JAX's weak types."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
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


def split(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a pytree, and the function that puts others in their place.

    Args:
        tree: Any pytree.
        is_leaf: What travels with the arrays and is not looked into, such as a framework's own objects.

    Returns:
        The arrays in flattening order, and ``join(arrays)`` giving the pytree back.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) or (is_leaf is not None and is_leaf(leaf))
    ]

    found = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # a tracer kept here would outlive its trace, which `jax.checking_leaks()` calls a leak

    def join(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(treedef, filled)

    return found, join


class Result:
    """The results of one traced call: its arrays are traced, the rest is carried past the trace."""

    def __init__(self) -> None:
        self._join: Callable[[Sequence[Any]], Any] | None = None

    def split(self, result: Any) -> list[jax.Array]:
        """Keep everything but the arrays, and return those."""
        arrays, self._join = split(result)
        return arrays

    def join(self, arrays: Sequence[Any]) -> Any:
        """The user's result with these arrays in it."""
        assert self._join is not None
        return self._join(arrays)


def traced_dtype(leaf: Any) -> Any:
    """The dtype that an array has in a trace: NumPy's 64 bits are 32 there, unless JAX was told otherwise.

    JAX turns a NumPy array without a word, and warns where a shape asks for 64 bits.
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype
    with contextlib.suppress(TypeError):  # text and objects, which no trace takes
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf.dtype
