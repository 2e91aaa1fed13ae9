"""The form of a trace's lines, told once: a head or an event enters and the fields of its line leave, and the other way round.

The first line is the head, with ``"kind": "trace"`` and the form's number; every other line is one event. Bytes are ints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.traces import (
    Alloc,
    Free,
    ProgramEnd,
    ProgramOutput,
    ProgramStart,
    StepMark,
    TraceEvent,
    TraceHead,
)

TRACE_NAME = "allocations"  # of a run's trace file, before the run's id
FORM = 1
KINDS: dict[str, type[Any]] = {
    "alloc": Alloc,
    "free": Free,
    "start": ProgramStart,
    "end": ProgramEnd,
    "step": StepMark,
}
_KIND_OF = {record: kind for kind, record in KINDS.items()}


def fields_of_head(head: TraceHead) -> dict[str, Any]:
    """The first line of a trace."""
    return {"kind": "trace", "form": FORM, **dataclasses.asdict(head)}


def fields_of_event(event: TraceEvent) -> dict[str, Any]:
    """The line of an event; what has its usual value is left out."""
    said = _unusual(event)
    if isinstance(event, ProgramStart) and event.outputs:
        said["outputs"] = [_unusual(output) for output in event.outputs]
    return {"kind": _KIND_OF[type(event)], **said}


def _unusual(record: TraceEvent | ProgramOutput) -> dict[str, Any]:
    values = {field.name: (getattr(record, field.name), field.default) for field in dataclasses.fields(record)}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def head_of(fields: Mapping[str, Any]) -> TraceHead:
    """The head of a first line.

    Raises:
        ValueError: another kind of line, or a form that only a newer version knows.
    """
    if fields.get("kind") != "trace":
        msg = f"`kind` is {fields.get('kind')!r}, expected 'trace'"
        raise ValueError(msg)
    if fields.get("form") != FORM:
        msg = f"`form` is {fields.get('form')!r}, expected {FORM}"
        raise ValueError(msg)
    return record_from(TraceHead, fields)


def event_of(fields: Mapping[str, Any]) -> TraceEvent:
    """The event of a line.

    Raises:
        ValueError: a kind that is none, or a field that is missing or of another type.
    """
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        msg = f"`kind` is {kind!r}, expected one of {', '.join(KINDS)}"
        raise ValueError(msg)
    return record_from(KINDS[kind], fields)
