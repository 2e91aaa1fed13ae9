"""Memory over time: the highs of a run's windows, limits, programs' needs and events enter, one drawn PNG leaves.

matplotlib is imported when the first figure is drawn; each drawing has its own Figure and canvas, so pyplot's state is untouched.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmem_callbacks.analysis.saves import DURING
from jaxmem_callbacks.analysis.timeseries import Point
from jaxmem_callbacks.records.readings import CheckpointSave
from jaxmem_callbacks.records.runs import EventKind, MemoryEvent
from jaxmem_callbacks.records.units import GIB, MIB
from jaxmem_callbacks.writers.markdown import event_title
from jaxmem_callbacks.writers.protocol import Picture

TAG = "memory/over_time"
_SIZE = (840, 600)  # pixels; TensorBoard shows images at less than half this width, so the letters are large for it
_DPI = 120
DEVICE_LINES = {
    "memory/in_use_gib": ("in use", "#1f77b4"),
    "memory/peak_since_start_gib": ("peak since start", "#08306b"),
    "memory/pool_gib": ("pool", "#9ecae1"),
    "memory/live_arrays_gib": ("live arrays", "#2ca02c"),
    "memory/device_used_gib": ("whole device (driver)", "#bdbdbd"),
}
_MOST_PROGRAMS = 4
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
    device, host = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_device(device, points, limit_bytes, needs or {})
    _draw_line(host, points, HOST, GIB, label="host, resident", color="#7f7f7f")
    _shade(device, host, saves)
    _mark_events(device, host, events)
    _name_axes(figure, device, host)
    several = "; of several devices the highest is named" if any(point.places for point in points) else ""
    device.set_title(f"Highest value of each window; {_told(events)}{several}", fontsize="small", loc="left")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    last = points[-1]
    return Picture(tag=TAG, step=last.step, time_s=last.time_s, png=file.getvalue(), width=_SIZE[0], height=_SIZE[1])


def _draw_device(axes: Any, points: Sequence[Point], limit_bytes: int | None, needs: Mapping[str, int]) -> None:
    highest = max((point.highs.get(tag, 0.0) * GIB for point in points for tag in DEVICE_LINES), default=0.0)
    unit = GIB if max(highest, limit_bytes or 0, *needs.values(), 0) >= GIB else MIB
    for tag, (label, colour) in DEVICE_LINES.items():
        _draw_line(axes, points, tag, unit, label=label + _place(points, tag), color=colour)
    largest = sorted(needs.items(), key=lambda item: -item[1])
    for number, (name, need) in enumerate(largest[:_MOST_PROGRAMS]):
        axes.axhline(need / unit, linestyle=":", color=f"C{4 + number % 5}", label=f"{name} needs (compiler)")
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, linestyle="--", color="#d62728", label="limit")
    axes.set_ylabel("device, GiB" if unit == GIB else "device, MiB")


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
        label = None if event.kind in named else f"event: {event_title(event.kind).lower()}"
        named.add(event.kind)
        for axes in (device, host):
            style = {"color": EVENT_COLOURS.get(event.kind, "#000000"), "linewidth": 1.2, "alpha": 0.8}
            axes.axvline(max(event.step, 0), label=label if axes is device else None, **style)


def _name_axes(figure: Any, device: Any, host: Any) -> None:
    host.set_ylabel("host, GiB")
    figure.align_ylabels()
    host.set_xlabel("step")
    for axes in (device, host):
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.grid(visible=True, alpha=0.3)
    handles, labels = device.get_legend_handles_labels()
    for ncols in (3, 2, 1) if handles else ():
        legend = figure.legend(
            handles, labels, loc="outside upper center", ncols=ncols, frameon=False, fontsize="small"
        )
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()  # names of programs can be long, and what reaches over the edge is cut off
