"""Memory events as people read them: a heading, what happened, what to do, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmem_callbacks.records.documents import Block, Document, Paragraph, Table
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_TITLES = {"near_oom": "Near out of memory", "plan_stale": "Stale plan"}


def event_title(kind: str) -> str:
    """The heading of a kind of event, of one that only a newer version knows too; most are spelled as they are named."""
    return _TITLES.get(kind, kind.replace("_", " ").capitalize())


def event_document(event: MemoryEvent) -> Document:
    """One event, for loggers that show text."""
    head = Paragraph(label=event_title(event.kind), text=f"at step {event.step} ({event.device})")
    return Document([head, *event_details(event)])


def event_details(event: MemoryEvent) -> Iterator[Block]:
    """What happened, what to do, and the figures."""
    yield event.message
    if event.action:
        yield Paragraph(label="What to do:", text=event.action, style="act")
    if event.figures:
        rows = [(name.replace("_", " "), _figure(name, value)) for name, value in event.figures.items()]
        yield Table(("figure", "value"), rows)


def _figure(name: str, value: float | str) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{format_bytes(value)} ({value} B)"
    if name.endswith("_share") and isinstance(value, int | float):
        return f"{value:.1%}"
    return str(value)
