"""Events and tables as Markdown, and text escaped for HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.terminal import shown
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.protocol import Table


def escape(text: str) -> str:
    r"""The text for an element or an attribute in double quotes; a character that shows nothing is written ``\u202e``."""
    return html.escape(shown(text))


_TITLES = {"near_oom": "Near out of memory", "plan_stale": "Stale plan"}


def event_title(kind: str) -> str:
    """The heading of a kind of event, of one that only a newer version knows too; most are spelled as they are named."""
    return _TITLES.get(kind, kind.replace("_", " ").capitalize())


def event_markdown(event: MemoryEvent) -> str:
    """One event: what, since when, what to do, and its figures."""
    figures = event_figures(event)
    head = f"**{event_title(event.kind)}** at step {event.step} ({event.device})"
    return (
        f"{head}\n\n{event.message}\n\n**What to do:** {event.action}\n\n{markdown_table(('figure', 'value'), figures)}"
    )


def event_figures(event: MemoryEvent) -> list[tuple[str, str]]:
    """Name and value of each figure, as people read them."""
    return [(name.replace("_", " "), _figure(name, value)) for name, value in event.figures.items()]


def table_markdown(table: Table) -> str:
    """A table."""
    return markdown_table(table.columns, table.rows)


def _figure(name: str, value: float | str) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{format_bytes(value)} ({value} B)"
    if name.endswith("_share") and isinstance(value, int | float):
        return f"{value:.1%}"
    return str(value)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns and rows as a Markdown table; a bar or a new line in a cell does not end it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
