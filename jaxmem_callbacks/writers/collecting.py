"""CollectingWriter: a shipped double that keeps every record, for tests of users' own monitoring."""

from __future__ import annotations

from typing import TypeVar, final

from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.writers.protocol import Record, Writer

_Kind = TypeVar("_Kind")


@final
class CollectingWriter(Writer):
    """Keeps records in ``records``, oldest first.

    Example:
        >>> writer = CollectingWriter()
        >>> writer.events
        []
    """

    takes_pictures = True

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        """Keep the record."""
        self.records.append(record)

    def close(self) -> None:
        """Remember that the monitor let go."""
        self.closed = True

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """The records of one kind, oldest first."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def events(self) -> list[MemoryEvent]:
        """The events, oldest first."""
        return self.of(MemoryEvent)
