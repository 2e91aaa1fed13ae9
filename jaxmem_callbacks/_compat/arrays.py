"""Arrays: the parts of one on each device, without leaving anything behind, and the line of the user's code that made it.

JAX's public ways (``addressable_shards``, ``addressable_data``, for arrays of ``jax.device_put`` ``unsafe_buffer_pointer`` too)
make the parts once and keep them with the array, and ``jax.live_arrays()`` counts them from then on, also where the array has
one device. A clone shares the array's memory, donation included, and its parts go with it. Where an array of several devices
cannot be cloned there are no parts. While clones live, `live_arrays` leaves them out, on whatever thread it is asked.

`jax.Array.traceback` is the runtime's own record of where an array was made, kept since jaxlib 0.4 and present in 0.10.2 and
0.12.0.1; reading it costs half a microsecond, and nothing on the training thread. Where it is not there, the line is unknown.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem_callbacks.records.source_files import is_installed

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


NO_TRACEBACK = "unknown, because the runtime keeps no traceback of them"
_OUTSIDE = "unknown, because they were made outside of any Python file"


def creation_site(array: Any) -> str:
    """``train.py:41 (train)``: the innermost frame that is neither JAX's nor this package's."""
    try:
        frames = array.traceback.frames
    except (AttributeError, RuntimeError):
        return NO_TRACEBACK
    found = [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
    own = next((frame for frame in found if not _is_library(frame[0])), None)
    chosen = own or next((frame for frame in found if not frame[0].startswith(_HIDDEN)), None)
    return _OUTSIDE if chosen is None else f"{Path(chosen[0]).name}:{chosen[1]} ({chosen[2]})"


def creation_call(array: Any) -> object | None:
    """The record of the call that made an array: the same object for the parts that were taken of it since; None without one."""
    try:
        return array.traceback
    except (AttributeError, RuntimeError):
        return None


_PACKAGES = tuple(str(Path(root).resolve()) for root in (Path(jax.__file__).parent, Path(__file__).parent.parent))
_HIDDEN = (*_PACKAGES, "<")


@functools.lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    """Whether a file is JAX's, this package's or an installed one: the line to change is the user's."""
    return name.startswith(_HIDDEN) or is_installed(name)
