"""Exceptions that were reported already, so that nested guards and a monitor around them write one report. Keeps none alive."""

from __future__ import annotations

import threading
import weakref

_lock = threading.Lock()
_told: dict[int, weakref.ref[BaseException]] = {}
_MOST = 64
_MARK = "_jaxmem_told"


def is_first(error: BaseException) -> bool:
    """Whether nobody asked about this very exception before; from now on somebody has."""
    with _lock:
        try:
            mark = weakref.ref(error)
        except TypeError:
            # Python's own, such as MemoryError, of which the next one often lies in the same place and has the same words.
            first = _MARK not in vars(error)
            vars(error)[_MARK] = True
            return first
        known = _told.get(id(error))
        if known is not None and known() is error:
            return False
        while len(_told) >= _MOST:
            del _told[next(iter(_told))]
        _told[id(error)] = mark
        return True
