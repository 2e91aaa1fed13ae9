"""The arrays of a call and its policy enter; a sentence each for large ones that every device holds whole leaves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax

from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import PARAMETERS

_LARGE_BYTES = 2**20
_LARGE_SHARE = 0.01  # of what one device holds of all arguments
_NAMED = 3


def replicated(leaves: Sequence[Leaf], policy: StepPolicy) -> tuple[str, ...]:
    """Those that a sharding policy leaves whole on several devices, the largest by name.

    Args:
        leaves: The call's arrays.
        policy: One that splits nothing is not asked to; under ``zero1`` parameters are whole on purpose.
    """
    if policy.sharding in (None, "replicate"):
        return ()
    held = sum(_bytes_here(leaf) for leaf in leaves)
    whole = [
        leaf
        for leaf in leaves
        if _copies(leaf.value) > 1
        and _bytes_here(leaf) >= max(_LARGE_BYTES, _LARGE_SHARE * held)
        and not (policy.sharding == "zero1" and leaf.kind == PARAMETERS)
    ]
    whole.sort(key=_bytes_here, reverse=True)
    told = [
        f"{leaf.path} ({leaf.type_text}, {format_bytes(_bytes_here(leaf))}) lies whole on each of {_copies(leaf.value)} devices, "
        f"though sharding={policy.sharding!r}: no dimension of it divides by the mesh, or it was put there so."
        for leaf in whole[:_NAMED]
    ]
    rest = whole[_NAMED:]
    if rest:
        told.append(f"{len(rest)} more arrays of {format_bytes(sum(map(_bytes_here, rest)))} lie whole on each device.")
    return tuple(told)


def _sharding(value: Any) -> Any:
    sharding = getattr(value, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def _copies(value: Any) -> int:
    """On how many devices an array lies whole; 1 where it is split or lies nowhere yet."""
    sharding = _sharding(value)
    return sharding.num_devices if sharding is not None and sharding.is_fully_replicated else 1


def _bytes_here(leaf: Leaf) -> int:
    """What one device holds of it."""
    sharding = _sharding(leaf.value)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return prod(shape) * getattr(leaf.dtype, "itemsize", 0)
