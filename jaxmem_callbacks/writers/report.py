"""The report of runs: what happened in a sentence, and the model of its page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jaxmem_callbacks
from jaxmem_callbacks.analysis.run_summary import High, RunSummary
from jaxmem_callbacks.records.documents import Block, Bullets, Document, Paragraph, Section, Table
from jaxmem_callbacks.records.page import FORMAT, framed
from jaxmem_callbacks.records.terminal import shown
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.events import event_title
from jaxmem_callbacks.writers.page_model import run_model
from jaxmem_callbacks.writers.plan_page import SOURCES_TAG, plan_page
from jaxmem_callbacks.writers.protocol import LoggedTable

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
        _too_large(story),
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


def _too_large(story: RunSummary) -> str:
    """The program that needs more than the limit, which no reading of what was held shows."""
    largest = max(story.needs, key=lambda name: story.needs[name], default=None)
    limit = story.limit_bytes
    if largest is None or limit is None or story.needs[largest] <= limit:
        return ""
    need = story.needs[largest]
    return f"{largest} needs {format_bytes(need)} by its compiler, {need / limit:.1f} times the limit"


def _events(story: RunSummary) -> str:
    if not story.events:
        return "no event was reported"
    few = len(story.events) <= _NAMED + 1  # "and 1 more" is no shorter than its name
    named = story.events if few else story.events[:_NAMED]
    titles = [f"{event_title(each.kind).lower()} at step {each.step:,}" for each in named]
    more = len(story.events) - len(titles)
    count = "one event was reported" if len(story.events) == 1 else f"{len(story.events)} events were reported"
    return f"{count}: {', '.join([*titles, *([f'and {more} more'] if more else [])])}"


def _elsewhere(story: RunSummary) -> str:
    remote = story.elsewhere.events
    titles = [f"{event_title(each.event.kind).lower()} at step {each.event.step:,} ({each.where})" for each in remote]
    more = [f"and {len(remote) - _NAMED} more"] if len(remote) > _NAMED else []
    return f"other processes reported {', '.join([*titles[:_NAMED], *more])}" if remote else ""


def _said(story: RunSummary) -> str:
    if not story.messages:
        return ""
    first, *others = story.messages
    return f"the monitor reported of itself: {first.rstrip('.')}" + (f", and {len(others)} more" if others else "")


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


def report_model(stories: Sequence[RunSummary], *, source: str, version: str) -> dict[str, Any]:
    """The model of the page of one or several runs.

    Args:
        stories: Oldest first.
        source: Where they were read, as the user named it.
        version: Of this library.
    """
    newest = happened(stories[-1])
    return {
        "format": FORMAT,
        "title": shown(f"Memory of {source}"),
        "summary": newest if len(stories) == 1 else f"{len(stories)} runs, of which the newest: {newest}",
        "runs": [story_model(story) for story in stories],
        "footer": shown(
            f"Written by jaxmem report of version {version} from {source}. Bytes are those that the source reported; what a "
            "platform does not report is unknown, with its reason, and never 0."
        ),
    }


def framed_report(story: RunSummary, *, source: str) -> str:
    """The page of a run as a frame in a notebook's output.

    Args:
        story: The run.
        source: Where it was read.
    """
    model = report_model([story], source=source, version=jaxmem_callbacks.__version__)
    return framed(model, height=760, table=Document([happened(story)]))


def story_model(story: RunSummary, name: str | None = None) -> dict[str, Any]:
    """The model of one run, named by its id where it has no other name."""
    began = Paragraph(f"Run {story.run}, began {_began(story)}.", style="soft")
    details = [began, *_programs(story), *_plan(story), *_metrics(story), _settings(story), *_remarks(story)]
    return run_model(story, name=story.run if name is None else name, sentence=happened(story), details=details)


def _began(story: RunSummary) -> str:
    first = story.span.first_s
    return "at an unknown time" if first is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first))


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


def _plan(story: RunSummary) -> Iterator[Block]:
    record = story.plan
    if record is None:
        return
    sources = [
        Table(page.columns, page.rows)
        for page in plan_page(record, (), step=0, time_s=0.0)
        if isinstance(page, LoggedTable) and page.tag == SOURCES_TAG
    ]
    yield Section("Where the plan's figures come from", sources)


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
