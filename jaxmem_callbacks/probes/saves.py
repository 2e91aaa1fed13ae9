"""Checkpoint saves, as Orbax tells them through `jax.monitoring`; Orbax itself is not imported.

Measured: when a save began and ended, its background part included. Backends: all; in a run of several processes Orbax tells
process 0 only. Cost: nothing per step; JAX calls the listeners some thirty times a save. A save that fails never tells its
end: it counts as running until a later one ends.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import final

import jax.monitoring

# Both interfaces of Orbax 0.12, old and v1, tell these two of a save that blocks and of one that does not.
_BEGAN = {"/jax/orbax/write/start": False, "/jax/orbax/write/async/start": True}
_ENDED = {"/jax/orbax/write/total_duration_secs", "/jax/orbax/write/async/total_duration_secs"}
HeardSave = tuple[float, float | None, bool]  # begin, end or None while it runs, whether it is in the background
_KEPT = 100  # saves between two looks
_AT_ONCE = 2  # a save may begin while the one before it is still being written


@final
class SavesProbe:
    """Hears of saves on the threads that make them; `drain` is for the monitor's thread."""

    def __init__(self) -> None:
        self._running: deque[tuple[float, bool]] = deque(maxlen=_AT_ONCE)
        self._ended: deque[tuple[float, float, bool]] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Begin to listen."""
        jax.monitoring.register_event_listener(self._hear_begin)
        jax.monitoring.register_event_duration_secs_listener(self._hear_end)

    def stop(self) -> None:
        """Stop listening; harmless when something else cleared all listeners."""
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_listener(self._hear_begin)
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._hear_end)

    @property
    def running(self) -> bool:
        """Whether one runs now."""
        return bool(self._running)

    def drain(self) -> list[HeardSave]:
        """Those that ended since the last call, and those that run."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return [*ended, *((began_s, None, background) for began_s, background in tuple(self._running))]

    def _hear_begin(self, event: str, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event in _BEGAN:
            self._running.append((time.time(), _BEGAN[event]))

    def _hear_end(self, event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event not in _ENDED:
            return
        now = time.time()
        # Saves end in the order in which they begin: an older one that has not ended has failed.
        while self._running:
            began_s, background = self._running.popleft()
            if not self._running or abs(now - duration_secs - began_s) < abs(now - duration_secs - self._running[0][0]):
                self._ended.append((began_s, now, background))
                return
