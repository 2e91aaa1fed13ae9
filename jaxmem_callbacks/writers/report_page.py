"""Stories of runs enter, one HTML page leaves: self-contained, no script, nothing fetched, all that users gave escaped."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jaxmem_callbacks.analysis.availability import COLUMNS
from jaxmem_callbacks.analysis.plan_check import plan_row
from jaxmem_callbacks.analysis.story import Story
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.html_text import escape
from jaxmem_callbacks.writers.markdown import event_figures, event_title
from jaxmem_callbacks.writers.plan_page import SOURCES_TAG, plan_page
from jaxmem_callbacks.writers.plan_table import plan_html
from jaxmem_callbacks.writers.protocol import Picture, Table
from jaxmem_callbacks.writers.report_chart import chart_html
from jaxmem_callbacks.writers.report_style import STYLE
from jaxmem_callbacks.writers.report_words import happened

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


def report_html(stories: Sequence[Story], *, source: str, version: str, frontier: Frontier) -> str:
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


def _opening(stories: Sequence[Story], title: str) -> Iterator[str]:
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


def _run(number: int, story: Story, frontier: Frontier, *, alone: bool) -> str:
    parts = [
        "" if alone else f'<h2>Run {escape(story.run)}</h2><p class="lead">{escape(happened(story))}</p>',
        f'<p class="soft">Run {escape(story.run)}, began {_began(story)}.</p>',
        _figure(story),
        *_events(story.events),
        *_elsewhere(story),
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


def _began(story: Story) -> str:
    first = story.span.first_s
    return "at an unknown time" if first is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first))


def _figure(story: Story) -> str:
    drawn = chart_html(
        story.history.points, story.events, limit_bytes=story.limit_bytes, needs=story.needs, saves=story.saves
    )
    return drawn or "<p>There is no figure, since no memory was read.</p>"


def _events(events: Sequence[MemoryEvent]) -> Iterator[str]:
    yield "<h3>Events, and what to do</h3>"
    if not events:
        yield "<p>None.</p>"
    for number, event in enumerate(events, start=1):
        head = f"{number}. {event_title(event.kind)} at step {event.step:,} ({event.device})"
        action = f'<p class="act"><strong>What to do:</strong> {escape(event.action)}</p>'
        figures = _table(("figure", "value"), event_figures(event), "facts") if event.figures else ""
        yield f'<article class="event-card"><h4>{escape(head)}</h4><p>{escape(event.message)}</p>{action}{figures}</article>'


def _elsewhere(story: Story) -> Iterator[str]:
    told = story.elsewhere.told
    if told:
        yield "<h3>Events of other processes</h3>"
        rows = [
            (each.where, f"{each.event.step:,}", event_title(each.event.kind), each.event.message, each.event.action)
            for each in told
        ]
        yield _table(("told by", "step", "event", "what happened", "what to do"), rows)


def _programs(story: Story) -> Iterator[str]:
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


def _plan(story: Story, frontier: Frontier) -> Iterator[str]:
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


def _heap(story: Story) -> Iterator[str]:
    """The last map of live arrays; a run that was killed early has none, and the table of what was known says so."""
    if story.heap is None:
        return
    from jaxmem_callbacks.writers.heap_figure import draw_heap

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


def _metrics(story: Story) -> Iterator[str]:
    if story.metrics:
        rows = [
            (name, *(f"{value:.6g}" for value in (each.first, each.last, each.low, each.high)))
            for name, each in story.metrics.items()
        ]
        yield "<h3>Metrics of the training</h3>" + _table(("metric", "first", "last", "lowest", "highest"), rows)


def _settings(story: Story) -> Iterator[str]:
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


def _remarks(story: Story) -> Iterator[str]:
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
