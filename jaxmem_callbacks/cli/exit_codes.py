"""Exit codes of the command line, and the end of a process whose script does not end."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, final

from jaxmem_callbacks.planning.interrupts import Terminated
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.terminal import OutputError, flush, put

OK = 0
FAILED = 1
"""The script itself failed, and its traceback is on stderr; or pip did, in its own words."""
FINDINGS = 1
"""``jaxmem doctor`` looked, and something is wrong."""
GREW = 1
"""``jaxmem compare`` found more growth than was allowed."""
NOTHING_FOUND = 1
"""``jaxmem oom`` read the log, and found no failure in it."""
NONE_SURVIVES = 1
"""``jaxmem simulate`` found no settings under which the run survives."""
REFUSED = 2
"""Wrong arguments, a wrong preset, a script that never reaches a step, a log that cannot be read, output that cannot be
written, or things that cannot be compared."""
DOES_NOT_FIT = 3
"""``jaxmem plan`` compiled a plan, and nothing in it fits the budget."""
INTERRUPTED = 130
"""Ctrl-C; what a shell reports for SIGINT."""
TERMINATED = 143
"""SIGTERM, from a scheduler or ``timeout``; what a shell reports for it."""
BROKEN_PIPE = 141
"""The reader of the output went away, as in ``jaxmem presets | head -1``; what a shell reports for SIGPIPE."""

_SCRIPT = {FAILED: "the script itself failed; its traceback is on stderr", TERMINATED: "stopped by SIGTERM"}
_OF_COMMANDS: dict[str, dict[int, str]] = {
    "compare": {OK: "nothing that is judged grew too much", GREW: "something did"},
    "completion": {OK: "the script was printed"},
    "doctor": {OK: "nothing is wrong", FINDINGS: "something is"},
    "inspect": {OK: "the step was inspected", **_SCRIPT},
    "oom": {OK: "the log has a failure for want of memory", NOTHING_FOUND: "it has none"},
    "plan": {OK: "the chosen policy fits, or no budget is known", DOES_NOT_FIT: "nothing fits the budget", **_SCRIPT},
    "presets": {OK: "every preset is right"},
    "profile": {OK: "the profile was shown", **_SCRIPT},
    "report": {OK: "the page was written"},
    "simulate": {OK: "settings survive the trace", NONE_SURVIVES: "none do"},
    "targets": {OK: "what was asked for is here", FAILED: "pip failed, in its own words"},
    "watch": {OK: "the run ended, or Ctrl-C ended the watching"},
}
_OF_ALL = {
    REFUSED: "wrong arguments, or something that cannot be read or written; stderr says why",
    INTERRUPTED: "stopped by Ctrl-C",
    BROKEN_PIPE: "the reader of the output went away",
}


def exit_codes_text(command: str) -> str:
    """The exit codes of a command, for the end of its help."""
    codes = {**_OF_ALL, **_OF_COMMANDS[command]}
    if command == "watch":
        del codes[INTERRUPTED]
    return "\n".join(["exit codes:", *(f"  {code:<3}  {codes[code]}" for code in sorted(codes))])


def exit_of(interrupt: type[KeyboardInterrupt]) -> int:
    """The code of what ended a command early."""
    return TERMINATED if issubclass(interrupt, Terminated) else INTERRUPTED


def signal_of(interrupt: type[KeyboardInterrupt]) -> str:
    """The same in words."""
    return "SIGTERM" if issubclass(interrupt, Terminated) else "Ctrl-C"


def code_of(command: Callable[[], int]) -> int:
    """The exit code of a command, or of its failure, which is reported on stderr unless the command did so."""
    try:
        try:
            code = command()
        except SystemExit:  # of --help and --version too
            flush()
            raise
        except JaxmemError as error:
            code = refused(str(error))
        except KeyboardInterrupt as error:
            put(f"jaxmem: stopped by {signal_of(type(error))}.\n", sys.stderr)
            code = exit_of(type(error))
        flush()
    except OutputError as error:
        _let_go_of_stdout()
        return refused(f"what it found could not be written to stdout: {error}. Is its disk full, or was it closed?")
    except BrokenPipeError:
        _let_go_of_stdout()
        return BROKEN_PIPE
    return code


def _let_go_of_stdout() -> None:
    """Python would fail once more when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refused(message: str) -> int:
    """Report a refusal on stderr, and return its exit code."""
    put(f"jaxmem: {message}\n", sys.stderr)
    return REFUSED


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
