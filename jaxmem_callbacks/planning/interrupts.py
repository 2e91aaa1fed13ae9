"""Ctrl-C, and SIGTERM where a command asks for it, as an exception in the thread of a long work such as a plan.

Python runs handlers of signals in the main thread only, and raises `KeyboardInterrupt` wherever that happens to be: in a
finalizer it is printed as ignored, and lost. One that comes while C code runs for long is raised by the first Python function
after it, which is often such a finalizer. So each signal is noted, and the work asks at its next chance.
"""

from __future__ import annotations

import ctypes
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import final

# One Ctrl-C may arrive more than once, since some launchers signal a process and its group.
_ONE_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came, from a scheduler or ``timeout``. It ends a plan as Ctrl-C does: with the best of what was compiled."""


class _TakenBack(KeyboardInterrupt):
    """Takes the place of what was sent too late."""


@final
class Interruption:
    """A handler of signals that ends what the thread does in which it was made.

    Attributes:
        kind: What was raised; None where no signal came.
        late: What signals that came when the work was done would have raised.
    """

    def __init__(self) -> None:
        self.kind: type[KeyboardInterrupt] | None = None
        self._thread, self._at_s = threading.get_ident(), -_ONE_S
        self._sent = False  # to another thread than the handler's
        self._is_done = False
        self.late: queue.SimpleQueue[type[KeyboardInterrupt]] = (
            queue.SimpleQueue()
        )  # a handler may interrupt another one

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        """Raise in the thread that works, which may be another one than this."""
        is_ending = self.kind is Terminated and not self._is_done
        if is_ending or time.monotonic() - self._at_s < _ONE_S:
            return
        self._at_s = time.monotonic()
        kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self._is_done:
            self.late.put(kind)
            return
        self.kind = kind
        if threading.get_ident() == self._thread:
            raise self.kind
        self._sent = True
        _raise_in(self._thread, self.kind)

    def work_is_done(self) -> None:
        """From here on nothing is raised. What was sent and has not been raised yet came too late, and is dropped.

        Another exception takes its place and is caught here. To clear it instead would leave CPython 3.11 looking for one at
        every call, so that it never leaves a function that is traced.
        """
        self._is_done = True
        if not self._sent:
            return
        self._sent = False
        try:
            _raise_in(self._thread, _TakenBack)
            while True:
                time.sleep(0)  # it is raised at one of the next instructions
        except _TakenBack:
            pass

    def check(self) -> None:
        """Raise what came and was lost."""
        if self.kind is not None:
            raise self.kind


# Of each thread that works for a command.
_commands: dict[int, Interruption] = {}


@contextmanager
def interrupts_heard() -> Generator[Callable[[], None]]:
    """Note each Ctrl-C of what is inside.

    Only Python's own handler is stood in for, and only in the main thread, where alone handlers run; a program that handles the
    signal itself goes on doing so. Where a command works, its `Interruption` is asked.

    Yields:
        A function that raises `KeyboardInterrupt` where a Ctrl-C came and nothing has been raised out of here.
    """
    command = _commands.get(threading.get_ident())
    if command is not None:
        yield command.check
        return
    own = Interruption()
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, own)
    try:
        yield own.check
    finally:
        if is_ours and signal.getsignal(signal.SIGINT) is own:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def command_interrupted(handle: Callable[[Interruption], None]) -> Generator[Interruption]:
    """Ctrl-C and SIGTERM end what is inside, in whatever thread it is, whatever handlers the program has set.

    Args:
        handle: Has signals call what it is given, from then on.

    Yields:
        The interruption, whose `kind` is the signal that came. Inside another command's work it is that one's.
    """
    here = threading.get_ident()
    if (around := _commands.get(here)) is not None:
        yield around
        return
    own = _commands[here] = Interruption()
    handle(own)
    try:
        yield own
    finally:
        del _commands[here]
        own.work_is_done()


def interruption_here() -> type[KeyboardInterrupt] | None:
    """What ended the command's work in this thread; None where nothing did."""
    command = _commands.get(threading.get_ident())
    return None if command is None else command.kind


def _raise_in(thread: int, kind: type[KeyboardInterrupt]) -> None:
    """Have a thread raise an exception at its next line of Python, in place of one that it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
