"""What programs compiled outside `jm.jit_step` need: the statistics of the executable that a compile event has just brought.

JAX has no public way from a compile event to its program. The client's list of live executables has the newest first, and
the event comes right after the newest one was made. Where the list has no new program, or more than one, there is None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax

_NEWEST = 8  # of the client's list; more than so many compile at once in no run


@final
class NewExecutables:
    """Reports each new program once, by its fingerprint; keeps no program alive."""

    def __init__(self) -> None:
        self._seen: set[bytes] | None = None
        self._lock = threading.Lock()

    def statistics(self) -> Any | None:
        """The compiler's statistics of the one program that was not there at the last look; None where it is not one."""
        with self._lock:
            live = _live()
            if self._seen is None:  # at the first event all but the newest were there before
                self._seen = {mark for mark in map(_fingerprint, live[1:]) if mark is not None}
            marked = [(each, _fingerprint(each)) for each in live[:_NEWEST]]
            new = [each for each, mark in marked if mark is not None and mark not in self._seen]
            self._seen.update(mark for _, mark in marked if mark is not None)
            return _statistics(new[0]) if len(new) == 1 else None


def _live() -> list[Any]:
    """The programs of the default platform that can still run, newest first; none where the client does not list them."""
    try:
        client: Any = jax.local_devices()[0].client
        return list(client.live_executables())
    except (AttributeError, RuntimeError):
        return []


def _fingerprint(executable: Any) -> bytes | None:
    try:
        return executable.fingerprint
    except (AttributeError, RuntimeError):
        return None


def _statistics(executable: Any) -> Any | None:
    try:
        return executable.get_compiled_memory_stats()
    except (AttributeError, RuntimeError):
        return None


class LiveProgram(NamedTuple):
    """A program that can still run: its name, its statistics, and what makes its optimised HLO. To be let go of soon."""

    name: str
    statistics: Any
    hlo_text: Callable[[], str]


def programs_here(most: int = _NEWEST) -> list[LiveProgram]:
    """The newest programs of the default platform; those that have a name and statistics."""
    found: list[LiveProgram] = []
    for executable in _live()[:most]:
        try:
            module = executable.hlo_modules()[0]
            name, text = str(module.name), module.to_string
        except (AttributeError, IndexError, RuntimeError):
            continue
        statistics = _statistics(executable)
        if statistics is not None:
            found.append(LiveProgram(name, statistics, text))
    return found
