"""Snapshots: a copy of a training state in host memory, which comes back as often as needed, placed as it was.

Sharding, memory kind, layout, weak type and whether it was committed come back with it. Memory that comes back belongs to XLA
alone: a CPU client would take NumPy's own memory for the array where that is aligned to 64 bytes, then copy it when it is
donated, and so hold it twice; the copies here are aligned to 16 only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from jaxmem_callbacks._compat.array_parts import clone_of
from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import is_weak, typed

_ALIGNMENT, _OFFSET = 64, 16
_Place = tuple[tuple[int, int], ...]


@final
class HostSnapshot:
    """A state as it was before a step.

    Args:
        step: That step.
        state: A tree of arrays; it is read and stays as it is.

    Raises:
        RecoveryError: objects that are updated in place, or an array that is gone.
    """

    def __init__(self, step: int, state: Any) -> None:
        refuse_objects(state)
        self.step = step
        leaves, self._tree = jax.tree.flatten(state)
        self._leaves = [HostLeaf.of(leaf) for leaf in leaves]
        self.shapes = jax.tree.map(shape_of, state)

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        return sum(leaf.bytes for leaf in self._leaves)

    @property
    def structure(self) -> Any:
        """Of its tree."""
        return self._tree

    @property
    def is_whole(self) -> bool:
        """Whether this process alone has every part of every array."""
        return all(leaf.is_whole for leaf in self._leaves)

    def restore(self) -> Any:
        """The state on the devices, in memory of its own."""
        return jax.tree.unflatten(self._tree, [leaf.restore() for leaf in self._leaves])

    def on_host(self) -> Any:
        """The state as NumPy arrays, for writing, random keys as their integers; only where it is whole."""
        return jax.tree.unflatten(self._tree, [leaf.on_host() for leaf in self._leaves])


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """One array: its parts, by their place in it, and what it was besides."""

    parts: dict[_Place, Any]
    like: Any  # shape, dtype and sharding; the value itself for what is no array of JAX
    remake: Callable[[Any], Any]
    committed: bool = True

    @classmethod
    def of(cls, leaf: Any) -> HostLeaf:
        """A copy of one leaf.

        Raises:
            RecoveryError: an array that was donated or deleted.
        """
        if not isinstance(leaf, jax.Array):
            return cls({}, copy.deepcopy(leaf), copy.deepcopy)
        if leaf.is_deleted():
            msg = (
                f"The state or batch given to Recovery holds an array that is deleted ({leaf.dtype}{list(leaf.shape)}), most "
                "likely donated to a step before. Expected the state that the last step returned: "
                "state, metrics = recovery.step(i, state)."
            )
            raise RecoveryError(msg)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return _key_leaf(leaf)
        handle = clone_of(leaf)
        parts: dict[_Place, Any] = {}
        for shard in handle.addressable_shards:
            place = _place(shard.index, leaf.shape)
            if place not in parts:
                parts[place] = apart(np.asarray(shard.data))
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return cls(parts, like, _as_it_was(leaf), bool(getattr(leaf, "committed", True)))

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        if isinstance(self.like, np.ndarray):
            return self.like.nbytes
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_whole(self) -> bool:
        """Whether the parts are all there is."""
        return not self.parts or sum(part.size for part in self.parts.values()) == math.prod(self.like.shape)

    def restore(self) -> Any:
        """The array, placed as it was."""
        if not self.parts:
            return self.remake(self.like)
        if not self.committed:
            (part,) = self.parts.values()
            return self.remake(jax.device_put(part))
        shape = self.like.shape
        return self.remake(
            jax.make_array_from_callback(shape, self.like.sharding, lambda index: self.parts[_place(index, shape)])
        )

    def on_host(self) -> Any:
        """The whole array in NumPy; what is no array as it is."""
        if not self.parts:
            return self.remake(self.like)
        shape: tuple[int, ...] = self.like.shape
        first = next(iter(self.parts.values()))
        whole = np.empty(shape, first.dtype)
        for place, part in self.parts.items():
            whole[tuple(slice(*ends) for ends in place)] = part
        return whole


def own_copy(leaf: Any, like: Any) -> Any:
    """An array that came from elsewhere, such as a checkpoint, in memory that is XLA's own and with the type of another one."""
    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    held = HostLeaf.of(leaf)
    committed = bool(getattr(like, "committed", True)) or len(leaf.sharding.device_set) > 1
    remake = _as_it_was(like) if isinstance(like, jax.Array) else held.remake
    return HostLeaf(held.parts, held.like, remake, committed).restore()


def apart(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy in memory that no client of XLA takes for its own."""
    room = np.empty(values.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT + _OFFSET
    own = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    own[...] = values
    return own


def refuse_objects(state: Any) -> None:
    """Objects that are updated in place have no copy to go back to.

    Raises:
        RecoveryError: with the two lines that make a tree of them.
    """
    framework = framework_of(state)
    if framework is not None:
        msg = (
            f"Recovery got a state with objects of {framework.NAME}, which a step updates in place. Expected a tree of arrays "
            "that the step takes and returns: nnx.split of model and optimizer gives it before the loop; in the step nnx.merge "
            "makes them of it, and nnx.state is what it returns."
        )
        raise RecoveryError(msg)


def shape_of(leaf: Any) -> Any:
    """Shape, type and place of an array, also of a random key; what is no array as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak(leaf))


def _key_leaf(key: jax.Array) -> HostLeaf:
    """A random key's integers, which come back as a key of the same kind."""
    kind, held = jax.random.key_impl(key), HostLeaf.of(jax.random.key_data(key))
    committed = bool(getattr(key, "committed", True))
    return HostLeaf(held.parts, held.like, lambda data: jax.random.wrap_key_data(data, impl=kind), committed)


def _as_it_was(array: jax.Array) -> Callable[[Any], Any]:
    """Weak type and layout, which placing alone does not bring back."""
    weak, form = is_weak(array), getattr(array, "format", None)
    layout = getattr(form, "layout", None)

    def remake(fresh: jax.Array) -> jax.Array:
        if layout is not None and getattr(getattr(fresh, "format", None), "layout", None) != layout:
            fresh = jax.device_put(fresh, form)
        return typed(fresh, fresh.dtype, weak=True) if weak else fresh

    return remake


def _place(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Place:
    assert index is not None  # JAX's types say so of callbacks
    return tuple(
        (start, stop) for start, stop, _ in (one.indices(size) for one, size in zip(index, shape, strict=True))
    )
