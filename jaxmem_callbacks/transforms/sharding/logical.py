"""One array's axis names and rules enter; mesh axes for each dimension leave, or an error that names the array.

The order is Flax's: rules in their order, each mesh axis once; then names that are mesh axes themselves. What the user wrote must
divide; rules that this package ships are tried only where they do.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import MeshAxes, ShardingRules
from jaxmem_callbacks.transforms.sharding.axes import MeshRoles, axis_names
from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf

_ALIKE = 0.85


def named_axes(
    leaf: StateLeaf, roles: MeshRoles, *, given: ShardingRules, shipped: ShardingRules
) -> list[MeshAxes] | None:
    """Mesh axes for each dimension of an annotated array; None where the names mean nothing on this mesh.

    Args:
        leaf: The array with its annotation.
        roles: The mesh.
        given: The user's rules of the policy; those of the annotation come before them.
        shipped: Rules that are tried where nothing else says a dimension.

    Raises:
        PolicyError: an axis that the mesh has not, a dimension that does not divide, one axis for two dimensions. Never for
            optimizer state, whose wrappers copy the words on another array.
    """
    names = _names(leaf)
    if names is None:
        return None
    found: dict[int, MeshAxes] = {index: None for index, name in enumerate(names) if name is None}
    for name, axes in (*(leaf.annotation.rules if leaf.annotation else ()), *given):
        index = _first_free(names, name, found)
        if index is not None and (axes is None or _is_free(axes, found)):
            _put(leaf, roles, found, index, axes, f"the rule {name!r} -> {axes!r}")
    for index, name in enumerate(names):
        if index not in found and name is not None and _are_axes(name, roles):
            _put(leaf, roles, found, index, name, f"its annotation {name!r}")
    for name, axes in shipped:
        index = _first_free(names, name, found)
        if index is None or axes is None or not _is_free(axes, found):
            continue
        if leaf.shape[index] % roles.size(axes) == 0:
            found[index] = axes
    known = any(name is not None and index in found for index, name in enumerate(names))
    if not known and any(name is not None for name in names):
        return None
    return [found.get(index) for index in range(len(leaf.shape))]


def require_met(rules: ShardingRules, leaves: Sequence[StateLeaf]) -> None:
    """Refuse the user's rules where none of them names an axis of the state, or one is misspelt.

    Raises:
        PolicyError: with the names that are there.
    """
    there = {name for leaf in leaves if leaf.annotation for name in leaf.annotation.names if isinstance(name, str)}
    named = {name for name, _ in rules}
    if not named & there:
        names = (
            f"its arrays' axes are called {', '.join(sorted(there))}" if there else "none of its arrays names its axes"
        )
        msg = (
            f"The sharding rules {', '.join(sorted(named))} would do nothing: {names}. Expected rules for names that the model "
            "gives by nnx.with_partitioning, nn.with_logical_partitioning or the like; without any, use sharding='fsdp'."
        )
        raise PolicyError(msg)
    for name in sorted(named - there):
        near = [other for other in sorted(there - named) if _is_misspelt(name, other)]
        if near:
            axes = next(value for own, value in rules if own == name)
            msg = (
                f"The sharding rule {name!r} names no axis of the state. Did you mean {near[0]!r}? Its arrays' axes "
                f"are called {', '.join(sorted(there))}. Type sharding={{..., {near[0]!r}: {axes!r}}}."
            )
            raise PolicyError(msg)


def _is_misspelt(name: str, other: str) -> bool:
    """Letters swapped, or one of many wrong; ``heads`` is no misspelt ``kv_heads``."""
    return sorted(name) == sorted(other) or difflib.SequenceMatcher(None, name, other).ratio() >= _ALIKE


def _names(leaf: StateLeaf) -> list[Any] | None:
    """The names, padded to the array's dimensions; None where nothing was said."""
    if leaf.annotation is None:
        return None
    names = list(leaf.annotation.names)
    if len(names) > len(leaf.shape):
        if leaf.is_optimizer:
            return None
        msg = (
            f"{_where(leaf)} is annotated with {len(names)} axis names, {tuple(names)!r}, and has {len(leaf.shape)} dimensions. "
            "Expected one name (or None) a dimension: change the annotation."
        )
        raise PolicyError(msg)
    return names + [None] * (len(leaf.shape) - len(names))


def _first_free(names: Sequence[Any], name: str, found: dict[int, MeshAxes]) -> int | None:
    return next((index for index, own in enumerate(names) if own == name and index not in found), None)


def _is_free(axes: MeshAxes, found: dict[int, MeshAxes]) -> bool:
    used = {axis for value in found.values() for axis in axis_names(value)}
    return used.isdisjoint(axis_names(axes))


def _are_axes(name: Any, roles: MeshRoles) -> bool:
    return all(axis in roles.sizes for axis in axis_names(name)) if isinstance(name, str | tuple) else False


def _put(  # noqa: PLR0913, PLR0917 - what is decided, for whom, and in whose words
    leaf: StateLeaf, roles: MeshRoles, found: dict[int, MeshAxes], index: int, axes: MeshAxes, words: str
) -> None:
    """Give a dimension what the user said, or refuse it."""
    wrong = _wrong(leaf, roles, found, index, axes)
    if wrong is None:
        found[index] = axes
    elif not leaf.is_optimizer:
        msg = f"{_where(leaf)} cannot be sharded as {words} says for dimension {index}: {wrong}"
        raise PolicyError(msg)


def _wrong(leaf: StateLeaf, roles: MeshRoles, found: dict[int, MeshAxes], index: int, axes: MeshAxes) -> str | None:
    """What is wrong with it, and what to change; None where nothing is."""
    there = ", ".join(f"{name}={size}" for name, size in roles.sizes.items())
    missing = [axis for axis in axis_names(axes) if axis not in roles.sizes]
    if missing:
        return f"the mesh has no axis {missing[0]!r}, only {there}. Name one of these, or None."
    if not _is_free(axes, found):
        return f"{axes!r} already shards another dimension. Name each mesh axis once an array."
    size = roles.size(axis_names(axes))
    if leaf.shape[index] % size:
        return (
            f"its size {leaf.shape[index]} does not divide by {size} devices (mesh {there}). Make it a multiple of {size}, "
            "change the mesh, or say None."
        )
    return None


def _where(leaf: StateLeaf) -> str:
    return f"state{leaf.path} of shape {list(leaf.shape)}"
