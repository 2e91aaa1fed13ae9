"""Arguments that waste memory or cannot be called with: replicated arrays, buffers in two places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks._compat.array_parts import parts_of
from jaxmem_callbacks.programs.steps.leaves import Leaf, named_arguments
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import DonationError
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
    warnings = [
        f"{leaf.path} ({leaf.type_text}, {format_bytes(_bytes_here(leaf))}) lies whole on each of {_copies(leaf.value)} devices, "
        f"though sharding={policy.sharding!r}: no dimension of it divides by the mesh, or it was put there so."
        for leaf in whole[:_NAMED]
    ]
    rest = whole[_NAMED:]
    if rest:
        warnings.append(
            f"{len(rest)} more arrays of {format_bytes(sum(map(_bytes_here, rest)))} lie whole on each device."
        )
    return tuple(warnings)


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


_GIVEN_UP = "after the memory was donated"


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


def note_deleted(error: Exception, step: Any, args: Sequence[Any], kwargs: dict[str, Any], *, own_jit: bool) -> None:
    """Add to an error of JAX's on deleted arrays which arguments hold them, and what to write; other errors stay as they are.

    Args:
        error: What a call raised.
        step: The `JitStep` that was called.
        args: Its arguments.
        kwargs: Likewise.
        own_jit: Whether the user jitted it, so that its donation is there.
    """
    notes: list[str] = getattr(error, "__notes__", [])
    if "deleted" not in str(error) or any(_GIVEN_UP in note for note in notes):
        return
    arguments = named_arguments(step.__wrapped__, args, kwargs)
    gone = [name for name, value in arguments if any(map(_is_deleted, jax.tree.leaves(value)))]
    if not gone:
        return
    keep = "make the step with donate_argnames=()"
    if own_jit:
        keep = "leave it out of what the step's jit donates"
    elif step.name.isidentifier():
        keep = advise("donation.nothing", step=step.name)
    error.add_note(
        f"{', '.join(gone)}: passed to {step.name} {_GIVEN_UP}, as by an earlier call of it. Go on with what {step.name} "
        f"returns; to keep what is passed, {keep}"
    )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _message(donated: Leaf, other: Leaf, function: Callable[..., Any]) -> str:
    step = getattr(function, "__name__", "the step")
    how = "aliased twice: both are donated" if other.donated else "donated in one place and passed undonated in another"
    return (
        f"{donated.path} and {other.path} of {step} are one and the same buffer ({donated.type_text}), {how}. XLA expects "
        f"each donated buffer once. Copy one before the first step: "
        f"{advise('donation.copy', state=other.argument)}, or leave it out of what is donated."
    )


def _buffers(value: Any) -> list[tuple[int, ...]]:
    """What identifies the buffers of an array: device and address; nothing for what is no live array."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted() or value.size == 0:
        return []
    try:
        return [(part.device.id, part.unsafe_buffer_pointer()) for part in parts_of(value)] or [(-1, id(value))]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return [(-1, id(value))]  # typed keys and exotic arrays have no address; the object itself identifies it
