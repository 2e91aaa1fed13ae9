"""How far a command is: what compiles now, for a plan also what is done. A bar, a line of a notebook's cell, or lines leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from jaxmem_callbacks.records.terminal import is_quiet


@contextmanager
def plan_progress(stream: TextIO) -> Generator[Callable[[str, int, int], None]]:
    """Progress of a plan while it is made.

    On a terminal it is a bar with the time, and under a notebook's cell a line that is replaced. Both go when the plan is there.
    Elsewhere it is a line a compile.

    Args:
        stream: Where to, as a rule stderr.

    Yields:
        What to call with what is compiled, how many compiles are done and how many there will be at most.
    """
    if in_notebook():
        with _in_a_cell() as in_cell:
            yield in_cell
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield lambda what, done, most: _line(stream, what, done, most)
        return
    with _bar(console, "plan", BarColumn(bar_width=12)) as bar:
        task = bar.add_task("tracing the step", total=None)

        def report(what: str, done: int, most: int) -> None:
            bar.update(task, description=f"{done} of at most {most} compiled, now {what}", completed=done, total=most)

        yield report


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which shows more than text; IPython on a terminal does not."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def _in_a_cell() -> Generator[Callable[[str, int, int], None]]:
    """One line under the running cell, which each call replaces and the end takes away."""
    ipython: Any = sys.modules["IPython"]
    shown = ipython.display.display({"text/plain": "plan: tracing the step"}, raw=True, display_id=True)

    def report(what: str, done: int, most: int) -> None:
        shown.update({"text/plain": f"plan: {done} of at most {most} compiled, now {what}"}, raw=True)

    try:
        yield report
    finally:
        shown.update({"text/plain": ""}, raw=True)


@contextmanager
def inspect_progress(stream: TextIO) -> Generator[Callable[[str], None]]:
    """Tell what a look at a step waits for: with the time on a terminal, where it goes at the end; nothing elsewhere.

    Args:
        stream: Where to, as a rule stderr.

    Yields:
        What to call with what is done now.
    """
    console = Console(file=stream)
    if is_quiet() or not console.is_terminal:
        yield lambda _what: None
        return
    with _bar(console, "inspect") as bar:
        task = bar.add_task("tracing the step", total=None)
        yield lambda what: bar.update(task, description=what)


def _bar(console: Console, word: str, *between: BarColumn) -> Progress:
    """A line that goes. What the step prints while it is traced goes where it always does: rich is not to stand between."""
    what = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = (SpinnerColumn(), TextColumn(word), *between, TimeElapsedColumn(), what)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


def _line(stream: TextIO, what: str, done: int, most: int) -> None:
    stream.write(f"plan: {what} ({done} of at most {most} compiled)\n")
    stream.flush()
