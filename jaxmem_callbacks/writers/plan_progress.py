"""How far a plan is: what is compiled now, what is done and how many may come. Compiles enter; a bar or lines leave."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column


@contextmanager
def plan_progress(stream: TextIO) -> Generator[Callable[[str, int, int], None]]:
    """Tell of a plan while it is made: a bar with the time on a terminal, which goes when the plan is there; lines elsewhere.

    Args:
        stream: Where to, as a rule stderr.

    Yields:
        What to call with what is compiled, how many compiles are done and how many there will be at most.
    """
    console = Console(file=stream)
    if not console.is_terminal:
        yield lambda what, done, most: _line(stream, what, done, most)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("plan"),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    # What the user's step prints while it is traced goes where it always does: rich is not to stand between.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("tracing the step", total=None)

        def told(what: str, done: int, most: int) -> None:
            bar.update(task, description=f"{done} of at most {most} compiled, now {what}", completed=done, total=most)

        yield told


def _line(stream: TextIO, what: str, done: int, most: int) -> None:
    stream.write(f"plan: {what} ({done} of at most {most} compiled)\n")
    stream.flush()
