"""Exceptions that were reported already, so that nested guards and a monitor around them write one report. Keeps none alive."""

from __future__ import annotations

import threading
import weakref

_lock = threading.Lock()
_told: dict[int, weakref.ref[BaseException] | str] = {}
_MOST = 64


def is_first(error: BaseException) -> bool:
    """Whether nobody asked about this very exception before; from now on somebody has."""
    with _lock:
        known = _told.get(id(error))
        if known is not None and _is(known, error):
            return False
        while len(_told) >= _MOST:
            del _told[next(iter(_told))]
        _told[id(error)] = _mark(error)
        return True


def _mark(error: BaseException) -> weakref.ref[BaseException] | str:
    try:
        return weakref.ref(error)
    except TypeError:  # Python's own, such as MemoryError; another one in its place with the same words is taken for it
        return repr(error)


def _is(known: weakref.ref[BaseException] | str, error: BaseException) -> bool:
    return known == repr(error) if isinstance(known, str) else known() is error
