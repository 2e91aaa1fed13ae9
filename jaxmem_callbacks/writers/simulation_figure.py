"""A simulation enters; a figure of the largest block that could be had over the steps, a line for each way, leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.files import replacing
from jaxmem_callbacks.records.traces import Simulated, Simulation
from jaxmem_callbacks.records.units import GIB, format_bytes

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
    """Write it to a file whose ending says its kind.

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
