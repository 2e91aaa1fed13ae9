"""A step that has run for the first time enters; the donated arrays that the runtime copied instead of reusing leave.

The compiled program reuses them, and still the runtime copies where something outside of JAX holds their memory: on a CPU a
NumPy view (`np.asarray`) does. What was really donated is deleted as soon as the step is dispatched; nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.aliases import LeafUse
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.programs.steps.program import Program

_WORTH = 2**20  # bytes of all of them together from which on it is told: a viewed counter is nothing
_WHY = "the runtime copied it, since something outside of JAX holds its memory, such as a NumPy view (np.asarray)"


def tell_copies(name: str, program: Program, leaves: Sequence[Leaf]) -> None:
    """Write the copies of a first run to the registry, where there are any worth telling."""
    copied = _copied(leaves, program.uses)
    if sum(use.bytes for use in copied) < _WORTH:
        return
    registry.record(
        replace(
            program.compilation(name, ()),
            lost=tuple(f"{use.path}: {_WHY}" for use in copied),
            lost_bytes=sum(use.bytes for use in copied),
            has_run=True,
        )
    )


def _copied(leaves: Sequence[Leaf], uses: Sequence[LeafUse]) -> list[LeafUse]:
    """Donated arrays that are still alive after the step was dispatched."""
    return [
        use
        for leaf, use in zip(leaves, uses, strict=True)
        if use.requested and use.aliased and _was_in_place(leaf.value, use) and not leaf.value.is_deleted()
    ]


def _was_in_place(value: object, use: LeafUse) -> bool:
    """Whether an array lay where the program wants it: one without a place of its own is moved there, once."""
    return isinstance(value, jax.Array) and (value.committed or not use.placement)
