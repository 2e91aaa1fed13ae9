"""Faults of the monitor itself: one line on stderr for each, and the part that failed is switched off.

With `on_error="raise"` (tests) the exception is kept and raised at the next call from the user's own thread instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar, final

from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.terminal import say

_Result = TypeVar("_Result")
_KEPT = 100


@final
class Faults:
    """What went wrong so far, each part told once."""

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self.raises = on_error == "raise"
        self._off: set[str] = set()
        self.pending: Exception | None = None
        self._said: deque[str] = deque(maxlen=_KEPT)
        self._doing: dict[int, str] = {}  # thread -> the part that runs on it

    def attempt(self, part: str, action: Callable[..., _Result], *args: Any, default: _Result) -> _Result:
        """Run one part of the monitor; ``default`` where it fails now or has failed before."""
        if part in self._off:
            return default
        thread = threading.get_ident()
        outer, self._doing[thread] = self.doing(thread), part
        try:
            return action(*args)
        except Exception as error:  # noqa: BLE001 - whatever a part raises, the user's training goes on
            self.report(part, error)
            return default
        finally:
            self._doing[thread] = outer

    def doing(self, thread: int | None) -> str:
        """The part that runs on a thread, for when it does not come back; empty while there is none."""
        return self._doing.get(thread, "") if thread is not None else ""

    def report(self, part: str, error: Exception) -> None:
        """Switch a part off and say so, once."""
        if part in self._off:
            return
        self._off.add(part)
        if self.raises:
            self.pending = self.pending or error
        else:
            self.say(f"{part} is switched off for the rest of the run: {type(error).__name__}: {error}")

    def note(self, key: str, message: str) -> None:
        """Say something once that switches nothing off."""
        if key not in self._off:
            self._off.add(key)
            self.say(message)

    def say(self, message: str) -> None:
        """One line on stderr, and for the run's own files; an exception's text may hold secrets."""
        line = without_secrets(" ".join(message.split()))
        self._said.append(line)
        say(line)

    def said(self) -> list[str]:
        """What was said since the last call, for the run's own files: stderr may be read by nobody."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def raise_pending(self) -> None:
        """With ``on_error="raise"``: raise the first fault, once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending
