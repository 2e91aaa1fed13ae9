"""The compiles of steps in this process, and who sees the first call of a step before anything is compiled."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from jaxmem_callbacks.records.programs import Compilation

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCount(threading.local):
    """Backend compiles that this thread has asked for since `watch_compiles` was first called."""

    count: int = 0


compiles = CompileCount()


@functools.cache
def watch_compiles() -> None:
    """Begin to count, once a process: one listener that adds 1 and returns. JAX offers no way to take it back."""
    import jax  # here: the command line reads this module before JAX

    jax.monitoring.register_event_duration_secs_listener(_count)


def _count(event: str, duration_secs: float, **_: Any) -> None:  # noqa: ARG001 - JAX's signature
    if event == _COMPILED:
        compiles.count += 1


KEPT = 1024  # a run that recompiles more often than this has shown its cause long before
_OF_A_STEP = 16  # its newest


class Step(Protocol):
    """A step that counts its calls."""

    calls: int


class _History:
    """The last `KEPT` compilations and how many there were in all; for each living step, its largest one and its newest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Compilation] = deque(maxlen=KEPT)
        self._total = 0
        self._largest: weakref.WeakKeyDictionary[Step, Compilation] = weakref.WeakKeyDictionary()
        self._newest: weakref.WeakKeyDictionary[Step, deque[Compilation]] = weakref.WeakKeyDictionary()

    def record(self, compilation: Compilation, step: Step | None = None) -> None:
        """Add one compilation, of ``step``, to the process's history. Never blocks for long; any thread."""
        with self._lock:
            self._kept.append(compilation)
            self._total += 1
            if step is None:
                return
            self._newest.setdefault(step, deque(maxlen=_OF_A_STEP)).append(compilation)
            if _need(compilation) >= _need(self._largest.get(step)):
                self._largest[step] = compilation

    def calls(self) -> tuple[tuple[Compilation, int], ...]:
        """For every step that still exists, its largest compilation and how often it was called so far."""
        with self._lock:
            return tuple((compilation, step.calls) for step, compilation in self._largest.items())

    def steps(self) -> tuple[tuple[Step, Compilation], ...]:
        """Every step that still exists, with its largest compilation. Who asks holds the steps: not for long."""
        with self._lock:
            return tuple(self._largest.items())

    def of(self, step: Step) -> tuple[Compilation, ...]:
        """The compilations of one step: its largest, then its newest, the last one first. Several steps may bear one name."""
        with self._lock:
            largest = self._largest.get(step)
            return () if largest is None else (largest, *reversed(self._newest[step]))

    def since(self, cursor: int) -> tuple[tuple[Compilation, ...], int]:
        """What was compiled after ``cursor``, oldest first, and the cursor to ask with next time.

        Args:
            cursor: 0 for everything that is still kept, or what the last call returned.
        """
        with self._lock:
            missed = max(0, self._total - cursor)
            newest = tuple(self._kept)[max(0, len(self._kept) - missed) :] if missed else ()
            return newest, self._total


def _need(compilation: Compilation | None) -> int:
    return -1 if compilation is None or compilation.memory is None else compilation.memory.step_bytes


_history = _History()
record, calls, steps, of, since = _history.record, _history.calls, _history.steps, _history.of, _history.since


# `jaxmem inspect` stops a script at a first call. In a script without a step of this library what its jits make is wrapped, to be
# seen as well: see `cli/jit_hook.py`.
Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_observers: list[Observer] = []


@contextmanager
def first_calls_seen_by(observer: Observer) -> Generator[None]:
    """Inside, ``observer(step, args, kwargs)`` is called before a `jm.jit_step` step is compiled; it may raise."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def announce(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the observers, the latest first."""
    for observer in reversed(_observers):
        observer(step, args, kwargs)
