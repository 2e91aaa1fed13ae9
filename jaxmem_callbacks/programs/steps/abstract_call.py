"""A step's call enters; the same call by shapes leaves, which holds no array: to trace and compile the step again later.

Static arguments and Python numbers stay as they are; NNX modules and optimizers become copies around shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.leaves import traced_dtype


@dataclass(frozen=True, slots=True)
class AbstractCall:
    """Arguments of a call, each array by its shape, dtype and named sharding."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def abstract_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractCall | None:
    """The call without its arrays; deleted ones still know their shapes. None where a tree cannot be made again."""
    try:
        framework = framework_of(args, kwargs)
        if framework is None:
            return AbstractCall(*jax.tree.map(abstract, (args, kwargs)))
        arrays, join = framework.apart((args, kwargs))
        return AbstractCall(*join([abstract(array) for array in arrays]))
    except Exception:  # noqa: BLE001 - what is only kept for a report must not stop a step that works
        return None


def has_real_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every leaf of a call has a value, not only a shape: an array donated to an earlier call has none."""
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(each, (Tracer, jax.ShapeDtypeStruct)) or framework_of(each) is not None for each in leaves):
        return False
    return not any(isinstance(each, jax.Array) and each.is_deleted() for each in leaves)


def abstract(leaf: Any) -> Any:
    """An array by its shape, dtype and named sharding; anything else as it is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    place = getattr(leaf, "sharding", None)
    named = place if isinstance(place, jax.sharding.NamedSharding) else None
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf), sharding=named, weak_type=weak)
