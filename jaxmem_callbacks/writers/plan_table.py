"""A plan as a document with one table, and its figures as JSON. Every figure has its source beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection

from jaxmem_callbacks.records.documents import Document, Side, Table
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import CompilerOptions, mesh_words, policy_words
from jaxmem_callbacks.records.units import format_bytes, format_extra

_HEAD = ("", "policy", "needs", "temporaries", "of budget", "extra FLOPs", "modelled", "compiler's remat")
_FAR_BEYOND = 10  # times the budget
_SIDES: tuple[Side, ...] = ("left", "left", "right", "right", "right", "right", "right", "right")


def plan_document(record: PlanRecord, frontier: Collection[Candidate]) -> Document:
    """The whole plan: what was asked, every candidate, the choice, and what the figures leave out."""
    table = Table(_HEAD, plan_rows(record, frontier), _SIDES)
    return Document([*_preface(record), table, *_remarks(record)])


def plan_json(record: PlanRecord) -> str:
    """Every figure of the record, bytes as integers."""
    return json.dumps(dataclasses.asdict(record), indent=1, default=dict)


def _preface(record: PlanRecord) -> list[str]:
    devices = f" ({record.device_count} devices, mesh {mesh_words(record.mesh)})" if record.device_count > 1 else ""
    lines = [f"Plan of {record.step} for {record.hardware}{devices}; bytes on one device, by its own compiler"]
    if record.budget_bytes is not None:
        lines.append(f"Budget {format_bytes(record.budget_bytes)}: {record.budget_reason}")
    else:
        lines.append(f"No budget: {record.budget_reason}")
    if record.resident_bytes:
        lines.append(f"Beside the step stay {format_bytes(record.resident_bytes)}")
    return lines


def compiles_text(record: PlanRecord) -> str:
    """How many compiles the plan took, and how many of them the disk cache answered."""
    beside, cached = record.beside_compiles, record.compiles + record.beside_compiles - record.compiled
    text = f"{record.compiles} compile{'' if record.compiles == 1 else 's'}" + (
        f" and {beside} of programs beside the step" if beside else ""
    )
    return text + (f", {cached} of them from the cache" if cached else "")


def plan_rows(record: PlanRecord, frontier: Collection[Candidate]) -> list[tuple[str, ...]]:
    """One row of cells a candidate, in the order of the plan's own table."""
    rows: list[tuple[str, ...]] = []
    for index, each in enumerate(record.candidates):
        mark = "->" if index == record.chosen else " *" if each in frontier else ""
        rows.append(
            (
                mark,
                candidate_words(each, record),
                format_bytes(each.step_bytes),
                "refused" if each.refusal else format_bytes(each.temp_bytes),
                _share(each, record),
                extra_text(each, record),
                "unknown" if each.modelled_s is None else f"{each.modelled_s * 1e3:.4g} ms",
                "unknown" if each.compiler_remat is None else str(each.compiler_remat),
            )
        )
    return rows


def candidate_words(candidate: Candidate, record: PlanRecord) -> str:
    """What was compiled: the policy, the rows of the batch where these were searched, and a mesh other than the chosen one's."""
    rows = f" at {candidate.batch_rows} rows" if candidate.batch_rows is not None else ""
    is_other = bool(candidate.mesh) and dict(candidate.mesh) != dict(record.mesh)
    mesh = f" on mesh {mesh_words(candidate.mesh)}" if is_other else ""
    policy = candidate.policy
    words = policy_words(dataclasses.replace(policy, compiler_options=None))
    words += f", {_option_name(policy.options, record)}" if policy.options is not None else ""
    if record.is_as_written(candidate):
        words = words.replace("none", "the author's own checkpoints", 1)
    return words + rows + mesh


def _option_name(options: CompilerOptions, record: PlanRecord) -> str:
    """What the plan calls a set of compiler options, whose names are too long for a cell: ``options 1``."""
    return f"options {_all_options(record).index(options) + 1}"


def _all_options(record: PlanRecord) -> list[CompilerOptions]:
    found = (each.policy.options for each in record.candidates)
    return list(dict.fromkeys(each for each in found if each is not None))


def option_lines(record: PlanRecord) -> list[str]:
    """What each name of compiler options stands for, and where they count."""
    return [
        f"{_option_name(each, record)}, for {each.platform} and jax {each.jax}: {each.words}"
        for each in _all_options(record)
    ]


def plain_flops(record: PlanRecord) -> int:
    """Operations of the plain step, also where it was not compiled itself; 0 where unknown."""
    plain = [each.flops for each in record.candidates if each.policy.remat == "none" and not record.is_as_written(each)]
    return min(plain) if plain else max((each.flops - each.extra_flops for each in record.candidates), default=0)


def extra_share(candidate: Candidate, record: PlanRecord) -> float | None:
    """Extra operations as a share of those of the plain step on as many rows; None where these are unknown."""
    plain = plain_flops(record)
    return candidate.extra_share if candidate.extra_share is not None or not plain else candidate.extra_flops / plain


def extra_text(candidate: Candidate, record: PlanRecord) -> str:
    """The share as text, such as ``+9.8%`` or ``+<0.1%``; what a refused program's compiler would compute again comes on top."""
    share = extra_share(candidate, record)
    text = f"{candidate.extra_flops:+}" if share is None else format_extra(share)
    return f"{text} or more" if candidate.refusal else text


def _share(candidate: Candidate, record: PlanRecord) -> str:
    need = record.need_of(candidate)
    if record.budget_bytes is None or need is None:
        return "no budget" if record.budget_bytes is None else "unknown"
    share = need / max(record.budget_bytes, 1)
    # A budget above what the hardware has: its compiler refuses what would be within it.
    over = ", refused" if candidate.refusal and share <= 1 else ", too much"
    return _share_text(share) + ("" if candidate.fits else over)


def _share_text(share: float) -> str:
    """A share of the budget: ``35%``, ``100.02%`` with the digits that distinguish it from all of it, ``6,352x`` far beyond."""
    if share >= _FAR_BEYOND:
        return f"{share:,.0f}x"
    digits = 0
    while share != 1 and f"{share:.{digits}%}" == f"{1:.{digits}%}":
        digits += 1
    return f"{share:.{digits}%}"


def _beside(chosen: Candidate) -> list[str]:
    """One line a program beside the step, and which of all sets the need."""
    lines = [
        f"{each.name} beside the step: {format_bytes(each.program_bytes)}, while {format_bytes(each.held_bytes)} of state and "
        f"resident arrays stay." + ("" if each.fits is not False else " That is too much, whatever the step's policy.")
        for each in chosen.beside
    ]
    if lines:
        lines.append(f"{chosen.sets_need or 'The step'} sets the need: {format_bytes(chosen.need_bytes)}.")
    return lines


def _remarks(record: PlanRecord) -> list[str]:
    chosen = record.candidates[record.chosen]
    verdict, *more = _shortfall(record) if chosen.fits is False else [f"{record.reason}."]
    own = record.left_alone
    if own and chosen.fits and not chosen.extra_flops:  # nothing had to be saved, so they stop nothing
        verdict = f"{verdict} {own}"
    elif own:
        verdict = f"{own} {verdict[0].upper()}{verdict[1:]}"
    lines = [
        f"-> {candidate_words(chosen, record)}: {verdict}",
        *more,
        "* no other is better in both bytes and operations",
        *option_lines(record),
    ]
    lines += _beside(chosen)
    lines += chosen.peak_sentences
    if chosen.peak is None and record.target == "attached":
        lines.append(
            "What makes its peak was not read, since JAX's own compilation cache is on: peak() of jm.step_memory shows it by one "
            "more compile."
        )
    if any(each.compiler_remat for each in record.candidates):
        lines.append(
            "compiler's remat: instructions that XLA computes again by its own choice near the limit; an estimate of their "
            "work is in the extra FLOPs, so such a point is never free."
        )
    if any(each.modelled_s is not None for each in record.candidates):
        lines.append(
            "modelled: from FLOPs, bytes moved and the target's data sheet; it ranks policies and is no measurement."
        )
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines.append(f"{compiles_text(record)} ({versions}).")
    if record.margin:
        lines.append(f"Keep a margin: {record.margin}.")
    noted_too = (note for note in record.notes if note not in record.obstacles)
    return [*lines, *noted_too]


def _shortfall(record: PlanRecord) -> list[str]:
    """What did not fit, what stops the policies, what would fit, and what may be tried."""
    much = (
        "and by how much is unknown, because the compiler refused it without a figure"
        if record.over_bytes is None
        else f"by {format_bytes(record.over_bytes)}"
    )
    least = record.least[0]
    return [
        f"nothing fits, {much}; this comes nearest.",
        *record.obstacles,
        *record.remedies,
        f"{least[0].upper()}{least[1:]}. {_what_next(record)}",
    ]


def _what_next(record: PlanRecord) -> str:
    """What may still fit, but for what was tried or cannot be had."""
    if record.remedies:
        return "Or plan for a smaller batch, more devices or a larger one."
    moved = any(each.policy.state_offload is not None for each in record.candidates)
    if record.is_hopeless and not moved and not any("state_offload" in each for each in record.searches):
        beside = f" beside the {format_bytes(record.resident_bytes)} that stay" if record.resident_bytes else ""
        if record.least[1] != record.least_bytes:  # a batch is in it
            return f"No policy makes that fit{beside}: try a smaller batch, more devices or a larger one."
        return f"No policy makes that fit{beside}: split it over more devices, or give a larger budget or device."
    ways, others = " and ".join(record.searches), "a smaller batch, more devices or a larger one."
    return f"Try {ways} (search= of jm.plan), or {others}" if ways else f"Try {others}"
