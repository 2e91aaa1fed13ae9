"""The form of a run's lines, told once: a record enters and the fields of its line leave, and the other way round.

Bytes are ints under JAX's own names; every line says its run and its kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.records.runs import RunEnd, RunStart

RunRecord = RunStart | Reading | Unavailable | ArrayCensus | Compilation | Metrics | MemoryEvent | PlanRecord | RunEnd

# Users look these up in JAX's documentation, so they are spelled as in Device.memory_stats().
JAX_NAMES = {
    "in_use_bytes": "bytes_in_use",
    "reserved_bytes": "bytes_reserved",
    "peak_bytes_since_start": "peak_bytes_in_use",
    "limit_bytes": "bytes_limit",
    "largest_free_bytes": "largest_free_block_bytes",
}
_OWN_NAMES = {theirs: ours for ours, theirs in JAX_NAMES.items()}
KINDS: dict[str, type[Any]] = {
    "run": RunStart,
    "reading": Reading,
    "unavailable": Unavailable,
    "arrays": ArrayCensus,
    "compilation": Compilation,
    "metrics": Metrics,
    "event": MemoryEvent,
    "plan": PlanRecord,
    "end": RunEnd,
}
_KIND_OF = {record: kind for kind, record in KINDS.items()}


def fields_of(record: object, time_s: float) -> dict[str, Any] | None:
    """What a line says of a record beside its run; None for records that have no line, such as windows and pictures.

    Args:
        record: Any record.
        time_s: Now, for records that do not know their time.
    """
    kind = _KIND_OF.get(type(record))
    if kind is None:
        return None
    fields = dataclasses.asdict(record)  # pyright: ignore[reportArgumentType] - the kinds are records
    if kind == "event":
        fields["event"] = fields.pop("kind")
    elif kind == "reading":
        fields = {JAX_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    elif kind == "plan":
        fields = {"time_s": time_s, "plan": fields}  # its `step` is a name, where other lines have a number
    return {"kind": kind, **_plain(fields)}


def record_of(fields: Mapping[str, Any]) -> RunRecord | None:
    """The record of a line; None for a kind that this version does not know.

    Raises:
        ValueError: a field that is missing or of another type.
    """
    kind = fields.get("kind")
    if kind not in KINDS:
        return None
    given: Any = fields
    if kind == "event":
        given = {**fields, "kind": fields.get("event")}
    elif kind == "reading":
        given = {_OWN_NAMES.get(name, name): value for name, value in fields.items()}
    elif kind == "plan":
        given = fields.get("plan")
    return record_from(KINDS[kind], given)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
