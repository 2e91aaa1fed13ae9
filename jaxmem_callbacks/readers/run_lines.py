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
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.readings import AcrossProcesses, CheckpointSave, Reading, Unavailable
from jaxmem_callbacks.records.runs import Dropped, MemoryEvent, RunEnd, RunStart, Said

RunRecord = (
    RunStart
    | Reading
    | Unavailable
    | ArrayCensus
    | AcrossProcesses
    | HeapMap
    | Compilation
    | Metrics
    | MemoryEvent
    | CheckpointSave
    | PlanRecord
    | Dropped
    | Said
    | RunEnd
)

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
    "processes": AcrossProcesses,
    "heap_map": HeapMap,
    "compilation": Compilation,
    "metrics": Metrics,
    "event": MemoryEvent,
    "checkpoint_save": CheckpointSave,
    "plan": PlanRecord,
    "dropped": Dropped,
    "said": Said,
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
    if isinstance(record, HeapMap):
        return {"kind": kind, **_map_fields(record)}
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
    elif kind == "heap_map":
        given = _map_given(fields)
    return record_from(KINDS[kind], given)


def _map_fields(heap: HeapMap) -> dict[str, Any]:
    """Thousands of buffers of few kinds: each label once, and each buffer as address, bytes and the number of its label."""
    numbers: dict[str, int] = {}
    rows = [[each.address, each.bytes, numbers.setdefault(each.label, len(numbers))] for each in heap.buffers]
    names = ("device", "step", "time_s", "left_out_count", "left_out_bytes")
    return {**{name: getattr(heap, name) for name in names}, "labels": list(numbers), "buffers": rows}


def _map_given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round.

    Raises:
        ValueError: buffers that are no rows of three numbers, or of a label that is not there.
    """
    try:
        labels = fields["labels"]
        rows = [{"address": at, "bytes": size, "label": labels[number]} for at, size, number in fields["buffers"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        msg = "`buffers` are not rows of an address, bytes and the number of one of its `labels`"
        raise ValueError(msg) from error
    return {**fields, "buffers": rows}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
