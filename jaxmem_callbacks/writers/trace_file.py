"""A trace's file: the head and events enter, one JSON line each leaves. Each part is written by one call, whole lines only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from jaxmem_callbacks.readers.traces import fields_of_event, fields_of_head
from jaxmem_callbacks.records.files import append_to, write_file
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.records.traces import Trace, TraceHead, TracePart
from jaxmem_callbacks.writers.protocol import Record, Writer


@final
class TraceWriter(Writer):
    """Writes the events of one run; made when the first of them comes.

    Args:
        path: The file.
        head: What the trace is of.
    """

    def __init__(self, path: Path, head: TraceHead) -> None:
        self._path, self._head = path, head
        self._begun = False

    def write(self, record: Record) -> None:
        """Write a part of the trace; all other records are left out."""
        if not isinstance(record, TracePart):
            return
        if not self._begun:
            write_file(self._path, _lines([fields_of_head(scrubbed(self._head))]), private=True)
            self._begun = True
        with os.fdopen(append_to(self._path), "ab") as file:
            file.write(_lines(map(fields_of_event, scrubbed(record).events)))


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a whole trace, as `read_trace` reads it."""
    writer = TraceWriter(Path(path), trace.head)
    writer.write(TracePart(events=trace.events))


def _lines(fields: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in fields).encode()
