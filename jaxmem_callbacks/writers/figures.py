"""Figures of a run: memory over time, and the heap by address."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmem_callbacks.analysis.figures import Point
from jaxmem_callbacks.analysis.heap_map import BREAK, HOLE, HeapLayout, cells_of, layout_of
from jaxmem_callbacks.analysis.run_summary import DURING, HEAP_MAP
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.runs import CheckpointSave, EventKind, MemoryEvent
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.events import event_title
from jaxmem_callbacks.writers.protocol import Picture

# Pixels. TensorBoard shows a picture 350 pixels wide, and leaves out rows and columns for it: of each two just one. So letters
# are of twice the size that can be read, and lines two pixels wide or more.
_SIZE = (700, 660)
_DPI = 175
_COLUMNS, _ROWS = 64, 36
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#d62728", "#5b6770"),
)
_HOLE_COLOUR, _BREAK_COLOUR = "#e4e4e4", "#ffffff"
_LONGEST = 22
_FAR = 2**38  # a GPU's pools are farther apart than any GPU is large


def draw_heap(heap: HeapMap) -> Picture | None:
    """Draw one device's map; None when it holds nothing that could be drawn."""
    if not heap.buffers:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    on_host = heap.device.startswith("cpu")
    layout = layout_of(heap.buffers, most_groups=5, apart_bytes=None if on_host else _FAR)
    figure = Figure(figsize=(_SIZE[0] / _DPI, _SIZE[1] / _DPI), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    _draw_cells(axes, layout)
    head = f"Live arrays by address: {heap.device}, step {max(heap.step, 0)}"
    figure.suptitle("\n".join([head, *_summary(heap, layout, on_host=on_host)]), fontsize="small", x=0.02, ha="left")
    _list_groups(axes, layout, on_host=on_host)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Picture(
        tag=HEAP_MAP, step=heap.step, time_s=heap.time_s, png=file.getvalue(), width=_SIZE[0], height=_SIZE[1]
    )


def _draw_cells(axes: Any, layout: HeapLayout) -> None:
    import numpy as np
    from matplotlib.colors import to_rgb

    cells, width = cells_of(layout, _COLUMNS * _ROWS)
    rows = max(math.ceil(len(cells) / _COLUMNS), 1)
    colours = {number: to_rgb(_COLOURS[number % len(_COLOURS)]) for number in range(len(layout.groups))}
    colours |= {HOLE: to_rgb(_HOLE_COLOUR), BREAK: to_rgb(_BREAK_COLOUR)}
    padded = [*cells, *[BREAK] * (rows * _COLUMNS - len(cells))]
    picture = np.array([colours[cell] for cell in padded]).reshape(rows, _COLUMNS, 3)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, _COLUMNS, rows, 0))
    axes.set_xticks([])
    step = max(rows // 5, 1)
    axes.set_yticks(range(0, rows, step), [format_bytes(round(row * _COLUMNS * width)) for row in range(0, rows, step)])
    axes.tick_params(labelsize="small")
    axes.set_ylabel("from the lowest address", fontsize="small")
    axes.set_xlabel(f"a row is {format_bytes(round(_COLUMNS * width))}, left to right", fontsize="small")


def _summary(heap: HeapMap, layout: HeapLayout, *, on_host: bool) -> list[str]:
    held = f"{format_bytes(layout.held_bytes)} in {layout.buffers} buffer{'s' * (layout.buffers != 1)}"
    if len(layout.regions) > 1:
        held += f" in {len(layout.regions)} regions, white between"
    if not on_host:
        holes = f"{format_bytes(layout.hole_bytes)} between, largest {format_bytes(layout.largest_hole_bytes)}"
        held += f"; {holes}"
    if not heap.left_out_count:
        return [held]
    return [held, f"not drawn: {heap.left_out_count} still being computed, {format_bytes(heap.left_out_bytes)}"]


def _list_groups(axes: Any, layout: HeapLayout, *, on_host: bool) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            color=_COLOURS[number % len(_COLOURS)],
            label=f"{_short(group.label)}, {group.count} x, {format_bytes(group.bytes)}",
        )
        for number, group in enumerate(layout.groups)
    ]
    words = "other memory of the process" if on_host else "no live array: free or a program's"
    handles.append(Patch(facecolor=_HOLE_COLOUR, edgecolor="#bbbbbb", label=words))
    axes.figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize="small")


def _short(label: str, longest: int = _LONGEST) -> str:
    return label if len(label) <= longest else f"{label[: longest - 3]}..."


TAG = "memory/over_time"
DEVICE_LINES = {
    "memory/in_use_gib": ("in use", "#1f77b4"),
    "memory/peak_since_start_gib": ("peak since start", "#08306b"),
    "memory/pool_gib": ("pool", "#9ecae1"),
    "memory/live_arrays_gib": ("live arrays", "#2ca02c"),
    "memory/device_used_gib": ("whole device (driver)", "#bdbdbd"),
}
_MOST_PROGRAMS = 4
_UNITS = {GIB: "GiB", MIB: "MiB"}
HOST = "memory/host_gib"
EVENT_COLOURS: dict[EventKind, str] = {
    "near_oom": "#d62728",
    "fragmentation": "#9467bd",
    "growth": "#bcbd22",
    "donation_lost": "#17becf",
    "recompilation": "#ff7f0e",
    "replication": "#7f7f7f",
    "imbalance": "#393b79",
    "plan_stale": "#8c564b",
    "prediction_off": "#e377c2",
    "recovery": "#2ca02c",
    "out_of_memory": "#a50026",
}


def draw_over_time(
    points: Sequence[Point],
    events: Sequence[MemoryEvent],
    *,
    limit_bytes: int | None = None,
    needs: Mapping[str, int] | None = None,
    saves: Iterable[CheckpointSave] = (),
) -> Picture | None:
    """Draw device memory above host memory, by step.

    Args:
        points: Highest values of each window, oldest first.
        events: Marked at their steps.
        limit_bytes: Drawn as a line, in bytes.
        needs: Program name -> bytes of one step by its compiler; drawn as lines.
        saves: Shaded.

    Returns:
        The picture, or None when there is nothing to draw.
    """
    if not points:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] / _DPI, _SIZE[1] / _DPI), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    device, host = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_device(device, points, limit_bytes, needs or {})
    unit = _unit_of(point.highs.get(HOST, 0.0) * GIB for point in points)
    _draw_line(host, points, HOST, unit, label="host, resident", color="#7f7f7f")
    host.set_ylabel(f"host,\n{_UNITS[unit]}", fontsize="small")
    _shade(device, host, saves)
    _mark_events(device, host, events)
    _name_axes(figure, device, host)
    several = ";\nof several devices the highest is named" if any(point.places for point in points) else ""
    device.set_title(f"Highest value of each window; {_told(events)}{several}", fontsize="small", loc="left")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    last = points[-1]
    return Picture(tag=TAG, step=last.step, time_s=last.time_s, png=file.getvalue(), width=_SIZE[0], height=_SIZE[1])


def _draw_device(axes: Any, points: Sequence[Point], limit_bytes: int | None, needs: Mapping[str, int]) -> None:
    drawn = (point.highs.get(tag, 0.0) * GIB for point in points for tag in DEVICE_LINES)
    unit = _unit_of((*drawn, *needs.values(), limit_bytes or 0))
    for tag, (label, colour) in DEVICE_LINES.items():
        _draw_line(axes, points, tag, unit, label=label + _place(points, tag), color=colour)
    largest = sorted(needs.items(), key=lambda item: -item[1])
    for number, (name, need) in enumerate(largest[:_MOST_PROGRAMS]):
        axes.axhline(need / unit, linestyle=":", color=f"C{4 + number % 5}", label=f"{_short(name, 15)} needs")
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, linestyle="--", color="#d62728", label="limit")
    axes.set_ylabel(f"device, {_UNITS[unit]}", fontsize="small")


def _unit_of(sizes: Iterable[float]) -> int:
    """In which an axis is written that has these bytes."""
    return GIB if max(sizes, default=0) >= GIB else MIB


def _place(points: Sequence[Point], tag: str) -> str:
    """Which device had the highest value of all, where there are several."""
    known = [point for point in points if tag in point.highs]
    highest = max(known, key=lambda point: point.highs[tag], default=None)
    place = "" if highest is None else highest.places.get(tag, "")
    return f", {place}" if place else ""


def _draw_line(axes: Any, points: Sequence[Point], tag: str, unit: int, **style: Any) -> None:
    known = [(max(point.step, 0), point.highs[tag] * GIB / unit) for point in points if tag in point.highs]
    if known:
        steps, values = zip(*known, strict=True)
        axes.plot(steps, values, linewidth=1.6, marker="." if len(known) == 1 else None, **style)


def _told(events: Sequence[MemoryEvent]) -> str:
    return f"{len(events)} event{'' if len(events) == 1 else 's'}" if events else "no event"


def _shade(device: Any, host: Any, saves: Iterable[CheckpointSave]) -> None:
    for number, save in enumerate(saves):
        span = max(save.first_step, 0), max(save.step, 0)
        for axes in (device, host):
            label = DURING if number == 0 and axes is device else None
            axes.axvspan(*span, label=label, facecolor="#ffd54f", edgecolor="#ffd54f", alpha=0.4, linewidth=1.5)


def _mark_events(device: Any, host: Any, events: Sequence[MemoryEvent]) -> None:
    named: set[EventKind] = set()
    for event in events:
        label = None if event.kind in named else event_title(event.kind).lower()
        named.add(event.kind)
        for axes in (device, host):
            style = {"color": EVENT_COLOURS.get(event.kind, "#000000"), "linewidth": 1.2, "alpha": 0.8}
            axes.axvline(max(event.step, 0), label=label if axes is device else None, **style)


def _name_axes(figure: Any, device: Any, host: Any) -> None:
    figure.align_ylabels()
    host.set_xlabel("step", fontsize="small")
    for axes in (device, host):
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.grid(visible=True, alpha=0.3)
        axes.tick_params(labelsize="small")
    handles, labels = device.get_legend_handles_labels()
    for ncols in (2, 1) if handles else ():
        legend = figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=ncols,
            frameon=False,
            fontsize="small",
            handlelength=1.4,
            columnspacing=1.0,
        )
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()  # names of programs can be long, and what reaches over the edge is cut off
