"""The monitor's own thread, and its faults: what keeps both apart from the user's run.

Ticker: a daemon thread that runs one action at an interval, woken by a timer and never by the hook. Other actions are run on it
when asked for, and waited for only so long: whatever hangs there holds up nobody else. A fork waits for the action that runs,
else the child would have half of what it wrote, and locks that nobody opens.

Turns: Python runs one thread at a time, and one that waits for another to let go may wait 5 ms (`sys.getswitchinterval`).
The monitor's thread therefore lets go between two parts of its work.

Faults: one line on stderr for each, and the part that failed is switched off. With `on_error="raise"` (tests) the exception is
kept and raised at the next call from the user's own thread instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar, final

import psutil

from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.terminal import print_line

_Result = TypeVar("_Result")
_KEPT = 100
_TURN_S = 0.0005  # a tenth of the shortest step that training is fed with
_PAUSE_S = 0.0001  # a thread that waits has woken up by then; after a shorter one this thread is often first again


class _Turn(threading.local):
    """Since when this thread has not let go; None on threads that are not the monitor's."""

    began_s: float | None = None


_turn = _Turn()


def _give_way() -> None:
    """Let the training's thread go on, if this one is the monitor's and has worked for its turn."""
    if _turn.began_s is not None and time.perf_counter() - _turn.began_s > _TURN_S:
        time.sleep(_PAUSE_S)
        _turn.began_s = time.perf_counter()


@final
class Faults:
    """Reports of what went wrong, one for each part."""

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self.raises = on_error == "raise"
        self._off: set[str] = set()
        self.pending: Exception | None = None
        self._printed: deque[str] = deque(maxlen=_KEPT)
        self._doing: dict[int, str] = {}  # thread -> the part that runs on it

    def attempt(
        self,
        part: str,
        action: Callable[..., _Result],
        *args: Any,
        default: _Result,
        failed: Callable[[str, Exception], None] | None = None,
    ) -> _Result:
        """Run one part of the monitor; ``default`` where it fails now or has failed before.

        Args:
            part: Its name.
            action: What to run.
            *args: Its arguments.
            default: The result of a part that is switched off.
            failed: Takes the part and its exception, in place of `report`.
        """
        if part in self._off:
            return default
        thread = threading.get_ident()
        outer, self._doing[thread] = self.doing(thread), part
        try:
            return action(*args)
        except Exception as error:  # noqa: BLE001 - whatever a part raises, the user's training goes on
            (failed or self.report)(part, error)
            return default
        finally:
            self._doing[thread] = outer
            _give_way()

    def doing(self, thread: int | None) -> str:
        """The part that runs on a thread, for when it does not come back; empty while there is none."""
        return self._doing.get(thread, "") if thread is not None else ""

    def report(self, part: str, error: Exception) -> None:
        """Switch a part off and report it, once."""
        if part in self._off:
            return
        self._off.add(part)
        if self.raises:
            self.pending = self.pending or error
        else:
            self.print(f"{part} is switched off for the rest of the run: {type(error).__name__}: {error}")

    def note(self, key: str, message: str) -> None:
        """Print once a message that switches nothing off."""
        if key not in self._off:
            self._off.add(key)
            self.print(message)

    def print(self, message: str) -> None:
        """One line on stderr, and for the run's own files; an exception's text may hold secrets."""
        line = without_secrets(" ".join(message.split()))
        self._printed.append(line)
        print_line(line)

    def messages(self) -> list[str]:
        """Take what was printed since the last call, for the run's own files: stderr may be read by nobody."""
        return [self._printed.popleft() for _ in range(len(self._printed))]

    def raise_pending(self) -> None:
        """With ``on_error="raise"``: raise the first fault, once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending


PATIENCE_S = 10.0  # a writer that hangs must not keep the process from going on or ending
SHORT_S = 0.5  # once it was seen to hang; and what a fork waits
_WORKS = 0.01  # of that time on a processor: it does not hang, the machine is busy
_MOST = 6  # times that one at work is waited for
_SOON_S = 0.1  # mostly it is done by then, and the system is not asked for times
_running: weakref.WeakSet[Ticker] = weakref.WeakSet()


@final
class Ticker:
    """Runs ``action`` at once, then every ``interval_s`` seconds until stopped or until its object is gone."""

    def __init__(self, interval_s: float, action: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._asked: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake = threading.Event()
        self._busy = threading.Lock()
        self._held = False
        self._stopping = False
        self._patience_s, self._rounds = PATIENCE_S, _MOST
        self._thread = threading.Thread(target=self._run, name="jaxmem-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        _heed_forks()
        _running.add(self)
        self._thread.start()

    def run(self, action: Callable[[], None]) -> bool:
        """Run an action on the thread, now; False when it did not end in time and is left behind."""
        if self._thread is threading.current_thread():
            action()
            return True
        done = threading.Event()
        self._asked.append((action, done))
        self._wake.set()
        if done.wait(_SOON_S):
            return True
        for _ in range(self._rounds):
            before_s = self._worked_s()
            if done.wait(self._patience_s):
                return True
            if self._worked_s() - before_s < _WORKS * self._patience_s:
                break
        if done.is_set():  # meanwhile: a thread that has ended does not work
            return True
        self._patience_s, self._rounds = SHORT_S, 1
        return False

    def stop(self, last: Callable[[], None]) -> bool:
        """Run a last action and end the thread; False when it did not end in time and is left behind."""
        return self.run(functools.partial(self._end, last))

    @property
    def ident(self) -> int | None:
        """Of the thread, as Python numbers threads."""
        return self._thread.ident

    def _worked_s(self) -> float:
        """Seconds of processors that the thread has had, by the system; asking pthreads for one that ended is undefined."""
        with contextlib.suppress(psutil.Error, OSError):  # a sandbox may hide /proc
            threads = psutil.Process().threads()
            return sum(each.user_time + each.system_time for each in threads if each.id == self._thread.native_id)
        return 0.0

    def _run(self) -> None:
        while True:
            _turn.began_s = time.perf_counter()
            with self._busy:
                if not self._turn():
                    return
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _turn(self) -> bool:
        """What was asked for and what is due; False at the end."""
        while self._asked:
            self._answer(*self._asked.popleft())
        action = None if self._stopping else self._action()
        if action is not None:
            action()
        return action is not None

    def hold(self) -> None:
        """Before a fork: wait until nothing runs on the thread, for a moment at most."""
        self._held = self._thread is not threading.current_thread() and self._busy.acquire(timeout=SHORT_S)

    def let_go(self) -> None:
        """After a fork, in both processes."""
        if self._held:
            self._busy.release()

    def _end(self, last: Callable[[], None]) -> None:
        """On the thread, which would end without the last action if another asked it to stop before it had that one."""
        try:
            last()
        finally:
            self._stopping = True

    def _answer(self, asked: Callable[[], None], done: threading.Event) -> None:
        try:
            asked()
        finally:
            done.set()


@functools.cache
def _heed_forks() -> None:
    """Once a process, when the first thread starts: what is registered for forks stays."""
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)


def _hold() -> None:
    for ticker in tuple(_running):
        ticker.hold()


def _let_go() -> None:
    for ticker in tuple(_running):
        ticker.let_go()
