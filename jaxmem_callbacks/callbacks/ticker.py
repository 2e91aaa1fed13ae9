"""Ticker: a daemon thread that runs one action at an interval, woken by a timer and never by the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

_JOIN_S = 10.0  # a writer that hangs must not keep the process from ending


@final
class Ticker:
    """Runs ``action`` at once, then every ``interval_s`` seconds until stopped."""

    def __init__(self, interval_s: float, action: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmem-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; False when it did not end in time and is left behind."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._action()
            if self._stop.wait(self._interval_s):
                return
