"""JSON lines: every reading that is kept, metric, compile, event and plan as one line, bytes as ints under JAX's own names.

Each line is written whole and by one call, so that the file is complete to its last full line after a kill; a restart appends.
A file that is full becomes a numbered part beside the next one; no part is ever deleted.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import final

from jaxmem_callbacks.readers.runs import fields_of, next_part
from jaxmem_callbacks.records.files import append_to
from jaxmem_callbacks.records.runs import RunEnd, RunStart
from jaxmem_callbacks.records.secrets import scrubbed
from jaxmem_callbacks.writers.protocol import Record, Writer


@final
class JsonlWriter(Writer):
    """Appends to one file.

    Args:
        path: The file; made when it does not exist.
        run_id: Stands in every line, so that a file of several runs can be told apart.
        part_bytes: A line that would make the file larger than this begins a new one; None for one file for ever.
        start: What the first line of every part says of the run.
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
        return json.dumps({"run": self._run_id, **fields}, separators=(",", ":")).encode() + b"\n"

    def _put(self, data: bytes) -> None:
        """All of it, by one call of the system unless that takes less; nothing waits in this process."""
        self._size += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
