"""A simulation as a table, as JSON and as a figure."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem_callbacks.records.documents import Block, Bullets, Code, Document, Side, Table
from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.files import replacing
from jaxmem_callbacks.records.traces import AllocationFailure, Simulated, Simulation
from jaxmem_callbacks.records.units import GIB, format_bytes

_HEAD = ("", "outcome", "peak in use", "least block", "")
_SIDES: tuple[Side, ...] = ("left", "left", "right", "right", "left")


def simulation_document(found: Simulation) -> Document:
    """What each way leads to, why runs end, and which way to take."""
    head = found.head
    of = f"{head.source}{f' on {head.device}' if head.device else ''}"
    unknown = sorted({name for row in found.rows for name in row.timeline.unknown_temporaries})
    legend = (
        "Peak in use is what the allocator gave out at most. Least block is the largest block that could still be had, when it "
        "was smallest. * is modelled without its source, at its best: it may fail earlier."
    )
    left_out = f"The temporaries of {', '.join(unknown)} are unknown and left out: each outcome may be worse."
    return Document(
        [
            f"{head.name} ({of}) on a device of {format_bytes(found.device_bytes)}",
            Bullets(head.tells, mark=" "),
            Table(_HEAD, [_row(row) for row in found.rows], _SIDES),
            legend,
            Bullets([*([left_out] if unknown else []), *head.blind], mark="!"),
            *_advice(found),
        ]
    )


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
    content = {
        "trace": dataclasses.asdict(found.head),
        "device_bytes": found.device_bytes,
        "rows": rows,
        "advised": None if advised is None else advised.name,
    }
    return json.dumps(content, indent=1)


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


def _advice(found: Simulation) -> Iterator[Block]:
    advised = found.advised
    first = next((row for row in found.rows if row.timeline.failure is not None), None)
    if first is not None and first.timeline.failure is not None:
        yield f"Why {first.name} fails: {failure_words(first.timeline.failure)}."
    if advised is None:
        yield "None of these survives: the run needs less memory, or a larger device."
    elif not advised.line:
        yield "Take JAX's default: the run survives, and there is nothing to set."
    else:
        yield f"Take {advised.name}:"
        yield Code(advised.line.splitlines())


_SIZE = (9.0, 5.0)  # inches
_DPI = 110
_COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#5b6770",
    "#bcbd22",
    "#d62728",
)


def simulation_figure(found: Simulation) -> Any:
    """Draw it. Ways whose lines are the same share one.

    Returns:
        A ``matplotlib.figure.Figure``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes: Any = figure.add_subplot()
    for number, rows in enumerate(_alike(found)):
        _draw_line(axes, rows, number)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("largest block that could be had, GiB")
    axes.grid(visible=True, alpha=0.3)
    device = format_bytes(found.device_bytes)
    axes.set_title(
        f"{found.head.name} on a device of {device}: the largest block, at its smallest in each step",
        fontsize="medium",
    )
    figure.legend(loc="outside lower center", ncols=1, fontsize="small", frameon=False)
    return figure


def save_figure(found: Simulation, path: str | os.PathLike[str]) -> None:
    """Write it to a file whose ending gives its kind.

    Raises:
        SimulationError: it cannot be written.
    """
    try:
        with replacing(Path(path)) as file:
            simulation_figure(found).savefig(file, format=Path(path).suffix[1:] or "png")
    except (OSError, ValueError) as error:
        msg = (
            f"{os.fspath(path)} cannot be written: {error}. Name a .png in a folder that is there: --figure blocks.png."
        )
        raise SimulationError(msg) from error


def _alike(found: Simulation) -> list[list[Simulated]]:
    """The ways by their lines, in order."""
    groups: dict[Any, list[Simulated]] = {}
    for row in found.rows:
        failure = row.timeline.failure
        line = tuple((point.step, point.least_block_bytes) for point in row.timeline.points)
        groups.setdefault((line, failure and (failure.step, failure.why)), []).append(row)
    return list(groups.values())


def _draw_line(axes: Any, rows: list[Simulated], number: int) -> None:
    timeline, colour = rows[0].timeline, _COLOURS[number % len(_COLOURS)]
    steps = [point.step for point in timeline.points]
    blocks = [point.least_block_bytes / GIB for point in timeline.points]
    failure = timeline.failure
    outcome = "survives"
    if failure is not None:
        outcome = f"fails at step {failure.step}: {failure.why}, asked for {format_bytes(failure.asked_bytes)}"
    names = "; ".join(f"{row.name}{' *' if row.modelled else ''}" for row in rows)
    dots = "." if len(steps) <= 2 else ""  # noqa: PLR2004 - a line needs two ends
    axes.plot(steps, blocks, color=colour, linewidth=1.6, label=f"{names}: {outcome}", marker=dots)
    if failure is not None:
        axes.plot(steps[-1:], blocks[-1:], color=colour, marker="X", markersize=9, linestyle="")
