"""The command's own streams and signals for its work inside a script's call, whatever the script has set.

Scripts send what is printed to logs of their own, arm alarms against hanging, and handle signals: all of it is theirs, and none
of it is for a plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import queue
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO, cast, final

from jaxmem_callbacks.planning.interrupts import SIGNALS, Interruption, command_interrupted

# Has no use in Python programs, and does nothing where nobody handles it.
_NUDGE = signal.SIGURG
_WAIT_S = 2.0
_NO_MORE = 0  # the number of no signal
_MANY = 4096
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """Where a command writes while a script has its own ``sys.stdout`` and ``sys.stderr``.

    Attributes:
        out: What the user's code prints while the command works.
        err: Progress and warnings.
        answer: What the command was asked for.
    """

    out: TextIO
    err: TextIO
    answer: TextIO


@contextlib.contextmanager
def own_streams(*, script_to_stderr: bool) -> Generator[Streams]:
    """Around a script: its streams are the command's again afterwards, also where it closed them or sent them elsewhere.

    Args:
        script_to_stderr: Whether what the script writes to standard output goes to standard error, by whatever means it does.
    """
    before = sys.stdout, sys.stderr
    try:
        with contextlib.ExitStack() as kept:
            out, err = (kept.enter_context(_kept(stream)) for stream in before)
            if script_to_stderr:
                before[0].flush()
                if (to := _number(before[0])) is not None and (of := _number(before[1])) is not None:
                    os.dup2(of, to)
                sys.stdout = sys.stderr
            try:
                yield Streams(out=err if script_to_stderr else out, err=err, answer=out)
            finally:
                for stream in (sys.stdout, sys.stderr, *before):
                    with contextlib.suppress(Exception):  # a stream of the script's own may do anything
                        stream.flush()
    finally:
        sys.stdout, sys.stderr = (opened(stream, number) for stream, number in zip(before, (1, 2), strict=True))


@contextlib.contextmanager
def _kept(stream: TextIO) -> Generator[TextIO]:
    """The stream by a file of its own, where it has a file; that file is behind the stream again at the end."""
    number = _number(stream)
    if number is None:
        yield stream
        return
    stream.flush()
    copy = os.dup(number)
    own = os.fdopen(copy, "w", buffering=1, encoding=stream.encoding, errors=stream.errors)
    try:
        yield own
    finally:  # that the answer could not be written was reported before
        with contextlib.suppress(OSError):
            own.flush()
        os.dup2(copy, number)
        with contextlib.suppress(OSError):
            own.close()


def _number(stream: TextIO) -> int | None:
    """The number of a stream's file; None where it has none, as in a test or a notebook."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return None


def opened(stream: TextIO, number: int) -> TextIO:
    """The stream, or where a script closed it another one of the same file."""
    return os.fdopen(number, "w", encoding="utf-8", closefd=False) if getattr(stream, "closed", False) else stream


@final
class InMain:
    """Has Python's main thread call functions, where alone handlers of signals run. To be entered around a script.

    From another thread a signal makes the main thread look, also where it waits for that thread. Where it is in C code that never
    returns to Python it does not look, and signals that come then are read from the pipe that Python writes their numbers to.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}
        self._taken: set[int] = set()
        self._read, self._written, self._written_before = -1, -1, -1
        self._reader: threading.Thread | None = None

    def __enter__(self) -> InMain:
        if _is_main():
            self._before = {number: signal.getsignal(number) for number in (_NUDGE, *SIGNALS)}
            # Not those that a shell has its jobs in the background ignore.
            self._taken = {number for number in SIGNALS if self._before[number] is not signal.SIG_IGN}
            self._read, self._written = os.pipe()
            os.set_blocking(self._written, False)
            signal.signal(_NUDGE, self._look)
            self._written_before = self._wake_by_pipe()
        return self

    def __exit__(self, *_: object) -> None:
        if not _is_main():
            return
        signal.set_wakeup_fd(self._written_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._reader is not None:
            os.write(self._written, bytes([_NO_MORE]))
            self._reader.join()
        os.close(self._read)
        os.close(self._written)

    def __call__(self, function: Callable[[], None]) -> bool:
        """Call it now, or have it called soon where the main thread is in C code that goes on for long.

        Returns:
            Whether it was called.
        """
        if _is_main():
            function()
            return True
        done = threading.Event()

        def called() -> None:
            try:
                function()
            finally:
                done.set()

        self._asked.put(called)
        signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)
        return done.wait(_WAIT_S)

    def handle(self, interruption: Interruption) -> None:
        """Have Ctrl-C and SIGTERM call this one until the script's end, whatever handlers the script has set."""
        if _is_main():
            self._set_handlers(interruption)
            return
        self._reader = threading.Thread(target=self._hear, args=(interruption,), daemon=True)
        self._reader.start()

        def ready() -> None:
            self._set_handlers(_of_another_thread)
            self._wake_by_pipe()  # a script's event loop has one of its own

        if not self(ready):
            for number in self._taken:
                _handle_as(_NUDGE, number)

    def _set_handlers(self, handler: Callable[[int, FrameType | None], None]) -> None:
        for number in self._taken:
            signal.signal(number, handler)

    def _wake_by_pipe(self) -> int:
        return signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)

    def _hear(self, interruption: Interruption) -> None:
        """Read the signals that come from now on, without those of before."""
        while select.select([self._read], [], [], 0)[0]:
            os.read(self._read, _MANY)
        while (number := os.read(self._read, 1)[0]) != _NO_MORE:
            if number in self._taken:
                interruption(number)

    def _look(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()


def _of_another_thread(_number: int, _frame: FrameType | None) -> None:
    """A signal for work in another thread, which wakes by the pipe."""


def _handle_as(known: int, number: int) -> None:
    """Have the system handle a signal as another one is handled: only Python's main thread could ask Python for it."""
    system, handled = ctypes.CDLL(None), ctypes.create_string_buffer(_MANY)  # more than a `struct sigaction` anywhere
    system.sigaction(known, None, handled)
    system.sigaction(number, handled, None)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def undisturbed(streams: Streams, in_main: InMain) -> Generator[Interruption]:
    """Where a command works inside a script's call. The script's timers stay off: it ends afterwards.

    Args:
        streams: Of the command.
        in_main: Of the script.

    Yields:
        Which signal came.
    """
    for timer in _TIMERS:
        signal.setitimer(timer, 0)
    faulthandler.cancel_dump_traceback_later()
    with (
        contextlib.redirect_stdout(streams.out),
        contextlib.redirect_stderr(streams.err),
        warnings.catch_warnings(),
        command_interrupted(in_main.handle) as interruption,
    ):
        # What is an error to the script's own code is none to the work.
        filters = cast("list[tuple[Any, ...]]", warnings.filters)
        filters[:] = [("default" if each[0] == "error" else each[0], *each[1:]) for each in filters]
        warnings.simplefilter("default", append=True)
        yield interruption
