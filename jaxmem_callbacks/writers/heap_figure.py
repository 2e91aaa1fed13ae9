"""Heap figure: a HeapMap enters, one drawn PNG leaves: memory by address, a colour for each kind of array, holes in grey."""

from __future__ import annotations

import io
import math
from typing import Any

from jaxmem_callbacks.analysis.availability import HEAP_MAP
from jaxmem_callbacks.analysis.heap_map import BREAK, HOLE, HeapLayout, cells_of, layout_of
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.protocol import Picture

_SIZE = (840, 600)  # pixels; TensorBoard shows images at less than half this width, so the letters are large for it
_DPI = 120
_COLUMNS, _ROWS = 64, 36
_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#d62728", "#5b6770"),
)
_HOLE_COLOUR, _BREAK_COLOUR = "#e4e4e4", "#ffffff"
_LONGEST = 22
_FAR = 2**38  # a GPU's pools lie farther apart than any GPU is large


def draw_heap(heap: HeapMap) -> Picture | None:
    """Draw one device's map; None when it holds nothing that could be drawn."""
    if not heap.buffers:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    on_host = heap.device.startswith("cpu")
    layout = layout_of(heap.buffers, most_groups=7, apart_bytes=None if on_host else _FAR)
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
            label=f"{_short(group.label)}\n{group.count} x, {format_bytes(group.bytes)}",
        )
        for number, group in enumerate(layout.groups)
    ]
    words = "other memory\nof the process" if on_host else "no live array:\nfree or a program's"
    handles.append(Patch(facecolor=_HOLE_COLOUR, edgecolor="#bbbbbb", label=words))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small")


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 3]}..."
