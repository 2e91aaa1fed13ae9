"""The end of a command that ran a script: its process ends soon, whatever the script's threads and exit functions do.

A script that is ended at its step may block for ever: it waits for a result that does not come, puts into a queue that nobody
empties, or is in C code. Python itself would wait for its threads, and where one is in C++ code it would abort the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, final

from jaxmem_callbacks.cli.exits import exit_of

_LEAVES_S = 5.0


@final
class Leaving:
    """Ends the process some seconds from now, or once a signal comes, unless `cancel` is called.

    Args:
        code: Gives the exit code.
        signals: Brings those that came.
    """

    # Whether the process is a command's own. Of one that only calls a command, nothing is ended.
    in_own_process = False

    def __init__(
        self, code: Callable[[], int], signals: queue.SimpleQueue[type[KeyboardInterrupt]] | None = None
    ) -> None:
        self._code, self._cancelled = code, threading.Event()
        self._signals: queue.SimpleQueue[type[KeyboardInterrupt]] = signals or queue.SimpleQueue()
        if self.in_own_process:
            threading.Thread(target=self._wait, daemon=True).start()

    def cancel(self) -> None:
        """The script let itself be ended."""
        self._cancelled.set()

    def _wait(self) -> None:
        came = None
        with contextlib.suppress(queue.Empty):
            came = self._signals.get(timeout=_LEAVES_S)
        if not self._cancelled.is_set():
            code = self._code()
            _leave(code if came is None else exit_of(came))


def leave(code: int) -> NoReturn:
    """End the process with an exit code. What a script registered for the end has some seconds."""
    Leaving(lambda: code)
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - it has no other name
    _leave(code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a script may have set anything
            stream.flush()
    os._exit(code)
