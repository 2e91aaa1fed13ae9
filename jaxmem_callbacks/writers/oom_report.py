"""The report of an out-of-memory failure, as Markdown and as the model of its page."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem_callbacks.analysis.figures import Point
from jaxmem_callbacks.records.documents import (
    Code,
    Document,
    Link,
    Paragraph,
    Section,
    Table,
    as_blocks,
    as_markdown,
)
from jaxmem_callbacks.records.oom import FailedProgram, OomReport, Remedy
from jaxmem_callbacks.records.page import FORMAT, clean
from jaxmem_callbacks.records.peaks import GROUPS, Peak, peak_model, short_shape
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.page_model import curves_of_points, event_model

_EVENTS, _BUFFERS = 12, 6


def oom_model(
    report: OomReport,
    *,
    version: str,
    history: Sequence[Point] = (),
    events: Sequence[MemoryEvent] = (),
    limit_bytes: int | None = None,
) -> dict[str, Any]:
    """The model of the failure's page.

    Args:
        report: The record.
        version: Of this library.
        history: Highest values of a monitor's windows, oldest first.
        events: What the monitor reported before.
        limit_bytes: What a device may use, or None.
    """
    document = oom_document(report, version=version)
    limit, program = limit_bytes, report.program
    first = {"event": None, "action": _best(report)} if report.remedies else None
    run: dict[str, Any] = {
        "run": "failure",
        "name": document.title,
        "sentence": f"{when(report)}.",
        "glance": {
            "level": "bad",
            "verdict": report.sentence,
            "limit_bytes": limit,
            "high": None,
            "program": None,
            "planned_bytes": None,
            "first": first,
        },
        "open": as_blocks([_remedies(report), _holders(report), _program(program)]),
        "limit_bytes": limit,
        "details": as_blocks(
            [_watched(report), _allocator(report), _failure(report), _surroundings(report), *_failed(report)]
        ),
    }
    if history:
        run |= {"curves": curves_of_points(history), "events": [event_model(*each) for each in enumerate(events)]}
    if program is not None and program.peak is not None:
        run["programs"] = [{"name": program.name, "bytes": program.peak.bytes, "peak": peak_model(program.peak)}]
    return clean(
        {
            "format": FORMAT,
            "title": document.title,
            "summary": report.sentence,
            "runs": [run],
            "footer": document.footer,
        }
    )


def oom_markdown(report: OomReport) -> str:
    """The report as Markdown."""
    return as_markdown(oom_document(report)) + "\n"


def oom_document(report: OomReport, *, version: str = "") -> Document:
    """The report as a document, of which the page shows the sections and Markdown the whole."""
    first = first_thing(report)
    act = [Paragraph(first, style="act", link=Link("All remedies", "remedies"))] if first else []
    return Document(
        title="Out of memory",
        summary=report.sentence,
        blocks=[
            Paragraph(f"{when(report)}.", style="soft"),
            *act,
            _holders(report),
            _program(report.program),
            _watched(report),
            _allocator(report),
            _surroundings(report),
            _remedies(report),
            _failure(report),
            *_failed(report),
        ],
        footer=f"Written by jaxmem_callbacks {version} when the exception passed. Bytes are on one device; what is unknown "
        "has the reason.",
    )


def first_thing(report: OomReport) -> str:
    """The best remedy in one sentence, for the top; an empty text where there is none."""
    if not report.remedies:
        return ""
    return f"What to try first: {_best(report)}"


def _best(report: OomReport) -> str:
    best = report.remedies[0]
    saves = "" if best.saves_bytes is None else f", which saves {format_bytes(best.saves_bytes)}"
    return f"{best.what}{saves}."


def _failed(report: OomReport) -> list[Section]:
    return [Section("Parts of this report that failed", report.failures)] if report.failures else []


def when(report: OomReport) -> str:
    """``2026-11-22 05:00:00 UTC, process 0 of 1, pid 4242``."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(report.time_s))}, {report.process}"


def remedy_facts(remedy: Remedy) -> tuple[str, ...]:
    """What a remedy saves, whether that is enough, where the figure comes from, and what it costs: a sentence each."""
    if remedy.saves_bytes is None:
        saves = "What it saves is unknown."
    else:
        enough = {True: ", which is enough as far as is known", False: ", which is not enough alone", None: ""}[
            remedy.enough
        ]
        word = "Predicted to save" if remedy.compiled else "Frees"
        saves = f"{word} {format_bytes(remedy.saves_bytes)}{enough}."
    basis = f"{remedy.basis[:1].upper()}{remedy.basis[1:].rstrip('.')}."
    return (saves, basis, *([f"It costs {remedy.costs}."] if remedy.costs else []))


def _holders(report: OomReport) -> Section:
    title = "Who holds the memory"
    if report.live_bytes is None:
        return Section(title, ("Unknown: the live arrays could not be counted.",))
    first = (
        f"{report.live_count:,} live arrays hold {format_bytes(report.live_bytes)} on the fullest device, after the failure. "
        "Temporaries of programs are not among them."
    )
    whole = max([holder.bytes for holder in report.holders], default=0) or 1
    in_modules = any(holder.module for holder in report.holders)
    rows = tuple(
        (
            holder.name or "no name is known",
            *((holder.module or "-",) if in_modules else ()),
            holder.kind or "-",
            holder.type_text,
            str(holder.count),
            format_bytes(holder.bytes),
            _several(holder.devices),
            holder.site,
            holder.known_by or "-",
        )
        for holder in report.holders
    )
    module = ("module",) if in_modules else ()
    columns = ("what", *module, "kind", "type", "arrays", "bytes", "device", "made at", "named by")
    bars = tuple(holder.bytes / whole for holder in report.holders)
    rest = (
        (f"{report.left_out_count:,} smaller arrays with {format_bytes(report.left_out_bytes)} are not listed.",)
        if report.left_out_count
        else ()
    )
    tables = [Table(columns, rows, bars=bars)] if rows else []
    failed = (
        f"{format_bytes(report.failed_bytes)} of it are results of the failed call, which cannot be read: they are no state to "
        "go on from, and go with the variables that hold them."
    )
    return Section(
        title,
        (first, *((failed,) if report.failed_bytes else ()), *rest, *_on_the_cards(report), *_modules(report), *tables),
    )


def _on_the_cards(report: OomReport) -> Iterator[str]:
    """What is on each GPU beside JAX's pool, as its driver counts it."""
    for card in report.on_the_cards:
        pool = "" if card.pool_bytes is None else f"; JAX's pool is {format_bytes(card.pool_bytes)} of it"
        yield f"On {card.device} the driver counts {format_bytes(card.used_bytes)} as taken{pool}."
        if card.own_bytes is not None and card.pool_bytes is not None and card.own_bytes > card.pool_bytes:
            own = ", ".join(
                ("the CUDA context, its libraries", *(f"{name}, which is imported" for name in card.frameworks))
            )
            yield f"This process holds {format_bytes(card.own_bytes - card.pool_bytes)} outside of the pool: {own}."
        elif card.frameworks:
            yield f"This process has imported {', '.join(card.frameworks)}, whose memory is not in JAX's pool."
        for pid, size in card.others:
            yield f"Process {pid} holds {'memory, how much the driver does not report' if size is None else format_bytes(size)}."


def _modules(report: OomReport) -> Iterator[Table]:
    """Modules of the model, where that shows more than the list of arrays does."""
    if all(each.count == 1 for each in report.modules):
        return
    rows = tuple(
        (
            each.name + (f" ({each.modules} modules)" if each.modules > 1 else ""),
            str(each.count),
            format_bytes(each.bytes),
            ", ".join(
                f"{kind} {format_bytes(size)}" if len(each.kinds) > 1 else kind for kind, size in each.kinds.items()
            ),
        )
        for each in report.modules
    )
    most = max(report.modules[0].bytes, 1)
    bars = tuple(each.bytes / most for each in report.modules)
    yield Table(("module of the model", "arrays", "bytes", "what they are"), rows, bars=bars)


def _program(program: FailedProgram | None) -> Section:
    title = "The program that failed, and its peak"
    if program is None:
        return Section(title, ("Unknown: neither the exception nor its size shows which program it was, if any.",))
    sentences = [f"{program.name}: {program.known_by}."]
    tables: list[Table] = []
    if program.fate:
        sentences.append(program.fate)
    if program.gone:
        named = ", ".join(program.gone[:_BUFFERS]) + (" ..." if len(program.gone) > _BUFFERS else "")
        sentences.append(f"Gone are {format_bytes(program.gone_bytes)}: {named}.")
    memory = program.memory
    if memory is None:
        sentences.append(f"What it needs is unknown, because {program.unavailable}.")
    else:
        parts = (
            memory.argument_bytes,
            memory.output_bytes,
            memory.alias_bytes,
            memory.temp_bytes,
            memory.constant_bytes,
        )
        sizes = (memory.step_bytes, *parts)
        columns = ("one step needs", "arguments", "outputs", "aliased", "temporaries", "constants")
        tables.append(Table(columns, (tuple(map(format_bytes, sizes)),)))
    if program.peak is None:
        sentences.append(f"What makes its peak is unknown, because {program.no_peak}.")
    else:
        sentences.append(f"Its peak of {format_bytes(program.peak.bytes)}, by the compiler's buffer assignment:")
        tables += _peak(program.peak)
    return Section(title, (*sentences, *tables))


def _peak(peak: Peak) -> Iterator[Table]:
    groups = sorted(peak.groups, key=lambda group: -group.bytes)
    rows = tuple(
        (each.name, format_bytes(each.bytes), f"{each.bytes / max(peak.bytes, 1):.0%}", GROUPS[each.name])
        for each in groups
    )
    yield Table(
        ("group", "bytes", "of the peak", "what it is"),
        rows,
        bars=tuple(each.bytes / max(peak.bytes, 1) for each in groups),
    )
    largest = sorted(peak.buffers, key=lambda buffer: -buffer.bytes)[:_BUFFERS]
    yield Table(
        ("largest buffers", "bytes", "group", "operation", "source line"),
        tuple(
            (
                short_shape(buffer.shape),
                format_bytes(buffer.bytes),
                buffer.group,
                buffer.operation or "-",
                (buffer.source or "-").rpartition("/")[2],
            )
            for buffer in largest
        ),
    )


def _watched(report: OomReport) -> Section:
    title = "The monitor's last readings and events"
    if report.unwatched:
        return Section(title, (f"Unknown, because {report.unwatched}.",))
    sentences = [] if report.step is None else [f"The latest step that was reported is {report.step:,}."]
    if not report.events:
        sentences.append("There was no event.")
    events = tuple(
        (f"{event.step:,}", event.kind.replace("_", " "), event.device, event.message, event.action)
        for event in report.events[-_EVENTS:]
    )
    tables = [Table(("step", "event", "device", "what", "what to do"), events)] if events else []
    rows = tuple(row for reading in report.readings for row in _figures(reading))
    if rows:
        tables.append(Table(("source", "device", "step", "figure", "value"), rows))
    return Section(title, (*sentences, *tables))


def _figures(reading: Reading) -> Iterator[tuple[str, ...]]:
    """The figures that a reading has; what it has not was never reported."""
    for field in dataclasses.fields(reading):
        value = getattr(reading, field.name)
        if value is None or field.name in ("source", "device", "step", "time_s"):
            continue
        shown = f"{value:,}" if field.name.endswith("_count") else format_bytes(value)
        yield reading.source.replace("_", " "), reading.device, str(reading.step), field.name.replace("_", " "), shown


def _allocator(report: OomReport) -> Section:
    sentences = [f"{each.device}: unknown, because {each.reason}." for each in report.no_allocator]
    tables: list[Table] = []
    if report.limits:
        tables.append(
            Table(
                ("bound", "limit", "taken", "left", "largest free block", "source"),
                tuple(
                    (
                        limit.name,
                        format_bytes(limit.limit_bytes),
                        format_bytes(limit.used_bytes),
                        format_bytes(limit.left_bytes),
                        "-" if limit.largest_free_bytes is None else format_bytes(limit.largest_free_bytes),
                        limit.source,
                    )
                    for limit in report.limits
                ),
                bars=tuple(min(limit.used_bytes / max(limit.limit_bytes, 1), 1.0) for limit in report.limits),
            )
        )
    rows = tuple(row for reading in report.allocator for row in _figures(reading))
    if rows:
        tables.append(Table(("source", "device", "step", "figure", "value"), rows))
    if report.holes:
        sentences.append(
            "The largest holes between live arrays, by address: what moves the array behind one away makes it larger, as "
            "jm.defragment does."
        )
        tables.append(
            Table(
                ("device", "hole", "behind", "before"),
                tuple((each.device, format_bytes(each.bytes), each.below, each.above) for each in report.holes),
                bars=tuple(each.bytes / max(report.holes[0].bytes, 1) for each in report.holes),
            )
        )
    elif report.unmapped:
        sentences.append(f"Holes between live arrays are unknown, because {report.unmapped}.")
    return Section("Bounds of memory and the allocator, after the failure", (*sentences, *tables))


def _failure(report: OomReport) -> Section:
    facts = {field.name: getattr(report.facts, field.name) for field in dataclasses.fields(report.facts)}
    known = tuple(
        (name.replace("_", " "), format_bytes(value) if name.endswith("_bytes") else str(value))
        for name, value in facts.items()
        if value is not None
    )
    sentences = [f"{report.error_type}, taken for a failure for want of memory because {report.evidence}."]
    if report.where:
        sentences.append(f"It passed through {', '.join(report.where)}.")
    sentences.append("Its text, without what looks like a secret:")
    text = Table(("text",), tuple((line,) for line in report.error_text.splitlines() or [""]))
    return Section("The exception", (*sentences, text, *([Table(("what it states", "value"), known)] if known else [])))


def _surroundings(report: OomReport) -> Section:
    rows = [(f"version of {name}", value) for name, value in report.versions.items()]
    rows += [(f"devices: {name}", str(value)) for name, value in report.devices.items()]
    rows += list(report.environment.items())
    sentences = (
        "Of the environment only variables of JAX, XLA and accelerators are named, and only harmless values are shown."
    )
    return Section("Versions and environment", (sentences, Table(("what", "value"), rows)))


def _several(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more" if devices else "-"


def _remedies(report: OomReport) -> Section:
    remedies = [
        Section(
            title=f"{number}. {remedy.what}",
            blocks=[*([Code(remedy.lines)] if remedy.lines else []), *remedy_facts(remedy)],
            level=4,
            style="remedy",
        )
        for number, remedy in enumerate(report.remedies, start=1)
    ]
    planning = [Paragraph(report.planning, style="soft")] if report.planning else []
    return Section(
        title="What to do, the best first",
        blocks=[*(remedies or ["Nothing is known that would save memory here."]), *planning],
        name="remedies",
    )
