"""Rows of cells enter, aligned lines of plain text leave."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> list[str]:
    """Aligned lines; ``sides`` says for each column whether it is set ``left`` or ``right``."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    lines: list[str] = []
    for row in rows:
        cells = [c.rjust(w) if side == "right" else c.ljust(w) for c, w, side in zip(row, widths, sides, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
