"""The report of runs: one self-contained HTML page."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.analysis.figures import Point
from jaxmem_callbacks.analysis.run_summary import COLUMNS, DURING, High, RunSummary, plan_row
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.readings import CheckpointSave
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.figures import DEVICE_LINES, HOST
from jaxmem_callbacks.writers.markdown import escape, event_figures, event_title
from jaxmem_callbacks.writers.plan_page import SOURCES_TAG, plan_page
from jaxmem_callbacks.writers.plan_table import plan_html
from jaxmem_callbacks.writers.protocol import Picture, Table

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c1f23; --soft: #59616b; --rule: #d5dae0; --band: #f4f6f8;
  --line-0: #1f6fb2; --line-1: #0b2f5e; --line-2: #7d9fbd; --line-3: #2a7d2e; --line-4: #9a9a9a; --host: #6b6b6b;
  --need: #8a5a00; --limit: #c02222;
  --event: #c02222; --act: #fff6e0; --act-edge: #c98a00; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e6e9ec; --soft: #a3acb6; --rule: #353c44; --band: #1d2227;
  --line-0: #6cb2eb; --line-1: #c3def5; --line-2: #7088a0; --line-3: #74c476; --line-4: #8a8a8a; --host: #a8a8a8;
  --need: #e0b050; --limit: #ff7b72;
  --event: #ff7b72; --act: #2b2415; --act-edge: #c98a00; --link: #79b8ff; } }
@media print { :root { color-scheme: light;
  --paper: #ffffff; --ink: #000000; --soft: #444444; --rule: #bbbbbb; --band: #ffffff;
  --line-0: #1f6fb2; --line-1: #0b2f5e; --line-2: #7d9fbd; --line-3: #2a7d2e; --line-4: #9a9a9a; --host: #6b6b6b;
  --need: #8a5a00; --limit: #c02222;
  --event: #c02222; --act: #ffffff; --act-edge: #888888; --link: #000000; }
  main { max-width: none; padding: 0; } a { text-decoration: none; }
  .scroll { overflow: visible; } table { font-size: 8.5pt; }
  figure, .event-card, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .run + .run { break-before: page; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 10px; } h2 { font-size: 20px; margin: 40px 0 6px; }
h3 { font-size: 16px; margin: 30px 0 8px; }
h1, h2, h3, p, li, td, dd { overflow-wrap: anywhere; }
a { color: var(--link); }
.lead { font-size: 17px; margin: 0 0 16px; max-width: 76ch; } .soft { color: var(--soft); }
.chart { margin: 18px 0; overflow-x: auto; }
.chart > svg { width: 100%; min-width: 600px; height: auto; display: block; }
.tick { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--rule); stroke-width: 1; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } .key line { stroke-width: 2.5; }
.line-0 { stroke: var(--line-0); } .line-1 { stroke: var(--line-1); } .line-2 { stroke: var(--line-2); }
.line-3 { stroke: var(--line-3); } .line-4 { stroke: var(--line-4); }
.line-host { stroke: var(--host); } .dot { stroke-width: 3; }
.need { stroke: var(--need); stroke-width: 1.6; stroke-dasharray: 2 4; }
.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 8 5; }
.save { fill: var(--act-edge); stroke: var(--act-edge); stroke-width: 1; opacity: 0.25; }
.event { stroke: var(--event); stroke-width: 1.4; }
.limit-name { fill: var(--limit); font-size: 11.5px; } .need-name { fill: var(--need); font-size: 11.5px; }
.event-number { fill: var(--event); font-size: 12px; font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 6px 0 0; padding: 0; color: var(--soft);
  font-size: 13px; }
.key { width: 24px; height: 10px; vertical-align: middle; }
.event-card { border: 1px solid var(--rule); border-left: 4px solid var(--event); border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; }
.event-card p { margin: 4px 0; } .event-card h4 { margin: 0; font-size: 15px; }
.act { background: var(--act); border-left: 3px solid var(--act-edge); padding: 6px 10px; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
table.facts { width: auto; } table.facts td { padding-right: 28px; min-width: 7em; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; } td { font-variant-numeric: tabular-nums; }
tbody tr:nth-child(even) { background: var(--band); }
img.paper { background: #ffffff; max-width: 100%; height: auto; border-radius: 4px; }
footer { margin-top: 44px; border-top: 1px solid var(--rule); padding-top: 10px; color: var(--soft); font-size: 13px; }
"""


# Of these the first that the platform reports is what the run is judged by.
_JUDGED = (
    ("in_use_bytes", "in use"),
    ("live_array_bytes", "of live arrays (no temporaries)"),
    ("resident_bytes", "resident on the host"),
)
_NAMED = 3
_MINUTE, _HOUR = 60, 3600


def happened(story: RunSummary) -> str:
    """One sentence: how long, on what, how much memory, which events, and whether it was closed."""
    parts = [
        f"{_steps(story)}{_duration(story)}{_place(story)}",
        _memory(story),
        _events(story),
        _elsewhere(story),
        _said(story),
    ]
    if not story.ended:
        parts.append("the run has no closing line, so it was killed or is still running")
    return "; ".join(part for part in parts if part) + "."


def _steps(story: RunSummary) -> str:
    first, last = story.span.first_step, story.span.last_step
    if first is None or last is None:
        return "No step was seen"
    if first == last:
        return f"Step {last} was seen"
    return f"Steps {first:,} to {last:,} ran"


def _duration(story: RunSummary) -> str:
    first, last = story.span.first_s, story.span.last_s
    return "" if first is None or last is None else f" in {duration_words(last - first)}"


def duration_words(seconds: float) -> str:
    """``1.5 s``, ``12 min 3 s`` or ``2 h 5 min``."""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def _place(story: RunSummary) -> str:
    devices = story.start.devices if story.start is not None else {}
    if "kind" not in devices:
        return ""
    count = devices.get("count", 1)
    return f" on {count} x {devices['kind']}" if count != 1 else f" on one {devices['kind']}"


def judged(story: RunSummary) -> tuple[str, High] | None:
    """The figure that a run is judged by, in words, and its highest value; None where no memory was read."""
    return next(((words, story.highs[name]) for name, words in _JUDGED if name in story.highs), None)


def _memory(story: RunSummary) -> str:
    found = judged(story)
    if found is None:
        return "no memory was read"
    words, high = found
    limit = story.limit_bytes
    share = f", {high.bytes / limit:.0%} of the limit of {format_bytes(limit)}" if limit and "host" not in words else ""
    when = f"after step {high.step:,}" if high.step >= 0 else "before the first step"
    return f"memory was highest {when} with {format_bytes(high.bytes)} {words}{share}"


def _events(story: RunSummary) -> str:
    if not story.events:
        return "no event was told"
    few = len(story.events) <= _NAMED + 1  # "and 1 more" says no less by saying it
    told = story.events if few else story.events[:_NAMED]
    shown = [f"{event_title(each.kind).lower()} at step {each.step:,}" for each in told]
    more = len(story.events) - len(shown)
    count = "one event was told" if len(story.events) == 1 else f"{len(story.events)} events were told"
    return f"{count}: {', '.join([*shown, *([f'and {more} more'] if more else [])])}"


def _elsewhere(story: RunSummary) -> str:
    told = story.elsewhere.events
    shown = [f"{event_title(each.event.kind).lower()} at step {each.event.step:,} ({each.where})" for each in told]
    more = [f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return f"other processes told {', '.join([*shown[:_NAMED], *more])}" if told else ""


def _said(story: RunSummary) -> str:
    if not story.messages:
        return ""
    first, *others = story.messages
    return f"the monitor said of itself: {first.rstrip('.')}" + (f", and {len(others)} more" if others else "")


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
        *_step_axis(across),
        *_lines(points, across, device, host),
        *_levels(device, limit_bytes, shown),
        *_event_marks(events, across),
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


def _step_axis(across: _Scale) -> Iterator[str]:
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


def _event_marks(events: Sequence[MemoryEvent], across: _Scale) -> Iterator[str]:
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


Frontier = Callable[[Sequence[Candidate]], Collection[Candidate]]
# Says to the browser itself what the page promises: no script, and nothing from anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PROGRAMS = (
    "program",
    "compiled",
    "one step needs",
    "arguments",
    "outputs",
    "aliased",
    "temporaries",
    "constants",
    "XLA's own remat",
    "for",
)


def report_html(stories: Sequence[RunSummary], *, source: str, version: str, frontier: Frontier) -> str:
    """The page of one or several runs.

    Args:
        stories: Oldest first.
        source: Where they were read, as the user named it.
        version: Of this library.
        frontier: Tells which candidates of a plan no other beats.
    """
    title = f"Memory of {source}"
    body = "".join(
        [
            *_opening(stories, title),
            *(_run(n, each, frontier, alone=len(stories) == 1) for n, each in enumerate(stories, start=1)),
        ]
    )
    foot = (
        f"Written by jaxmem report of version {version} from {source}. Bytes are those that the named source told; what a "
        "platform does not report is unknown, with its reason, and never 0."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>{body}<footer>{escape(foot)}</footer></main></body></html>\n"
    )


def _opening(stories: Sequence[RunSummary], title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    if len(stories) == 1:
        yield f'<p class="lead">{escape(happened(stories[0]))}</p>'
        return
    yield f'<p class="lead">{len(stories)} runs, of which the newest: {escape(happened(stories[-1]))}</p>'
    rows = "".join(
        f'<tr><td><a href="#run-{n}">{escape(each.run)}</a></td><td>{_began(each)}</td><td>{escape(happened(each))}</td></tr>'
        for n, each in enumerate(stories, start=1)
    )
    yield _framed(("run", "began", "what happened"), rows)


def _run(number: int, story: RunSummary, frontier: Frontier, *, alone: bool) -> str:
    parts = [
        "" if alone else f'<h2>Run {escape(story.run)}</h2><p class="lead">{escape(happened(story))}</p>',
        f'<p class="soft">Run {escape(story.run)}, began {_began(story)}.</p>',
        _figure(story),
        *_events_section(story.events),
        *_other_processes(story),
        *_heap(story),
        *_programs(story),
        *_plan(story, frontier),
        *_metrics(story),
        "<h3>What was known here, and where figures come from</h3>",
        _table(COLUMNS, [(row.figure, row.latest, row.source, row.text) for row in story.known_rows]),
        *_settings(story),
        *_remarks(story),
    ]
    return f'<section class="run" id="run-{number}">{"".join(parts)}</section>'


def _began(story: RunSummary) -> str:
    first = story.span.first_s
    return "at an unknown time" if first is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first))


def _figure(story: RunSummary) -> str:
    drawn = chart_html(
        story.history.points, story.events, limit_bytes=story.limit_bytes, needs=story.needs, saves=story.saves
    )
    return drawn or "<p>There is no figure, since no memory was read.</p>"


def _events_section(events: Sequence[MemoryEvent]) -> Iterator[str]:
    yield "<h3>Events, and what to do</h3>"
    if not events:
        yield "<p>None.</p>"
    for number, event in enumerate(events, start=1):
        head = f"{number}. {event_title(event.kind)} at step {event.step:,} ({event.device})"
        action = f'<p class="act"><strong>What to do:</strong> {escape(event.action)}</p>'
        figures = _table(("figure", "value"), event_figures(event), "facts") if event.figures else ""
        yield f'<article class="event-card"><h4>{escape(head)}</h4><p>{escape(event.message)}</p>{action}{figures}</article>'


def _other_processes(story: RunSummary) -> Iterator[str]:
    told = story.elsewhere.events
    if told:
        yield "<h3>Events of other processes</h3>"
        rows = [
            (each.where, f"{each.event.step:,}", event_title(each.event.kind), each.event.message, each.event.action)
            for each in told
        ]
        yield _table(("told by", "step", "event", "what happened", "what to do"), rows)


def _programs(story: RunSummary) -> Iterator[str]:
    yield "<h3>Programs and what they need, by their compiler</h3>"
    rows: list[tuple[str, ...]] = []
    for name, each in story.programs.items():
        if (memory := each.memory) is not None:
            sizes = (
                memory.step_bytes,
                memory.argument_bytes,
                memory.output_bytes,
                memory.alias_bytes,
                memory.temp_bytes,
                memory.constant_bytes,
            )
            spelled = [format_bytes(size) for size in sizes]
            place = f"{memory.platform}, {memory.target}"
            rows.append((name, _times(each.compiles), *spelled, str(memory.compiler_remat), place))
    if rows:
        yield _table(_PROGRAMS, rows)
        yield '<p class="soft">Bytes of one step on one device, of the compile that needs most.</p>'
    unknown: dict[str, list[str]] = {}
    for name, each in story.programs.items():
        if each.memory is None:
            unknown.setdefault(each.unavailable or "unknown", []).append(name)
    for reason, names in unknown.items():
        yield f"<p>Also compiled: {escape(', '.join(names))}. What they need is {escape(_unknown(reason))}.</p>"
    if not story.programs:
        yield "<p>No compile was seen.</p>"
    changed = [
        f"<li>{escape(f'{name}: {line}')}</li>" for name, each in story.programs.items() for line in each.changed
    ]
    if changed:
        yield f"<p>What changed when one was compiled again:</p><ul>{''.join(changed)}</ul>"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _unknown(reason: str) -> str:
    return reason if reason.startswith("unknown") else f"unknown, because {reason}"


def _plan(story: RunSummary, frontier: Frontier) -> Iterator[str]:
    record = story.plan
    if record is None:
        return
    memory = story.programs[record.step].memory if record.step in story.programs else None
    measured = story.highs.get("peak_bytes_since_start")
    latest, text = plan_row(record, memory and memory.step_bytes, measured and measured.bytes)
    best = frontier(record.candidates)
    yield "<h3>The plan, and what came of it</h3>"
    yield f"<p><strong>{escape(record.step)}</strong>: {escape(latest)}; {escape(text)}.</p>"
    yield f'<div class="scroll">{plan_html(record, best)}</div>{_picture(record, best)}'
    for page in plan_page(record, best, step=0, time_s=0.0):
        if isinstance(page, Table) and page.tag == SOURCES_TAG:
            yield "<p>Where its figures come from:</p>" + _table(page.columns, page.rows)


def _picture(record: PlanRecord, best: Collection[Candidate]) -> str:
    from jaxmem_callbacks.writers.plan_figure import plan_picture

    return _image(
        plan_picture(record, best, step=0, time_s=0.0), "The plan's frontier: extra operations over bytes", finer=2
    )


def _heap(story: RunSummary) -> Iterator[str]:
    """The last map of live arrays; a run that was killed early has none, and the table of what was known says so."""
    if story.heap is None:
        return
    from jaxmem_callbacks.writers.figures import draw_heap

    drawn = draw_heap(story.heap)
    if drawn is not None:
        yield "<h3>Where live arrays lay, by address</h3>"
        where = f"On {escape(story.heap.device)}, which held most, after step {max(story.heap.step, 0):,}"
        yield f"<p>{where}: the last map of the run.</p>"
        yield _image(drawn, "Live arrays by address, a colour for each kind, holes in grey")


def _image(drawn: Picture, words: str, *, finer: int = 1) -> str:
    """A picture in the page, in pixels of its own or ``finer`` times as many."""
    data = base64.b64encode(drawn.png).decode()
    size = f'width="{drawn.width // finer}" height="{drawn.height // finer}"'
    return f'<figure><img class="paper" {size} alt="{words}" src="data:image/png;base64,{data}"></figure>'


def _metrics(story: RunSummary) -> Iterator[str]:
    if story.metrics:
        rows = [
            (name, *(f"{value:.6g}" for value in (each.first, each.last, each.low, each.high)))
            for name, each in story.metrics.items()
        ]
        yield "<h3>Metrics of the training</h3>" + _table(("metric", "first", "last", "lowest", "highest"), rows)


def _settings(story: RunSummary) -> Iterator[str]:
    yield "<h3>Settings and versions</h3>"
    start = story.start
    if start is None or not (start.versions or start.devices or start.settings):
        yield "<p>Unknown, because the run's first line does not tell them.</p>"
        return
    rows = [("version of " + name, str(value)) for name, value in start.versions.items()]
    rows += [("devices: " + name, str(value)) for name, value in start.devices.items()]
    rows += [("setting " + name, _setting(name, value)) for name, value in start.settings.items()]
    yield _table(("what", "value"), rows, "facts")


def _setting(name: str, value: object) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _remarks(story: RunSummary) -> Iterator[str]:
    if story.remarks:
        items = "".join(f"<li>{escape(remark)}</li>" for remark in story.remarks)
        yield f"<h3>Remarks on the files</h3><ul>{items}</ul>"


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return _framed(columns, body, style)


def _framed(columns: Iterable[str], body: str, style: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
