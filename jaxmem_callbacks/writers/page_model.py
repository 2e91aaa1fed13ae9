"""The model of the memory page of a run or a plan, as the page's module reads it.

Every text has been through `records.terminal.shown`. What is long is thinned here, and never in the browser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem_callbacks.analysis.figures import FIELDS, NAMES, Point
from jaxmem_callbacks.analysis.heap_map import layout_of
from jaxmem_callbacks.analysis.run_summary import ProgramSummary, RunSummary, plan_row
from jaxmem_callbacks.analysis.timeline import ArraysAt, Curve, Stretch, divided, thinned
from jaxmem_callbacks.config.presets import preset_to_yaml
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.documents import Block, as_blocks
from jaxmem_callbacks.records.page import FORMAT, clean
from jaxmem_callbacks.records.peaks import BY_TOTALS, peak_model
from jaxmem_callbacks.records.plans import OFF_SHARE, Candidate, PlanRecord
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.records.programs import ASSIGNED, ProgramMemory, program_model
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.events import event_details, event_title
from jaxmem_callbacks.writers.plan_table import candidate_words, extra_share, extra_text

_POINTS, _POINTS_IN_ALL, _FEWEST_POINTS = 600, 24_000, 40
_MOMENTS, _LINES = 150, 14  # of live arrays
_REGION_STRETCHES = 1500  # of one heap map
_EVENTS_IN_FULL = 600
_TIGHT = 0.05  # share of the limit
# Kinds of events whose advice comes first.
_GRAVEST = (
    "out_of_memory",
    "near_oom",
    "fragmentation",
    "growth",
    "replication",
    "donation_lost",
    "imbalance",
    "recompilation",
    "prediction_off",
    "plan_stale",
)


def run_model(story: RunSummary, *, name: str, sentence: str, details: Sequence[Block]) -> dict[str, Any]:
    """The model of one run.

    Args:
        story: The run as its files hold it.
        name: As the page names it.
        sentence: What happened.
        details: What the page shows folded, last.
    """
    timeline = story.timeline
    share = max(_FEWEST_POINTS, min(_POINTS, _POINTS_IN_ALL // max(len(timeline.curves), 1)))
    return clean(
        {
            "run": story.run,
            "name": name,
            "sentence": sentence,
            "began_s": story.span.first_s,
            "ended_s": story.span.last_s,
            "closed": story.ended,
            "steps": [story.span.first_step, story.span.last_step],
            "hardware": dict(story.start.devices) if story.start is not None else {},
            "glance": _glance(story),
            "curves": [_curve(each, share) for each in timeline.curves],
            "limit_bytes": story.limit_bytes,
            "arrays": _arrays(timeline.arrays, timeline.kinds),
            "events": [event_model(*each) for each in enumerate(story.events)],
            "elsewhere": [
                {"where": each.where, **event_model(0, each.event)} for each in story.elsewhere.events[:_EVENTS_IN_FULL]
            ],
            "saves": [
                {"from": save.began_s, "to": save.time_s, "steps": [save.first_step, save.step], "highs": save.highs}
                for save in story.saves
            ],
            "compiles": [each._asdict() for each in timeline.compiles],
            "programs": [_program(program, each, story.plan) for program, each in story.programs.items()],
            "plan": None if story.plan is None else plan_model(story.plan, story),
            "heaps": [_heap(each) for each in timeline.heaps if each.buffers],
            "known": [
                [row.figure, row.latest, row.source, row.text]
                for row in sorted(story.known_rows, key=lambda row: not row.known)
            ],
            "details": as_blocks(details),
        }
    )


# At a glance


def _glance(story: RunSummary) -> dict[str, Any]:
    high = next((story.highs[name] for name in ("in_use_bytes", "live_array_bytes") if name in story.highs), None)
    limit = story.limit_bytes
    largest = max(story.needs, key=lambda name: story.needs[name], default=None)
    need = None if largest is None else story.needs[largest]
    failure = _failure(story)
    level, verdict = failure or _verdict(limit, None if high is None else high.bytes, story.needs)
    what = "in use" if "in_use_bytes" in story.highs else "live arrays, without temporaries"
    return {
        "level": level,
        "verdict": verdict,
        "limit_bytes": limit,
        "high": None if high is None else {"bytes": high.bytes, "device": high.device, "step": high.step, "what": what},
        "program": None if largest is None else {"name": largest, "bytes": need},
        "planned_bytes": None if story.plan is None else story.plan.candidates[story.plan.chosen].step_bytes,
        "first": _first(story),
    }


def _verdict(limit: int | None, high: int | None, needs: Mapping[str, int]) -> tuple[str, str]:
    """Whether it fits, in a word for the page's colour and in a sentence."""
    if limit is None:
        return "unknown", "Whether it fits is unknown: nothing reported a limit here."
    largest_first = sorted(needs.items(), key=lambda each: -each[1])
    if largest_first and largest_first[0][1] > limit:
        program, need = largest_first[0]
        words = f"{program} does not fit: it needs {need / limit:.1f} times the limit of {format_bytes(limit)}."
        fits = next(
            (f" {name} fits: it needs {format_bytes(size)}." for name, size in largest_first if size <= limit), ""
        )
        return "bad", words + fits
    most = max(high or 0, *needs.values(), 0)
    if not most:
        return "unknown", "Whether it fits is unknown: no memory was read, and no program reported what it needs."
    left = limit - most
    if left < 0:
        return "bad", f"It went over the limit of {format_bytes(limit)} by {format_bytes(-left)}."
    if left < _TIGHT * limit:
        return "tight", f"It fits, and only just: {format_bytes(left)} of {format_bytes(limit)} were left."
    return "good", f"It fits: {format_bytes(left)} of {format_bytes(limit)} were left, {left / limit:.0%}."


def _failure(story: RunSummary) -> tuple[str, str] | None:
    """The same where memory ran out, here or in another process; None where it did not."""
    here = [(event, "") for event in story.events]
    there = [(each.event, f" on {each.where}") for each in story.elsewhere.events]
    failed = [(event, where) for event, where in (*here, *there) if event.kind == "out_of_memory"]
    if not failed:
        return None
    event, where = failed[-1]
    return "bad", f"It does not fit: memory ran out at step {event.step:,}{where}."


def _first(story: RunSummary) -> dict[str, Any] | None:
    """The advice of the gravest event that has one, and its number."""
    ranked = {kind: rank for rank, kind in enumerate(_GRAVEST)}
    known = [
        (ranked[each.kind], number) for number, each in enumerate(story.events) if each.action and each.kind in ranked
    ]
    if not known:
        return None
    number = min(known)[1]
    event = story.events[number]
    return {"event": number, "title": event_title(event.kind), "action": event.action}


# Over time


def _curve(curve: Curve, most: int) -> dict[str, Any]:
    stretches = thinned(curve.stretches, most)
    packed = _packed(stretches)
    return {
        "figure": curve.figure,
        "device": curve.device,
        "meaning": NAMES[FIELDS[curve.figure]].meaning,
        **packed,
    }


def _packed(stretches: Sequence[Stretch]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": [each.step for each in stretches],
        "times": [round(each.time_s, 2) for each in stretches],
        "high": [each.high for each in stretches],
    }
    if any(each.low != each.high for each in stretches):
        found["low"] = [each.low for each in stretches]
    return found


def curves_of_points(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Curves of the highest values of windows, for a failure whose run has no file.

    Args:
        points: Oldest first; values in the unit of their tag.
    """
    found: list[dict[str, Any]] = []
    for field, name in FIELDS.items():
        figure = NAMES[name]
        if figure.unit == "GiB":
            seen = [(point, point.highs[figure.tag]) for point in points if figure.tag in point.highs]
            values = [(point.step, point.time_s, round(value * figure.divisor)) for point, value in seen]
            if values:
                stretches = [Stretch(step, time_s, value, value) for step, time_s, value in values]
                packed = _packed(thinned(stretches, _POINTS))
                found.append({"figure": field, "device": "", "meaning": figure.meaning, **packed})
    return found


def _arrays(moments: Sequence[ArraysAt], kinds: Mapping[str, Mapping[str, int]]) -> dict[str, Any] | None:
    """Bytes by line, type and kind over time; the smaller ones of all moments together."""
    size = -(-len(moments) // _MOMENTS)
    kept = [max(moments[at : at + size], key=lambda each: each.bytes) for at in range(0, len(moments), max(size, 1))]
    most: dict[tuple[str, str], int] = {}
    for moment in kept:
        for key, held in moment.held.items():
            most[key] = max(held.bytes, most.get(key, 0))
    if not most:
        return None
    named = sorted(most, key=lambda key: -most[key])[:_LINES]
    return {
        "device": kept[-1].device,
        "steps": [each.step for each in kept],
        "times": [round(each.time_s, 2) for each in kept],
        "groups": [group for key in named for group in _groups(key, kept, kinds.get(key[1], {}))],
        "rest": [each.bytes - sum(each.held[key].bytes for key in named if key in each.held) for each in kept],
        "rest_count": len(most) - len(named),
    }


def _groups(key: tuple[str, str], moments: Sequence[ArraysAt], kinds: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Like arrays over time, one group for each kind that they are of."""
    parts = [divided(each.held[key], kinds) if key in each.held else {} for each in moments]
    for kind in {name: None for each in parts for name in each}:
        yield {"line": key[0], "type": key[1], "kind": kind, "bytes": [each.get(kind, 0) for each in parts]}


def event_model(number: int, event: MemoryEvent) -> dict[str, Any]:
    """An event with its number from 0; of very many the later ones without their tables."""
    found: dict[str, Any] = {
        "kind": event.kind,
        "title": event_title(event.kind),
        "step": event.step,
        "time_s": round(event.time_s, 2),
        "device": event.device,
        "message": event.message,
    }
    if number < _EVENTS_IN_FULL:
        found["details"] = as_blocks(list(event_details(event)))
    return found


# Programs


def _program(name: str, summary: ProgramSummary, plan: PlanRecord | None) -> dict[str, Any]:
    planned = plan.candidates[plan.chosen] if plan is not None and plan.step == name else None
    peak, memory, source = summary.peak, summary.memory, ASSIGNED
    foreseen = None if planned is None else planned.placed_elsewhere or planned.peak
    if foreseen is not None and (peak is None or (peak.basis == BY_TOTALS and _came_true(planned, memory))):
        peak, source = foreseen, "as it was planned"
    found: dict[str, Any] = {
        "name": name,
        "compiles": summary.compiles,
        "changed": summary.changed,
        "unavailable": None if memory is not None else summary.unavailable or "unknown",
        "planned_bytes": None if planned is None else planned.step_bytes,
    }
    if memory is not None:
        return program_model(memory, peak=peak, source=source, schedule=summary.schedule) | found
    return found if peak is None else found | {"peak": peak_model(peak, source)}


def _came_true(planned: Candidate | None, memory: ProgramMemory | None) -> bool:
    """Whether a program needs what was planned of it: only then does the plan's peak show what the run has."""
    predicted = planned and planned.step_bytes
    return bool(predicted) and memory is not None and abs(memory.step_bytes / predicted - 1) <= OFF_SHARE


# Plans


def plan_model(record: PlanRecord, story: RunSummary | None = None) -> dict[str, Any]:
    """What a plan compiled, and what came of it in a run.

    Args:
        record: The plan.
        story: The run that had it, or None.
    """
    summary = None if story is None else story.programs.get(record.step)
    compiled = None if summary is None or summary.memory is None else summary.memory.step_bytes
    measured = None if story is None else story.highs.get("peak_bytes_since_start")
    latest, text = plan_row(record, compiled, measured and measured.bytes)
    return {
        "step": record.step,
        "target": record.hardware,
        "devices": record.device_count,
        "mesh": record.mesh,
        "budget_bytes": record.budget_bytes,
        "budget_reason": record.budget_reason,
        "limit_bytes": record.limit_bytes,
        "resident_bytes": record.resident_bytes,
        "least_bytes": record.least_bytes,
        "chosen": record.chosen,
        "reason": record.reason,
        "compiled_bytes": compiled,
        "measured_bytes": None if measured is None else measured.bytes,
        "outcome": None if story is None else f"{latest}; {text}.",
        "candidates": [_candidate(each, record) for each in record.candidates],
    }


def plan_page_model(record: PlanRecord, details: Sequence[Block]) -> dict[str, Any]:
    """The model of the page of a plan by itself.

    Args:
        record: The plan.
        details: What the page shows below it, folded.
    """
    chosen = record.candidates[record.chosen]
    peak = chosen.placed_elsewhere or chosen.peak
    run: dict[str, Any] = {
        "run": "plan",
        "name": record.step,
        "plan": plan_model(record),
        "details": as_blocks(details),
    }
    if peak is not None:
        shown_as = peak_model(peak, "of the chosen candidate")
        run["programs"] = [{"name": record.step, "bytes": chosen.step_bytes, "peak": shown_as}]
    title = f"Plan of {record.step} for {record.hardware}"
    return clean({"format": FORMAT, "title": title, "summary": f"{record.reason}.", "runs": [run], "footer": ""})


def _candidate(each: Candidate, record: PlanRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "words": candidate_words(each, record),
        "bytes": each.step_bytes,
        "need_bytes": record.need_of(each),
        "fits": each.fits,
        "refused": bool(each.refusal),
        "extra": extra_text(each, record),
        "extra_share": extra_share(each, record),
        "modelled_s": each.modelled_s,
        "temp_bytes": each.temp_bytes,
        "compiler_remat": each.compiler_remat,
        "preset": None if each.fits is False else preset_to_yaml(Preset(name="plan", policy=each.policy)),
    }
    peak = each.placed_elsewhere or each.peak
    if peak is not None:
        found["peak"] = peak_model(peak)
    return found


# The heap


def _heap(heap: HeapMap) -> dict[str, Any]:
    """Stretches of addresses by kind of array, in regions that are far apart; small neighbours are joined."""
    layout = layout_of(heap.buffers)
    whole = sum(region[-1].end - region[0].begin for region in layout.regions)
    least = whole // _REGION_STRETCHES
    return {
        "device": heap.device,
        "step": heap.step,
        "time_s": round(heap.time_s, 2),
        "held_bytes": layout.held_bytes,
        "hole_bytes": layout.hole_bytes,
        "largest_hole_bytes": layout.largest_hole_bytes,
        "left_out_bytes": heap.left_out_bytes,
        "buffers": layout.buffers,
        "groups": [{"label": each.label, "count": each.count, "bytes": each.bytes} for each in layout.groups],
        "regions": [
            {
                "begin": region[0].begin,
                "bytes": region[-1].end - region[0].begin,
                "stretches": list(_stretches([(each.begin, each.end, each.group) for each in region], least)),
            }
            for region in layout.regions
        ],
    }


def _stretches(region: Sequence[tuple[int, int, int]], least: int) -> Iterator[list[int]]:
    """Length and group of each; equal neighbours are one, and what is shorter than ``least`` joins what comes before it."""
    begin, end, group = region[0]
    for first, last, other in region[1:]:
        if other == group or last - first < least:
            end = last
            continue
        yield [end - begin, group]
        begin, end, group = first, last, other
    yield [end - begin, group]
