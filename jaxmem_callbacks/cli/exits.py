"""What the command line's exit codes mean."""

from __future__ import annotations

from jaxmem_callbacks.planning.interrupts import Terminated

OK = 0
FAILED = 1
"""The script itself failed, and its traceback is on stderr; or pip did, in its own words."""
FINDINGS = 1
"""``jaxmem doctor`` looked, and something is wrong."""
GREW = 1
"""``jaxmem compare`` found more growth than was allowed."""
NOTHING_FOUND = 1
"""``jaxmem oom`` read the log, and it tells of no failure."""
NONE_SURVIVES = 1
"""``jaxmem simulate`` found no settings under which the run survives."""
REFUSED = 2
"""Wrong arguments, a wrong preset, a script that never reaches a step, a plan in which nothing fits, a log
that cannot be read, output that cannot be written, or things that cannot be compared."""
INTERRUPTED = 130
"""Ctrl-C; what a shell reports for SIGINT."""
TERMINATED = 143
"""SIGTERM, from a scheduler or ``timeout``; what a shell reports for it."""
BROKEN_PIPE = 141
"""The reader of the output went away, as in ``jaxmem presets | head -1``; what a shell reports for SIGPIPE."""


def exit_of(interrupt: type[KeyboardInterrupt]) -> int:
    """The code of what ended a command early."""
    return TERMINATED if issubclass(interrupt, Terminated) else INTERRUPTED


def signal_of(interrupt: type[KeyboardInterrupt]) -> str:
    """The same in words."""
    return "SIGTERM" if issubclass(interrupt, Terminated) else "Ctrl-C"
