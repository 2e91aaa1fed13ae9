"""State shardings enter, as the user pinned them; what jit needs to hold them leaves, or the line that moves the state there.

Nothing is ever moved here: a silent transfer of a state costs its size in memory, which is what users of this package lack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem_callbacks.records.errors import PolicyError


def state_argument(arguments: Sequence[tuple[str, Any]], shardings: Any, function: Callable[..., Any]) -> int:
    """The place of the first argument with the tree of ``shardings``; a single sharding means the first argument.

    Raises:
        PolicyError: no argument has that tree.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return 0
    wanted = jax.tree.structure(shardings)
    for index, (_, value) in enumerate(arguments):
        if jax.tree.structure(value) == wanted:
            return index
    step = getattr(function, "__name__", "the step")
    names = ", ".join(name for name, _ in arguments)
    msg = (
        f"state_shardings has the tree {wanted!s:.200}, and no argument of {step} has it (arguments: {names}). Expected "
        "one sharding per array of the state: jax.tree.map(lambda x: x.sharding, state)."
    )
    raise PolicyError(msg)


def require_placed(name: str, value: Any, shardings: Any) -> None:
    """Refuse a state that lies elsewhere than pinned.

    Raises:
        PolicyError: with the first array that does, and the `jax.device_put` line to type.
    """
    for (path, leaf), wanted in zip(*_pairs(value, shardings), strict=True):
        placed = getattr(leaf, "sharding", None)
        if placed is None or placed.is_equivalent_to(wanted, leaf.ndim):
            continue
        msg = (
            f"{name}{jax.tree_util.keystr(path)} lies as {placed}, expected {wanted} as state_shardings says. It is never "
            f"moved silently. Move it once, before the loop: {name} = jax.device_put({name}, state_shardings)."
        )
        raise PolicyError(msg)


def jit_shardings(index: int, count: int, shardings: Any, results: Any, state: Any) -> dict[str, Any]:
    """``in_shardings`` and ``out_shardings`` that pin the state argument and the result that is its update.

    Args:
        index: The state's place among the ``count`` positional arguments of the program.
        count: How many there are.
        shardings: What the user pinned.
        results: The step's results as shapes.
        state: The state argument itself.
    """
    options: dict[str, Any] = {"in_shardings": tuple(shardings if i == index else None for i in range(count))}
    tree = jax.tree.structure(state)
    if jax.tree.structure(results) == tree:
        options["out_shardings"] = shardings
    elif type(results) in (tuple, list):
        is_state = [jax.tree.structure(element) == tree for element in results]
        if any(is_state):
            first = is_state.index(True)
            options["out_shardings"] = type(results)(shardings if i == first else None for i in range(len(results)))
    return options


def _pairs(value: Any, shardings: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    if isinstance(shardings, jax.sharding.Sharding):
        return leaves, [shardings] * len(leaves)
    return leaves, jax.tree.leaves(shardings)
