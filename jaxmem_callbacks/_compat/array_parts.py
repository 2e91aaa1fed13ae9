"""The parts of an array, one a device, without leaving anything behind.

JAX's public ways (``addressable_shards``, ``addressable_data``, for arrays of ``jax.device_put`` ``unsafe_buffer_pointer`` too)
make the parts once and keep them with the array, and ``jax.live_arrays()`` counts them from then on, also where the array has
one device. A clone shares the array's memory, donation included, and its parts go with it. Where an array of several devices
cannot be cloned there are no parts. While clones live, `live_arrays` leaves them out, on whatever thread it is asked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax

_PATIENCE_S = 1.0
# Reentrant: a handler of a signal, or what the interpreter collects meanwhile, may ask on the thread that holds it.
_listing = threading.RLock()
_clones: dict[int, weakref.ref[Any]] = {}  # by id: clones that are alive, and their parts


def parts_of(array: jax.Array) -> Sequence[Any]:
    """The array on each local device; none where that is unknown."""
    clone = _cloned(array)
    if clone is not None:
        return tuple(clone._arrays)  # noqa: SLF001 - there is no public one
    return (array,) if len(array.sharding.device_set) == 1 else ()


def clone_of(array: jax.Array) -> jax.Array:
    """A second handle on the array's memory, which takes with it what reading leaves behind; the array itself where none is."""
    clone = _cloned(array)
    return array if clone is None else clone


def live_arrays() -> list[jax.Array]:
    """What ``jax.live_arrays()`` lists, without the clones of this file."""
    alone = _listing.acquire(timeout=_PATIENCE_S)  # one look that counts a clone is better than one that hangs
    try:
        listed = jax.live_arrays()
    finally:
        if alone:
            _listing.release()
    return [array for array in listed if id(array) not in _clones] if _clones else listed


def _cloned(array: Any) -> Any:
    """A clone that has its parts already; None where there is none."""
    with _listing:
        try:
            clone = array.clone()
            own = (clone, *clone._arrays)  # noqa: SLF001
        except (AttributeError, RuntimeError):
            return None
        _clones.update((id(each), weakref.ref(each, _forget(id(each)))) for each in own)
        return clone


def _forget(name: int) -> Any:
    # Without the lock: arrays die wherever the interpreter collects, under it too.
    return lambda _: _clones.pop(name, None)
