"""Who wants to see the first call of a step before anything is compiled: `jaxmem inspect` stops a script there.

In a script without a step of this library what its jits make is wrapped, to be seen as well: see `cli/jit_hook.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

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


def unwatched(step: Any) -> Any:
    """The user's own jitted function behind one that is watched; all else as it is."""
    return getattr(step, "watched_jit", step)
