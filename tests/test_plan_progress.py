"""How far a plan is: a bar on a real pseudo-terminal, lines in a pipe, and what a step prints stays whole."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading

import pytest

from jaxmem_callbacks.writers.plan_progress import plan_progress


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, then: type[BaseException] | None = None) -> str:
    """What a terminal of 100 columns gets while a plan is told, which may end before its time."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream, contextlib.suppress(KeyboardInterrupt), plan_progress(stream) as told:
        told("none and full", 0, 6)
        told("full, 3 segments [/bold]", 2, 6)
        if then is not None:
            raise then
    shown = bytearray()
    with contextlib.suppress(OSError):  # the end: nobody has the other side any more
        while part := os.read(ours, 2**16):
            shown += part
    os.close(ours)
    return shown.decode()


def test_a_terminal_shows_a_bar_that_names_what_compiles_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown_on_a_terminal(monkeypatch)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "2 of at most 6 compiled, now full, 3 segments [/bold]" in plain
    assert "0:00:00" in plain
    assert text.rstrip().endswith("\x1b[2K")  # the line is cleared: the plan's own table comes next
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is there again


def test_ctrl_c_leaves_no_thread_and_no_hidden_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    assert shown_on_a_terminal(monkeypatch, KeyboardInterrupt).count("\x1b[?25h") == 1
    for thread in set(threading.enumerate()) - before:  # rich tells its own to end, and does not wait for that
        thread.join(timeout=30)
    assert set(threading.enumerate()) <= before


def test_a_pipe_gets_a_line_for_each() -> None:
    stream = io.StringIO()
    with plan_progress(stream) as told:
        told("none and full", 0, 6)
        told("full", 1, 6)
    assert stream.getvalue() == "plan: none and full (0 of at most 6 compiled)\nplan: full (1 of at most 6 compiled)\n"
