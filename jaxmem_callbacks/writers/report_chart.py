"""Memory over time as SVG for a page: the highs of a run's windows, limit, needs and events enter; marks with classes leave.

Colours are the page's, by class, so that it is readable on light, dark and paper. Every text that the user gave is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.analysis.saves import DURING
from jaxmem_callbacks.analysis.timeseries import Point
from jaxmem_callbacks.records.readings import CheckpointSave
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.html_text import escape
from jaxmem_callbacks.writers.markdown import event_title
from jaxmem_callbacks.writers.over_time import DEVICE_LINES, HOST

_WIDTH, _LEFT, _RIGHT, _TOP = 960, 64, 16, 22
_DEVICE, _HOST, _GAP, _BOTTOM = 280, 84, 22, 40
_HEIGHT = _TOP + _DEVICE + _GAP + _HOST + _BOTTOM
_TICKS, _FEW_TICKS = 5, 2
_APART = 16  # pixels between two numbers of events, or two names of lines
_LETTERS = 40
_NEEDS = 6  # lines of programs that are drawn: those that need most


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Where values lie: from 0 or the first step to the highest, in pixels; ``unit`` in the values' own unit."""

    low: float
    high: float
    start: float
    end: float
    unit: float = 1.0

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def chart_html(
    points: Sequence[Point],
    events: Sequence[MemoryEvent],
    *,
    limit_bytes: int | None = None,
    needs: Mapping[str, int] | None = None,
    saves: Collection[CheckpointSave] = (),
) -> str:
    """Device memory above host memory, by step, with its legend; an empty text where there is nothing to draw.

    Args:
        points: Highest values of each window, oldest first.
        events: Marked at their steps, by their number from 1.
        limit_bytes: Drawn as a line.
        needs: Program name -> bytes of one step by its compiler; drawn as lines.
        saves: Shaded.
    """
    if not points:
        return ""
    shown = dict(sorted((needs or {}).items(), key=lambda each: -each[1])[:_NEEDS])
    steps = [max(point.step, 0) for point in points] + [max(event.step, 0) for event in events]
    across = _Scale(low=min(steps), high=max(*steps, min(steps) + 1), start=_LEFT, end=_WIDTH - _RIGHT)
    highest = max((point.highs.get(tag, 0.0) * GIB for point in points for tag in DEVICE_LINES), default=0.0)
    device = _upwards(max(highest, limit_bytes or 0, *shown.values(), 0), _TOP, _DEVICE)
    host = _upwards(
        max((point.highs.get(HOST, 0.0) * GIB for point in points), default=0.0), _TOP + _DEVICE + _GAP, _HOST
    )
    marks = [
        *_saves(saves, across),
        *_axis(device, "device", _TICKS),
        *_axis(host, "host", _FEW_TICKS),
        *_steps(across),
        *_lines(points, across, device, host),
        *_levels(device, limit_bytes, shown),
        *_events(events, across),
    ]
    label = "Highest device memory and host memory by step, with limit, needs of programs and events"
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
    return f'<figure class="chart">{head}{"".join(marks)}</svg>{_legend(points, limit_bytes, shown, events, saves)}</figure>'


def _upwards(highest: float, top: float, height: float) -> _Scale:
    unit = GIB if highest >= GIB else MIB
    return _Scale(low=0, high=max(highest * 1.05, 1), start=top + height, end=top, unit=unit)


def nice_ticks(high: float, count: int) -> list[float]:
    """Round numbers from 0 to at most ``high``, about ``count`` of them."""
    if high <= 0:
        return [0.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    each = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [each * number for number in range(math.floor(high / each * (1 + 1e-9)) + 1)]


def _axis(scale: _Scale, name: str, count: int) -> Iterator[str]:
    unit = "GiB" if scale.unit == GIB else "MiB"
    for value in nice_ticks(scale.high / scale.unit, count):
        y = scale.at(value * scale.unit)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    middle = (scale.start + scale.end) / 2
    yield f'<text class="tick" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{name}, {unit}</text>'


def _steps(across: _Scale) -> Iterator[str]:
    y = _HEIGHT - _BOTTOM
    ticks = [value + across.low for value in nice_ticks(across.high - across.low, 8)]
    for value in (tick for tick in ticks if float(tick).is_integer()):
        yield f'<text class="tick" x="{across.at(value):.1f}" y="{y + 16}" text-anchor="middle">{round(value):,}</text>'
    yield f'<text class="tick" x="{(_LEFT + _WIDTH) / 2:.0f}" y="{y + 34}" text-anchor="middle">step</text>'


def _lines(points: Sequence[Point], across: _Scale, device: _Scale, host: _Scale) -> Iterator[str]:
    for number, tag in enumerate(DEVICE_LINES):
        yield _line(points, tag, f"line-{number}", across, device)
    yield _line(points, HOST, "line-host", across, host)


def _line(points: Sequence[Point], tag: str, style: str, across: _Scale, up: _Scale) -> str:
    places = [
        f"{across.at(max(point.step, 0)):.1f},{up.at(point.highs[tag] * GIB):.1f}"
        for point in points
        if tag in point.highs
    ]
    if len(places) == 1:
        x, _, y = places[0].partition(",")
        return f'<circle class="dot {style}" cx="{x}" cy="{y}" r="3"/>'
    return f'<polyline class="{style}" points="{" ".join(places)}"/>' if places else ""


def _levels(device: _Scale, limit_bytes: int | None, needs: Mapping[str, int]) -> Iterator[str]:
    levels = [] if limit_bytes is None else [("limit", limit_bytes, "limit")]
    named: list[float] = []
    for name, size, style in [*levels, *((name, need, "need") for name, need in needs.items())]:
        y = device.at(size)
        line = f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
        yield f"{line}<title>{escape(name)}: {format_bytes(size)}</title></line>"
        if all(abs(y - other) >= _APART for other in named):  # of names that would cover each other the first is shown
            named.append(y)
            words = name if len(name) <= _LETTERS else f"{name[:_LETTERS]}..."
            place = f'x="{_WIDTH - _RIGHT - 6}" y="{y - 4:.1f}" text-anchor="end"'
            yield f'<text class="{style}-name" {place}>{escape(words)}</text>'


def _saves(saves: Collection[CheckpointSave], across: _Scale) -> Iterator[str]:
    for save in saves:
        first, last = (min(max(step, across.low), across.high) for step in (save.first_step, save.step))
        x, width = across.at(first) - 1, max(across.at(last) - across.at(first), 2)
        words = f"{DURING}, {save.time_s - save.began_s:.1f} s after step {save.first_step}"
        place = f'x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _BOTTOM - _TOP}"'
        yield f'<rect class="save" {place}><title>{words}</title></rect>'


def _events(events: Sequence[MemoryEvent], across: _Scale) -> Iterator[str]:
    last = -math.inf
    for number, event in enumerate(events, start=1):
        x = across.at(max(event.step, 0))
        words = escape(f"{number}. {event_title(event.kind)} at step {event.step}: {event.message}")
        line = f'<line class="event" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        yield f"{line}<title>{words}</title></line>"
        if abs(x - last) >= _APART:
            last = x
            yield f'<text class="event-number" x="{x:.1f}" y="{_TOP - 7}" text-anchor="middle">{number}</text>'


def _legend(
    points: Sequence[Point],
    limit_bytes: int | None,
    needs: Mapping[str, int],
    events: Sequence[MemoryEvent],
    saves: Collection[CheckpointSave],
) -> str:
    def known(tag: str) -> bool:
        return any(tag in point.highs for point in points)

    rows = [(f"line-{n}", label) for n, (tag, (label, *_)) in enumerate(DEVICE_LINES.items()) if known(tag)]
    rows += [("line-host", "host, resident")] * known(HOST)
    rows += [("limit", f"limit, {format_bytes(limit_bytes)}")] * (limit_bytes is not None)
    rows += [("need", f"{name} needs {format_bytes(need)}, by its compiler") for name, need in needs.items()]
    rows += [("save", DURING)] * bool(saves)
    rows += [("event", "events, by their number below")] * bool(events)
    key: Callable[[str], str] = (
        '<svg class="key" viewBox="0 0 24 10"><line class="{}" x1="0" x2="24" y1="5" y2="5"/></svg>'.format
    )
    body = "".join(f"<li>{key(style)} {escape(words)}</li>" for style, words in rows)
    return f'<figcaption><ul class="legend">{body}</ul></figcaption>'
