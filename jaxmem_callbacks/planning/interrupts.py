"""A plan that is being made enters; Ctrl-C reaches it, also where Python lost the exception.

Python raises `KeyboardInterrupt` wherever the main thread happens to be; in a finalizer it is printed as ignored, and lost. One
that comes while C code runs for long is raised by the first Python function after it, which is often such a finalizer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def interrupts_heard() -> Generator[Callable[[], None]]:
    """Note each Ctrl-C of what is inside.

    Only Python's own handler is stood in for, and only in the main thread, where alone handlers run; a program that handles the
    signal itself goes on doing so.

    Yields:
        A function that raises `KeyboardInterrupt` where a Ctrl-C came and nothing has been raised out of here.
    """
    heard = False

    def note(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if ours and signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
