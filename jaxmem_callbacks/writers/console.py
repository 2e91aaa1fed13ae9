"""Console: one line an event, on stderr so that a script's own output stays clean. Pass `writer=ConsoleWriter()` to have it."""

from __future__ import annotations

from typing import final

from rich.console import Console
from rich.text import Text

from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.terminal import shown
from jaxmem_callbacks.writers.events import event_title
from jaxmem_callbacks.writers.protocol import Record, Writer


@final
class ConsoleWriter(Writer):
    """Prints events.

    Args:
        console: Where to print; stderr by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    def write(self, record: Record) -> None:
        """Print one line for an event."""
        if isinstance(record, MemoryEvent):
            line = Text.assemble((f"[memory] {event_title(record.kind)}: ", "bold yellow"), shown(record.message))
            self._console.print(line, soft_wrap=True)
