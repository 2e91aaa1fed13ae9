"""A call's arrays enter; two donated places that are one buffer raise. Checked once, before a program first runs.

Tied weights and ``ema = params`` are the usual cases. XLA finds them only at run time, and names no argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks._compat.array_parts import parts_of
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.errors import DonationError


def require_unshared(leaves: Sequence[Leaf], function: Callable[..., Any]) -> None:
    """Refuse a call that donates one buffer twice, or donates it and reads it as well.

    Raises:
        DonationError: with both paths and the line that copies one of them.
    """
    first: dict[tuple[int, ...] | int, Leaf] = {}
    for leaf in sorted(leaves, key=lambda leaf: not leaf.donated):
        for key in _buffers(leaf.value):
            other = first.setdefault(key, leaf)
            if other is not leaf and other.donated:
                raise DonationError(_message(other, leaf, function))


def _message(donated: Leaf, other: Leaf, function: Callable[..., Any]) -> str:
    step = getattr(function, "__name__", "the step")
    how = "aliased twice: both are donated" if other.donated else "donated in one place and passed undonated in another"
    return (
        f"{donated.path} and {other.path} of {step} are one and the same buffer ({donated.type_text}), {how}. XLA expects "
        f"each donated buffer once. Copy one before the first step: {other.argument} = jax.tree.map(jnp.copy, "
        f"{other.argument}), or leave it out of donate_argnames."
    )


def _buffers(value: Any) -> list[tuple[int, ...]]:
    """What tells the buffers of an array from others: device and address; nothing for what is no live array."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted() or value.size == 0:
        return []
    try:
        return [(part.device.id, part.unsafe_buffer_pointer()) for part in parts_of(value)] or [(-1, id(value))]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return [(-1, id(value))]  # typed keys and exotic arrays have no address; the object itself still tells
