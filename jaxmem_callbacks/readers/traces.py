"""Traces of allocations in files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.traces import (
    Alloc,
    Free,
    ProgramEnd,
    ProgramOutput,
    ProgramStart,
    StepMark,
    Trace,
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
    values = _unusual(event)
    if isinstance(event, ProgramStart) and event.outputs:
        values["outputs"] = [_unusual(output) for output in event.outputs]
    return {"kind": _KIND_OF[type(event)], **values}


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


_SHOWN = 60


def read_trace(path: Path) -> Trace:
    """Read one trace.

    Args:
        path: A file of JSON lines, or a monitor's logdir with one trace in it.

    Raises:
        SimulationError: nothing there, several traces, or a line that is none; the message gives file and line.
    """
    file = _file_of(path)
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror or error}. Expected a trace of allocations."
        raise SimulationError(msg) from error
    if not lines:
        raise SimulationError(_not_a_trace(file, 1, "", "the file is empty"))
    try:
        head = head_of(_object(lines[0]))
    except ValueError as error:
        raise SimulationError(_not_a_trace(file, 1, lines[0], str(error))) from error
    events: list[TraceEvent] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            events.append(event_of(_object(line)))
        except ValueError as error:
            if number == len(lines) and not line.endswith("}"):
                break  # cut in the middle: the run was killed while it was written
            raise SimulationError(_not_a_trace(file, number, line, str(error))) from error
    return Trace(head=head, events=tuple(events))


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.rglob(f"{TRACE_NAME}.*.jsonl"))
    if len(found) == 1:
        return found[0]
    held = f"{len(found)} traces: {', '.join(str(each.relative_to(path)) for each in found)}" if found else "no trace"
    msg = (
        f"{path} holds {held}. Expected one trace's file, as MemoryMonitor(logdir=...) writes with `trace_steps: 50` under "
        "`monitor` in its preset."
    )
    raise SimulationError(msg)


def _object(line: str) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except RecursionError as error:
        msg = "it is nested too deeply"
        raise ValueError(msg) from error
    if not isinstance(read, dict):
        msg = "it is no object"
        raise ValueError(msg)  # noqa: TRY004 - to its reader a line that is none, like every other
    return cast("dict[str, Any]", read)


def _not_a_trace(file: Path, number: int, line: str, why: str) -> str:
    line = without_secrets(line)
    shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
    return (
        f"{file}:{number}: {shown!r} is no line of a trace: {why}. Expected what MemoryMonitor with `trace_steps` writes; "
        f"`{advise('command.typed', typed='simulate --list')}` names the traces that come with the package."
    )
