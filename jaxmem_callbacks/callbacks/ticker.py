"""Ticker: a daemon thread that runs one action at an interval, woken by a timer and never by the hook.

Other actions are run on it when asked for, and waited for only so long: whatever hangs there holds up nobody else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final
from weakref import WeakMethod

PATIENCE_S = 10.0  # a writer that hangs must not keep the process from going on or ending
_SHORT_S = 0.5  # once it was seen to hang


@final
class Ticker:
    """Runs ``action`` at once, then every ``interval_s`` seconds until stopped or until its object is gone."""

    def __init__(self, interval_s: float, action: WeakMethod[Callable[[], None]]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._asked: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._patience_s = PATIENCE_S
        self._thread = threading.Thread(target=self._run, name="jaxmem-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, action: Callable[[], None]) -> bool:
        """Run an action on the thread, now; False when it did not end in time and is left behind."""
        if self._thread is threading.current_thread():
            action()
            return True
        done = threading.Event()
        self._asked.append((action, done))
        self._wake.set()
        if done.wait(self._patience_s):
            return True
        self._patience_s = _SHORT_S
        return False

    def stop(self, last: Callable[[], None]) -> bool:
        """Run a last action and end the thread; False when it did not end in time and is left behind."""
        self._stopping = True
        return self.run(last)

    def _run(self) -> None:
        while True:
            while self._asked:
                self._answer(*self._asked.popleft())
            action = None if self._stopping else self._action()
            if action is None:
                return
            action()
            del action  # or the monitor would live on in this frame
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _answer(self, asked: Callable[[], None], done: threading.Event) -> None:
        try:
            asked()
        finally:
            done.set()
