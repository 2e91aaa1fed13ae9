"""The command's own streams and signals for its work inside a script's call, whatever the script has set.

Scripts send what is printed to logs of their own, arm alarms against hanging, and handle signals: all of it is theirs, and none
of it is for a plan.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TextIO, cast, final

from jaxmem_callbacks.planning.interrupts import Interruption, command_interrupted

# Has no use in Python programs, and does nothing where nobody handles it.
_NUDGE = signal.SIGURG
_WAIT_S = 2.0
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """Where a command writes while a script has its own ``sys.stdout`` and ``sys.stderr``."""

    out: TextIO
    err: TextIO


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
                yield Streams(out=err if script_to_stderr else out, err=err)
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
    with os.fdopen(copy, "w", buffering=1, encoding=stream.encoding, errors=stream.errors) as own:
        try:
            yield own
        finally:
            own.flush()
            os.dup2(copy, number)


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
    """Has Python's main thread call functions, where alone signals can be handled. To be entered around a script.

    From another thread a signal makes the main thread look, also where it waits for that thread.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._before: object = None

    def __enter__(self) -> InMain:
        if _is_main():
            self._before = signal.signal(_NUDGE, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if _is_main():
            signal.signal(_NUDGE, signal.SIG_DFL if self._before is None else self._before)  # pyright: ignore[reportArgumentType]

    def __call__(self, function: Callable[[], None]) -> None:
        """Call it now, or have it called soon where the main thread is in C code that goes on for long."""
        if _is_main():
            function()
            return
        done = threading.Event()

        def called() -> None:
            try:
                function()
            finally:
                done.set()

        self._asked.put(called)
        signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)
        done.wait(_WAIT_S)

    def _look(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()


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
        command_interrupted(in_main) as interruption,
    ):
        # What is an error to the script's own code is none to the work.
        filters = cast("list[tuple[Any, ...]]", warnings.filters)
        filters[:] = [("default" if each[0] == "error" else each[0], *each[1:]) for each in filters]
        warnings.simplefilter("default", append=True)
        yield interruption
