"""What was compiled in this process: compilations of registered steps enter, anyone who follows reads them from where he stopped.

Bounded and thread-safe; imports no JAX, so that the monitor's own thread can read it at any time.
"""

from __future__ import annotations

import threading
from collections import deque

from jaxmem_callbacks.records.programs import Compilation

KEPT = 1024  # a run that recompiles more often than this has told its story long before


class _History:
    """The last `KEPT` compilations and how many there were in all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Compilation] = deque(maxlen=KEPT)
        self._total = 0

    def add(self, compilation: Compilation) -> None:
        with self._lock:
            self._kept.append(compilation)
            self._total += 1

    def since(self, cursor: int) -> tuple[tuple[Compilation, ...], int]:
        with self._lock:
            missed = max(0, self._total - cursor)
            newest = tuple(self._kept)[max(0, len(self._kept) - missed) :] if missed else ()
            return newest, self._total


_history = _History()


def record(compilation: Compilation) -> None:
    """Add one compilation to the process's history. Never blocks for long; any thread."""
    _history.add(compilation)


def since(cursor: int) -> tuple[tuple[Compilation, ...], int]:
    """What was compiled after ``cursor``, oldest first, and the cursor to ask with next time.

    Args:
        cursor: 0 for everything that is still kept, or what the last call returned.
    """
    return _history.since(cursor)
