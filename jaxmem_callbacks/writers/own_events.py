"""Own events: the events of a process that is not the first, in files of its own; other records are passed over.

A process without events leaves no file: each is made at the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.writers.protocol import Record, Writer


@final
class OwnEventsWriter(Writer):
    """Writes events to a file that it makes when there is one.

    Args:
        make: Opens the file.
    """

    def __init__(self, make: Callable[[], Writer]) -> None:
        self._make = make
        self._file: Writer | None = None

    def write(self, record: Record) -> None:
        """Write an event."""
        if isinstance(record, MemoryEvent):
            self._file = self._file or self._make()
            self._file.write(record)

    def flush(self) -> None:
        """Put what was written on disk."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Say that the run was closed, where anything was written."""
        if self._file is not None:
            self._file.close()
