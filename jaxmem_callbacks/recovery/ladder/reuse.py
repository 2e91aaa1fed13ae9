"""Whether a step really writes its new state into the memory of the old one: addresses before and after enter, bytes leave.

A compiled program can alias every array, and the runtime copy each all the same, where something outside of it holds the memory.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmem_callbacks._compat.array_parts import parts_of
from jaxmem_callbacks.programs.steps.program import Program

Addresses = list[tuple[int, frozenset[tuple[int, int]]]]
ENOUGH = 0.95  # of what the program reuses


def addresses(state: Any) -> Addresses:
    """For each array its bytes on one device, and where it lies on each; none where the platform does not tell."""
    found: Addresses = []
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        try:
            parts = parts_of(leaf)
            places = frozenset((part.device.id, part.unsafe_buffer_pointer()) for part in parts)
            found.append((parts[0].nbytes if parts else 0, places))
        except (AttributeError, RuntimeError, NotImplementedError, ValueError):
            found.append((0, frozenset()))
    return found


def reused_bytes(before: Addresses, after: Addresses) -> int | None:
    """Bytes on one device of the old state whose memory holds the new one; None where no address is known."""
    if not any(places for _, places in before):
        return None
    taken = frozenset[tuple[int, int]]().union(*(places for _, places in after))
    return sum(size for size, places in before if places and places <= taken)


def promised_bytes(program: Program | None) -> int:
    """Bytes on one device of the first argument that the compiled program reuses; 0 where nothing was compiled."""
    if program is None or not program.uses:
        return 0
    state = program.uses[0].argument
    return sum(use.bytes for use in program.uses if use.argument == state and use.requested and use.aliased)
