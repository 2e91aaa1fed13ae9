"""A plan for TensorBoard and other loggers."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from jaxmem_callbacks.analysis.figures import BUDGET, PLANNED, Spread, Window, byte_unit, window_in
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import mesh_words
from jaxmem_callbacks.records.units import GIB, format_bytes
from jaxmem_callbacks.writers.plan_figure import plan_picture
from jaxmem_callbacks.writers.plan_table import (
    candidate_words,
    compiles_text,
    extra_text,
    option_lines,
    plain_flops,
    plan_rows,
)
from jaxmem_callbacks.writers.protocol import LoggedTable, Record

CANDIDATES_TAG, SOURCES_TAG = "plan/candidates", "plan/where_figures_come_from"
# Short, since TensorBoard breaks the words of narrow columns; the other table has more of each.
_CANDIDATES = ("", "policy", "needs", "temporaries", "of budget", "extra FLOPs", "modelled", "XLA's own remat")
_SOURCES = ("figure", "value", "from")


def plan_page(record: PlanRecord, frontier: Collection[Candidate], *, step: int, time_s: float) -> Iterator[Record]:
    """The plan itself, its candidates and the sources of its figures; all but the picture, which takes a moment to draw.

    Args:
        record: The plan.
        frontier: Candidates that no other beats.
        step: The step under which loggers show them.
        time_s: Seconds since the epoch.
    """
    yield record
    rows = [(row[0].strip(), *row[1:]) for row in plan_rows(record, frontier)]
    yield LoggedTable(tag=CANDIDATES_TAG, step=step, time_s=time_s, columns=_CANDIDATES, rows=rows)
    yield LoggedTable(tag=SOURCES_TAG, step=step, time_s=time_s, columns=_SOURCES, rows=list(_source_rows(record)))


def plan_scalars(record: PlanRecord) -> dict[str, float]:
    """Tag -> GiB on one device: the budget, and what the chosen step was planned to need, to compare with what is compiled."""
    needs, budget = record.candidates[record.chosen].step_bytes, record.budget_bytes
    found = {} if needs is None else {_planned_tag(record): needs / GIB}
    return found if budget is None else {**found, BUDGET: budget / GIB}


def _planned_tag(record: PlanRecord) -> str:
    return PLANNED + record.step


def _source_rows(record: PlanRecord) -> Iterator[tuple[str, str, str]]:
    chosen = record.candidates[record.chosen]
    axes = mesh_words(record.mesh)
    yield "step", record.step, f"the train step that was given; its program is {record.fingerprint}"
    yield "target", record.target, f"{record.device_count} device" + (f"s, mesh {axes}" if axes else "")
    yield "-> chosen", candidate_words(chosen, record), record.reason
    yield "* frontier", "", "no other candidate needs fewer bytes and fewer operations"
    yield from _byte_rows(record, chosen)
    yield from _work_rows(record, chosen)
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    yield "compiles", compiles_text(record), versions
    for name, value in record.flags.items():
        yield "compiler option", f"{name}={value}", "set for all of these compiles"
    if record.margin:
        yield "left out", "unknown without the hardware", f"keep a margin: {record.margin}"
    for line in option_lines(record):
        yield "compiler options", "", line
    for note in record.notes:
        yield "note", "", note


def _byte_rows(record: PlanRecord, chosen: Candidate) -> Iterator[tuple[str, str, str]]:
    where = "the attached device's compiler" if record.target == "attached" else f"the compiler for {record.target}"
    parts = "arguments + results - results that reuse arguments + temporaries + constants, of one device"
    yield "needs", _exact(chosen.step_bytes), f"{where}: {parts}"
    for name, count in (
        ("arguments", chosen.argument_bytes),
        ("results", chosen.output_bytes),
        ("results that reuse arguments", chosen.alias_bytes),
        ("temporaries", chosen.temp_bytes),
        ("constants", chosen.constant_bytes),
    ):
        yield name, _exact(count), "refused by the compiler, which reported only the sum" if chosen.refusal else where
    if chosen.peak is not None:
        yield "the step's peak", _exact(chosen.peak.bytes), f"{where}: {chosen.peak.words}"
    there = chosen.placed_elsewhere
    if there is not None:
        source = f"the compiler for {chosen.placed_by}, which has room for what {record.target}'s own refused"
        yield "its peak there", _exact(there.bytes), f"{source}: {there.words}"
    yield "parameters and optimizer state", _exact(record.least_bytes), "shapes and dtypes of the step's arguments"
    if record.budget_bytes is None:
        yield "budget", "none", record.budget_reason
    else:
        yield "budget", _exact(record.budget_bytes), record.budget_reason
    if record.limit_bytes not in (None, record.budget_bytes):
        yield "usable", _exact(record.limit_bytes), "all that a program could use there"
    if record.resident_bytes:
        yield "beside the step", _exact(record.resident_bytes), "resident=, as given"
    for each in chosen.beside:
        held = f"while {format_bytes(each.held_bytes)} of state and resident arrays stay"
        yield f"{each.name}, beside the step", _exact(each.program_bytes), f"{where}, {held}"
    if record.resident_bytes or chosen.beside:
        yield (
            "the device must hold",
            _exact(record.need_of(chosen)),
            f"resident bytes and the largest program: {chosen.sets_need or 'the step'}",
        )


def _work_rows(record: PlanRecord, chosen: Candidate) -> Iterator[tuple[str, str, str]]:
    plain = plain_flops(record)
    counted = "counted in the trace, trip counts of loops multiplied in"
    own = sum(each.compiler_remat or 0 for each in record.candidates)
    yield (
        "XLA's own remat",
        f"{own} instructions",
        "in the compiled programs: recomputed by the compiler's own choice, near its limit",
    )
    yield "operations of the plain step", f"{plain:.4g} FLOP" if plain else "unknown", f"{counted}; all devices"
    hidden = f", and an estimate for {chosen.compiler_remat} instructions that the compiler itself recomputes"
    yield "extra FLOPs", extra_text(chosen, record), counted + (hidden if chosen.compiler_remat else "")
    if chosen.modelled_s is None:
        why = "the compiler refused the program" if chosen.refusal else "no data sheet for this hardware is known here"
        yield "modelled time", "unknown", why
    else:
        source = "a model from FLOPs, bytes moved and the vendor's data sheet; no measurement"
        yield "modelled time", f"{chosen.modelled_s * 1e3:.4g} ms", source


def _exact(count: int | None) -> str:
    return "unknown" if count is None else f"{format_bytes(count)} ({count:,} B)"


_SUFFIX = "plan"


def write_plan_run(record: PlanRecord, frontier: Collection[Candidate], logdir: str | os.PathLike[str]) -> Path:
    """Write the plan's page into a folder; a page that was written there before is replaced.

    Returns:
        The folder.

    Raises:
        PlanError: as `require_own_folder`.
    """
    from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

    folder = require_own_folder(logdir)
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob(f"events.out.tfevents.*.{_SUFFIX}"):
        before.unlink()
    now = time.time()
    writer = TensorBoardWriter(folder, _SUFFIX)
    try:
        for each in plan_page(record, frontier, step=0, time_s=now):
            writer.write(each)
        writer.write(plan_picture(record, frontier, step=0, time_s=now))
        spreads = {tag: Spread(low=gib, mean=gib, high=gib, count=1) for tag, gib in plan_scalars(record).items()}
        unit = byte_unit(record.platform, record.budget_bytes)
        writer.write(window_in(Window(step=0, time_s=now, spreads=spreads), unit))
    finally:
        writer.close()
    return folder


def require_own_folder(logdir: str | os.PathLike[str]) -> Path:
    """The folder that a plan's page may be written into; nothing is left there.

    Raises:
        PlanError: no local folder, one that cannot be written, or one that holds a run.
    """
    logdir = os.fspath(logdir)
    if "://" in logdir:
        msg = (
            f"to_tensorboard(logdir={logdir!r}): expected a local folder. Write the page to one and copy it there, or hand "
            "the plan to a run with your own logger, whose monitor takes plan=plan."
        )
        raise PlanError(msg)
    folder = Path(logdir)
    runs = [path.name for path in folder.glob("events.out.tfevents.*") if path.suffix != f".{_SUFFIX}"]
    if runs:
        msg = (
            f"to_tensorboard(logdir={logdir!r}): the folder holds a run ({runs[0]}), and TensorBoard goes over to the newest "
            "file of a folder, so it would show no more of that run. Expected a folder of the plan's own: "
            f"plan.to_tensorboard({logdir + '_plan'!r}). Or let the run show the plan, whose monitor takes plan=plan."
        )
        raise PlanError(msg)
    _try_writing(folder)
    return folder


def _try_writing(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = (
            f"to_tensorboard(logdir={str(folder)!r}): expected a folder that can be written: {error.strerror}. "
            "Type another one, such as plan.to_tensorboard('runs/plan')."
        )
        raise PlanError(msg) from error
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # it was never made
                each.rmdir()
