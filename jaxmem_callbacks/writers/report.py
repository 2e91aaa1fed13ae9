"""The report of runs: one self-contained HTML page."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.analysis.figures import Point
from jaxmem_callbacks.analysis.run_summary import COLUMNS, DURING, High, RunSummary, plan_row
from jaxmem_callbacks.records.documents import (
    Block,
    Bullets,
    Document,
    Figure,
    Link,
    Paragraph,
    Section,
    Table,
    escape,
    page_html,
)
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.runs import CheckpointSave, MemoryEvent
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.events import event_details, event_title
from jaxmem_callbacks.writers.figures import DEVICE_LINES, HOST, draw_heap
from jaxmem_callbacks.writers.plan_figure import plan_picture
from jaxmem_callbacks.writers.plan_page import SOURCES_TAG, plan_page
from jaxmem_callbacks.writers.plan_table import plan_document
from jaxmem_callbacks.writers.protocol import LoggedTable, Picture

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
        return "no event was reported"
    few = len(story.events) <= _NAMED + 1  # "and 1 more" is no shorter than its name
    named = story.events if few else story.events[:_NAMED]
    shown = [f"{event_title(each.kind).lower()} at step {each.step:,}" for each in named]
    more = len(story.events) - len(shown)
    count = "one event was reported" if len(story.events) == 1 else f"{len(story.events)} events were reported"
    return f"{count}: {', '.join([*shown, *([f'and {more} more'] if more else [])])}"


def _elsewhere(story: RunSummary) -> str:
    remote = story.elsewhere.events
    shown = [f"{event_title(each.event.kind).lower()} at step {each.event.step:,} ({each.where})" for each in remote]
    more = [f"and {len(remote) - _NAMED} more"] if len(remote) > _NAMED else []
    return f"other processes reported {', '.join([*shown[:_NAMED], *more])}" if remote else ""


def _said(story: RunSummary) -> str:
    if not story.messages:
        return ""
    first, *others = story.messages
    return f"the monitor reported of itself: {first.rstrip('.')}" + (f", and {len(others)} more" if others else "")


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
        frontier: Finds the candidates of a plan that no other beats.
    """
    return page_html(report_document(stories, source=source, version=version, frontier=frontier))


def report_document(stories: Sequence[RunSummary], *, source: str, version: str, frontier: Frontier) -> Document:
    """What the page shows; arguments as those of `report_html`."""
    is_alone = len(stories) == 1
    newest = happened(stories[-1])
    runs = [_run(number, each, frontier, is_alone=is_alone) for number, each in enumerate(stories, start=1)]
    return Document(
        title=f"Memory of {source}",
        summary=newest if is_alone else f"{len(stories)} runs, of which the newest: {newest}",
        blocks=runs if is_alone else [_contents(stories), *runs],
        footer=f"Written by jaxmem report of version {version} from {source}. Bytes are those that the source reported; what "
        "a platform does not report is unknown, with its reason, and never 0.",
    )


def _contents(stories: Sequence[RunSummary]) -> Table:
    rows = [(Link(each.run, f"run-{n}"), _began(each), happened(each)) for n, each in enumerate(stories, start=1)]
    return Table(("run", "began", "what happened"), rows)


def _run(number: int, story: RunSummary, frontier: Frontier, *, is_alone: bool) -> Section:
    parts = (
        _figure(story),
        *_events_section(story.events),
        *_other_processes(story),
        *_heap(story),
        *_programs(story),
        *_plan(story, frontier),
        *_metrics(story),
        Section(
            title="What was known here, and where figures come from",
            blocks=[
                Table(
                    columns=COLUMNS, rows=[(row.figure, row.latest, row.source, row.text) for row in story.known_rows]
                )
            ],
        ),
        _settings(story),
        *_remarks(story),
    )
    summary = [] if is_alone else [Paragraph(happened(story), style="lead")]
    began = Paragraph(f"Run {story.run}, began {_began(story)}.", style="soft")
    title = "" if is_alone else f"Run {story.run}"
    return Section(title, [*summary, began, *parts], level=2, style="run", name=f"run-{number}")


def _began(story: RunSummary) -> str:
    first = story.span.first_s
    return "at an unknown time" if first is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first))


def _figure(story: RunSummary) -> Block:
    drawn = chart_html(
        story.history.points, story.events, limit_bytes=story.limit_bytes, needs=story.needs, saves=story.saves
    )
    return Figure(drawn) if drawn else "There is no figure, since no memory was read."


def _events_section(events: Sequence[MemoryEvent]) -> Iterator[Block]:
    cards = [
        Section(
            title=f"{number}. {event_title(event.kind)} at step {event.step:,} ({event.device})",
            blocks=list(event_details(event)),
            level=4,
            style="event-card",
        )
        for number, event in enumerate(events, start=1)
    ]
    yield Section("Events, and what to do", cards or ["None."])


def _other_processes(story: RunSummary) -> Iterator[Block]:
    reported = story.elsewhere.events
    if reported:
        rows = [
            (each.where, f"{each.event.step:,}", event_title(each.event.kind), each.event.message, each.event.action)
            for each in reported
        ]
        columns = ("reported by", "step", "event", "what happened", "what to do")
        yield Section("Events of other processes", [Table(columns, rows)])


def _programs(story: RunSummary) -> Iterator[Block]:
    blocks: list[Block] = []
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
        blocks.append(Table(_PROGRAMS, rows))
        blocks.append(Paragraph("Bytes of one step on one device, of the compile that needs most.", style="soft"))
    unknown: dict[str, list[str]] = {}
    for name, each in story.programs.items():
        if each.memory is None:
            unknown.setdefault(each.unavailable or "unknown", []).append(name)
    blocks += [
        f"Also compiled: {', '.join(names)}. What they need is {_unknown(reason)}." for reason, names in unknown.items()
    ]
    if not story.programs:
        blocks.append("No compile was seen.")
    changed = [f"{name}: {line}" for name, each in story.programs.items() for line in each.changed]
    if changed:
        blocks += ["What changed when one was compiled again:", Bullets(changed)]
    yield Section("Programs and what they need, by their compiler", blocks)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _unknown(reason: str) -> str:
    return reason if reason.startswith("unknown") else f"unknown, because {reason}"


def _plan(story: RunSummary, frontier: Frontier) -> Iterator[Block]:
    record = story.plan
    if record is None:
        return
    memory = story.programs[record.step].memory if record.step in story.programs else None
    measured = story.highs.get("peak_bytes_since_start")
    latest, text = plan_row(record, memory and memory.step_bytes, measured and measured.bytes)
    best = frontier(record.candidates)
    sources = [
        page
        for page in plan_page(record, best, step=0, time_s=0.0)
        if isinstance(page, LoggedTable) and page.tag == SOURCES_TAG
    ]
    yield Section(
        title="The plan, and what came of it",
        blocks=[
            Paragraph(label=f"{record.step}:", text=f"{latest}; {text}."),
            *plan_document(record, best).blocks,
            _picture(record, best),
            "Where its figures come from:",
            *sources,
        ],
    )


def _picture(record: PlanRecord, best: Collection[Candidate]) -> Figure:
    return _image(
        plan_picture(record, best, step=0, time_s=0.0), "The plan's frontier: extra operations over bytes", finer=2
    )


def _heap(story: RunSummary) -> Iterator[Block]:
    """The last map of live arrays; a run that was killed early has none, and the table of what was known states so."""
    if story.heap is None:
        return
    drawn = draw_heap(story.heap)
    if drawn is not None:
        where = f"On {story.heap.device}, which held most, after step {max(story.heap.step, 0):,}"
        image = _image(drawn, "Live arrays by address, a colour for each kind, holes in grey")
        yield Section("Where live arrays lay, by address", [f"{where}: the last map of the run.", image])


def _image(drawn: Picture, words: str, *, finer: int = 1) -> Figure:
    """A picture in the page, in pixels of its own or ``finer`` times as many."""
    data = base64.b64encode(drawn.png).decode()
    size = f'width="{drawn.width // finer}" height="{drawn.height // finer}"'
    return Figure(
        markup=f'<figure><img class="paper" {size} alt="{words}" src="data:image/png;base64,{data}"></figure>'
    )


def _metrics(story: RunSummary) -> Iterator[Block]:
    if story.metrics:
        rows = [
            (name, *(f"{value:.6g}" for value in (each.first, each.last, each.low, each.high)))
            for name, each in story.metrics.items()
        ]
        table = Table(("metric", "first", "last", "lowest", "highest"), rows)
        yield Section("Metrics of the training", [table])


def _settings(story: RunSummary) -> Section:
    title, start = "Settings and versions", story.start
    if start is None or not (start.versions or start.devices or start.settings):
        return Section(title, ["Unknown, because the run's first line does not have them."])
    rows = [("version of " + name, str(value)) for name, value in start.versions.items()]
    rows += [("devices: " + name, str(value)) for name, value in start.devices.items()]
    rows += [("setting " + name, _setting(name, value)) for name, value in start.settings.items()]
    return Section(title, [Table(("what", "value"), rows)])


def _setting(name: str, value: object) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _remarks(story: RunSummary) -> Iterator[Block]:
    if story.remarks:
        yield Section("Remarks on the files", [Bullets(story.remarks)])
