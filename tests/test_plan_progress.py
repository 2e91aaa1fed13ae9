"""How far a plan is: a bar on a real pseudo-terminal, lines in a pipe, and what a step prints stays whole."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxmem_callbacks.writers.plan_progress import plan_progress


def started_kernel() -> tuple[Any, Any]:
    """A notebook's real kernel, and its client."""
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        pytest.fail('A notebook\'s kernel is not installed here. Type pip install "ipykernel>=6.29", or make test.')
    return start_new_kernel(kernel_name="python3")


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


CELL = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

def train_step(w, x):
    value, gradient = jm.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value

plan = jm.plan(train_step, jnp.eye(16), jnp.ones((64, 16)), search={"remat": False})
plan
"""


@pytest.mark.core
def test_a_notebooks_cell_shows_one_line_that_is_replaced_and_goes() -> None:
    """In a real kernel: the step is defined in a cell, and nobody asks for progress."""
    manager, client = started_kernel()
    try:
        answers: list[dict[str, Any]] = []
        reply = client.execute_interactive(CELL, timeout=200, output_hook=answers.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    shown = [each["content"] for each in answers if each["msg_type"] in ("display_data", "update_display_data")]
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    texts = [content["data"]["text/plain"] for content in shown]
    assert texts[0] == "plan: tracing the step"
    assert re.fullmatch(r"plan: 0 of at most \d+ compiled, now none", texts[1])
    assert texts[-1] == ""
    (result,) = [each["content"]["data"] for each in answers if each["msg_type"] == "execute_result"]
    assert "train_step" in result["text/plain"]
    assert "<table>" in result["text/html"]
    assert not [each for each in answers if each["msg_type"] == "stream"], "nothing on stderr"


MODEL = """
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm

def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)
"""
STEP = """
@jax.jit
def train_step(w, x):
    return w - jax.grad(loss)(w, x)
"""
ASKED = """
peak = jm.step_memory(train_step, jnp.ones((64, 64)), jnp.ones((512, 64))).peak()
print(peak, sorted({buffer.source for buffer in peak.buffers if buffer.source}))
"""
SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in sys.argv[1:]:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def printed_by_a_kernel(*cells: str) -> str:
    manager, client = started_kernel()
    try:
        answers: list[dict[str, Any]] = []
        for cell in cells:
            client.execute_interactive(cell, timeout=200, output_hook=answers.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(each["content"].get("text", "") for each in answers)


def printed_by_a_shell(*cells: str) -> str:
    run = subprocess.run([sys.executable, "-c", SHELL, *cells], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.core
@pytest.mark.parametrize("printed", [printed_by_a_kernel, printed_by_a_shell])
def test_the_lines_of_a_peak_name_their_cells(printed: Callable[..., str]) -> None:
    text = printed(*(cell.strip() for cell in (MODEL, STEP, ASKED)))
    assert "(In [1]:5)" in text, text
    assert "'In [2]:3'" in text
