"""JSON lines: every reading that is kept, metric, compile, event and plan as one line, bytes as ints under JAX's own names.

Each line is written whole and at once, so that the file is complete to its last full line after a kill; a restart appends.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any, final

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.writers.protocol import Record, Writer

# Users look these up in JAX's documentation, so they are spelled as in Device.memory_stats().
JAX_NAMES = {
    "in_use_bytes": "bytes_in_use",
    "reserved_bytes": "bytes_reserved",
    "peak_bytes_since_start": "peak_bytes_in_use",
    "limit_bytes": "bytes_limit",
    "largest_free_bytes": "largest_free_block_bytes",
}
_KINDS: dict[type[Record], str] = {
    Reading: "reading",
    Unavailable: "unavailable",
    Compilation: "compilation",
    Metrics: "metrics",
    MemoryEvent: "event",
    PlanRecord: "plan",
    ArrayCensus: "arrays",
}


@final
class JsonlWriter(Writer):
    """Appends to one file.

    Args:
        path: The file; made when it does not exist.
        run_id: Stands in every line, so that a file of several runs can be told apart.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._run_id = run_id
        # A run that was killed in the middle of a line must not spoil the first line of this one.
        broken = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        if broken:
            self._file.write("\n")
        self._line({"kind": "run", "time_s": time.time()})

    def write(self, record: Record) -> None:
        """Write readings, metrics, compiles, events and plans; derived records (windows, tables, pictures) are left out."""
        kind = _KINDS.get(type(record))
        if kind is None:
            return
        fields = dataclasses.asdict(record)
        if isinstance(record, MemoryEvent):
            fields["event"] = fields.pop("kind")
        elif isinstance(record, Reading):
            fields = {JAX_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
        elif isinstance(record, PlanRecord):
            fields = {"time_s": time.time(), "plan": fields}  # its `step` is a name, where other lines have a number
        self._line({"kind": kind, **fields})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps({"run": self._run_id, **_plain(fields)}, separators=(",", ":")) + "\n")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
