"""Rows of cells or prose enter, lines of plain text leave: columns aligned, sentences no longer than the reader's console."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 100  # where there is no console, as in a file or a notebook
_NARROWEST = 40


def columns(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> list[str]:
    """Aligned lines; ``sides`` says for each column whether it is set ``left`` or ``right``."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    lines: list[str] = []
    for row in rows:
        cells = [c.rjust(w) if side == "right" else c.ljust(w) for c, w, side in zip(row, widths, sides, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def console_width() -> int:
    """Letters in a line of the terminal that stdout is, or what ``COLUMNS`` says; 100 where neither is there."""
    return max(shutil.get_terminal_size((_WIDTH, 0)).columns, _NARROWEST)


def wrapped(texts: Iterable[str]) -> list[str]:
    """Each text in lines of the console's width, those after its first indented.

    A line that begins with a space is code to paste, and stays whole.
    """
    return [part for text in texts for line in text.split("\n") for part in _parts(line)]


def _parts(line: str) -> list[str]:
    if line.startswith(" "):
        return [line]
    return textwrap.wrap(
        line, console_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ) or [""]
