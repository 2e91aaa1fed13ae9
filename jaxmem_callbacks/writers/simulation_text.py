"""A simulation enters; a table with the way to take in plain text, or the same as JSON, leaves."""

from __future__ import annotations

import dataclasses
import json

from jaxmem_callbacks.records.terminal import columns
from jaxmem_callbacks.records.traces import AllocationFailure, Simulated, Simulation
from jaxmem_callbacks.records.units import format_bytes

_HEAD = ("", "outcome", "peak in use", "least block", "")
_SIDES = ("left", "left", "right", "right", "left")


def simulation_text(found: Simulation) -> str:
    """What each way leads to, why runs end, and which way to take."""
    head = found.head
    of = f"{head.source}{f' on {head.device}' if head.device else ''}"
    lines = [f"{head.name} ({of}) on a device of {format_bytes(found.device_bytes)}", ""]
    lines += [f"  {sentence}" for sentence in head.tells]
    lines += ["", *columns([_HEAD, *map(_row, found.rows)], _SIDES), ""]
    lines += [
        "Peak in use is what the allocator gave out at most. Least block is the largest block that could still be had, when it",
        "was smallest. * is modelled without its source, at its best: it may fail earlier.",
    ]
    unknown = sorted({name for row in found.rows for name in row.timeline.unknown_temporaries})
    if unknown:
        lines.append(f"! The temporaries of {', '.join(unknown)} are unknown and left out: each outcome may be worse.")
    lines += [f"! {sentence}" for sentence in head.blind]
    return "\n".join([*lines, "", *_advice(found)])


def failure_words(failure: AllocationFailure) -> str:
    """Why a run ended: what asked for how much, what was free, and why it did not fit."""
    asked = f"{failure.what} asked for {format_bytes(failure.asked_bytes)}"
    free = f"{format_bytes(failure.free_bytes)} were free"
    if failure.why == "capacity":
        return f"{asked}, and {free} in all"
    return f"{asked}; {free}, {format_bytes(failure.largest_block_bytes)} of it in one piece"


def simulation_json(found: Simulation) -> str:
    """Every figure, bytes as integers."""
    rows = [{**dataclasses.asdict(row), "survived": row.timeline.survived} for row in found.rows]
    advised = found.advised
    told = {
        "trace": dataclasses.asdict(found.head),
        "device_bytes": found.device_bytes,
        "rows": rows,
        "advised": None if advised is None else advised.name,
    }
    return json.dumps(told, indent=1)


def _row(row: Simulated) -> tuple[str, ...]:
    timeline, failure = row.timeline, row.timeline.failure
    outcome = "survives" if failure is None else f"fails at step {failure.step}: {failure.why}"
    times = len(timeline.defragmented)
    moved = f"defragmented {times} {'time' if times == 1 else 'times'}" if times else ""
    return (
        f"{row.name}{' *' if row.modelled else ''}",
        outcome,
        format_bytes(timeline.peak_in_use_bytes),
        format_bytes(timeline.least_block_bytes),
        moved,
    )


def _advice(found: Simulation) -> list[str]:
    advised = found.advised
    first = next((row for row in found.rows if row.timeline.failure is not None), None)
    lines: list[str] = []
    if first is not None and first.timeline.failure is not None:
        lines.append(f"Why {first.name} fails: {failure_words(first.timeline.failure)}.")
    if advised is None:
        return [*lines, "None of these survives: the run needs less memory, or a larger device."]
    if not advised.line:
        return [*lines, "Take JAX's default: the run survives, and there is nothing to set."]
    return [*lines, f"Take {advised.name}:", *(f"    {line}" for line in advised.line.splitlines())]
