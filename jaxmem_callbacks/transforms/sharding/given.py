"""Where arrays are to lie, as the user said it, enters; it passes, or is refused before anything is placed or traced."""

from __future__ import annotations

from typing import Any

import jax

from jaxmem_callbacks.records.arguments import refuse


def require_shardings(call: str, name: str, tree: Any) -> None:
    """Refuse a tree with something in it that says no place: no sharding, device, format or memory of JAX's.

    Raises:
        TypeError: as `refuse` words it.
    """
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.sharding.Sharding | jax.Device) and not type(leaf).__module__.startswith("jax"):
            refuse(call, name, leaf, "None, a sharding such as a jax.sharding.NamedSharding, or a tree of shardings")
