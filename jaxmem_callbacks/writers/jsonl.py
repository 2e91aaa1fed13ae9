"""JSON lines: a run's records, the events of its other processes, and traces of allocations."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from jaxmem_callbacks.readers.runs import fields_of, next_part
from jaxmem_callbacks.readers.traces import fields_of_event, fields_of_head
from jaxmem_callbacks.records.files import append_to, write_file
from jaxmem_callbacks.records.runs import MemoryEvent, RunEnd, RunStart
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.records.traces import Trace, TraceHead, TracePart
from jaxmem_callbacks.writers.protocol import Record, Writer

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: `json.dumps` makes one a call for other separators


@final
class JsonlWriter(Writer):
    """Appends to one file.

    Args:
        path: The file; made when it does not exist.
        run_id: Stands in every line, so that a file of several runs can be separated.
        part_bytes: A line that would make the file larger than this begins a new one; None for one file for ever.
        start: What the first line of every part has of the run.
    """

    def __init__(
        self, path: Path, run_id: str, *, part_bytes: int | None = None, start: RunStart | None = None
    ) -> None:
        self._path = path
        self._run_id = run_id
        self._part_bytes = part_bytes
        self._start = RunStart(time_s=time.time()) if start is None else start
        self._file = append_to(path)
        self._size = os.fstat(self._file).st_size
        self._header_bytes = 0
        # A run that was killed in the middle of a line must not spoil the first line of this one.
        if self._size > 0 and not _ends_a_line(path):
            self._put(b"\n")
        if self._size > 0 and self._is_full_by(self._header()):
            self._rename()
        self._begin_part()

    def write(self, record: Record) -> None:
        """Write readings, metrics, compiles, events and plans; derived records (windows, tables, pictures) are left out."""
        self._write(record)

    def close(self) -> None:
        """Say that the run was closed, and close the file."""
        try:
            self._write(RunEnd(time_s=time.time()))
        finally:
            os.close(self._file)

    def _write(self, record: object) -> None:
        line = self._line(record)
        if line is None:
            return
        if self._is_full_by(line) and self._size > self._header_bytes:  # a line longer than a part has one of its own
            self._rename()
            self._start = replace(self._start, part=self._start.part + 1, time_s=time.time())
            self._begin_part()
        self._put(line)

    def _is_full_by(self, line: bytes) -> bool:
        return self._part_bytes is not None and self._size + len(line) > self._part_bytes

    def _rename(self) -> None:
        """The full file gets its number, and its name goes to the next; a kill between the two loses nothing."""
        self._path.rename(next_part(self._path))
        os.close(self._file)
        self._file, self._size = append_to(self._path), 0

    def _begin_part(self) -> None:
        header = self._header()
        self._header_bytes = len(header) if self._size == 0 else 0
        self._put(header)

    def _header(self) -> bytes:
        header = self._line(scrubbed(self._start))
        assert header is not None
        return header

    def _line(self, record: object) -> bytes | None:
        fields = fields_of(record, time.time())
        if fields is None:
            return None
        return _ENCODER.encode({"run": self._run_id, **fields}).encode() + b"\n"

    def _put(self, data: bytes) -> None:
        """All of it, by one call of the system unless that takes less; nothing waits in this process."""
        self._size += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


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
    return "".join(_ENCODER.encode(each) + "\n" for each in fields).encode()
