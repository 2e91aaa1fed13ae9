"""The user's variables that hold arrays: the frames of an exception enter; for each array its variable leaves.

Of a function that still runs only the globals are looked at: Python up to 3.12 keeps what is read of its locals until it ends,
and would keep arrays alive with them. Functions that the exception has ended are looked at whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.recovery.verdicts.failing import frames_of

_MOST = 100_000  # entries of one variable, and of all: looking at them must not take long


def array_variables(error: BaseException) -> dict[int, str]:
    """``id(array)`` -> the variable that holds it, such as ``losses`` of ``train.py``; innermost functions first."""
    found: dict[int, str] = {}
    left = _MOST
    for where, names in _scopes(error):
        for name, value in list(names.items()):
            if name.startswith("_") or left <= 0:
                continue
            arrays, words = _arrays(value), f"{name} ({where})"
            left -= len(arrays)
            for leaf in arrays:
                found.setdefault(id(leaf), words)
    return found


def users_frames(error: BaseException) -> list[FrameType]:
    """The frames of the user's own code, outermost first."""
    return [frame for frame in frames_of(error) if owner_of(frame.f_code.co_filename) is Owner.USER]


def _scopes(error: BaseException) -> Iterator[tuple[str, Mapping[str, Any]]]:
    running = next(iter(frames_of(error)), None)
    seen: set[int] = set()
    for frame in reversed(users_frames(error)):
        where = Path(frame.f_code.co_filename).name
        if frame is not running and frame.f_code.co_name != "<module>":
            yield f"{where}, {frame.f_code.co_name}", frame.f_locals
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield where, frame.f_globals


def _arrays(value: Any) -> list[jax.Array]:
    if isinstance(value, jax.Array):
        return [value]
    if isinstance(value, list | tuple | dict) and len(value) > _MOST:  # type: ignore[arg-type]
        return []
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys have no order
        return []
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
