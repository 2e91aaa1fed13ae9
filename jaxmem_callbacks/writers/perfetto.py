"""A step's bytes over its schedule in the trace format that Perfetto and Chrome open: a counter, and each block with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.peaks import StepBlock, StepSchedule, short_operation, short_shape
from jaxmem_callbacks.records.secrets import scrubbed

_OPERATION = 60  # letters of a slice's name
_COUNTER, _HELD = "bytes on one device", "held throughout"
_REMARK = (
    "Bytes of a program over its schedule, by the compiler's buffer assignment. Time is the position in the schedule, one "
    "microsecond each, and no measured time: loop bodies stand there once. The largest blocks by bytes and positions are here."
)


def write_trace_of_steps(path: Path, schedules: Mapping[str, StepSchedule]) -> None:
    """Write the schedules of programs, by name, as one file.

    Raises:
        RunFileError: it cannot be written.
    """
    try:
        write_file(path, json.dumps(scrubbed(trace_of_steps(schedules)), separators=(",", ":")), private=True)
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}. Is its folder there?"
        raise RunFileError(msg) from error


def trace_of_steps(schedules: Mapping[str, StepSchedule]) -> dict[str, Any]:
    """The file's content: each program is a process, each group of blocks as many threads as it has blocks at once."""
    events = [
        event for pid, (name, each) in enumerate(schedules.items(), start=1) for event in _program(pid, name, each)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"remark": _REMARK}}


def _program(pid: int, name: str, schedule: StepSchedule) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, name)
    points = [*schedule.curve, (schedule.length, schedule.curve[-1][1] if schedule.curve else schedule.held_bytes)]
    for position, size in points:
        yield {"ph": "C", "name": _COUNTER, "pid": pid, "tid": 0, "ts": position, "args": {"bytes": size}}
    yield {"ph": "i", "name": "peak of the temporaries", "s": "p", "pid": pid, "tid": 0, "ts": schedule.peak_at}
    yield _named("thread_name", pid, 1, "arguments, results and constants")
    held = {"bytes": schedule.held_bytes}
    yield {"ph": "X", "name": _HELD, "cat": _HELD, "pid": pid, "tid": 1, "ts": 0, "dur": schedule.length, "args": held}
    tid = 1
    for group in dict.fromkeys(block.buffer.group for block in schedule.blocks):
        for lane in _lanes([block for block in schedule.blocks if block.buffer.group == group]):
            tid += 1
            yield _named("thread_name", pid, tid, group)
            for block in lane:
                yield _slice(pid, tid, block)


def _lanes(blocks: Sequence[StepBlock]) -> list[list[StepBlock]]:
    """Blocks in lanes of which no two overlap, as slices of one thread must not."""
    lanes: list[list[StepBlock]] = []
    for block in sorted(blocks, key=lambda each: (each.first, -each.buffer.bytes)):
        free = next((lane for lane in lanes if lane[-1].last < block.first), None)
        if free is None:
            lanes.append([block])
        else:
            free.append(block)
    return lanes


def _slice(pid: int, tid: int, block: StepBlock) -> dict[str, Any]:
    buffer = block.buffer
    shape = short_shape(buffer.shape)
    known = {
        "bytes": buffer.bytes,
        "shape": buffer.shape,
        "source": buffer.source,
        "operation": buffer.operation,
        "kind": buffer.kind,
        "why": buffer.why,
        "base": block.base,
    }
    return {
        "ph": "X",
        "name": f"{shape} {short_operation(buffer.operation or '', _OPERATION)}".strip(),
        "cat": buffer.group,
        "pid": pid,
        "tid": tid,
        "ts": block.first,
        "dur": block.last - block.first + 1,
        "args": {name: value for name, value in known.items() if value is not None},
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
