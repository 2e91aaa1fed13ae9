"""What a plan reports of its choice: notes, obstacles, and what would make the step fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmem_callbacks.environment.process import FRACTION
from jaxmem_callbacks.planning.chunk_candidates import FIRST_CHUNKS, largest_value
from jaxmem_callbacks.planning.compiles import CompileQueue, CompileResults, Entry
from jaxmem_callbacks.planning.option_candidates import known_options, note_limit
from jaxmem_callbacks.planning.problem import (
    ParsedRequest,
    find_rows,
    own_jit,
    traced_with_rows,
)
from jaxmem_callbacks.planning.request import MOST_OF_A_GPU
from jaxmem_callbacks.planning.search import cuts_moved
from jaxmem_callbacks.planning.state_candidates import can_be_moved
from jaxmem_callbacks.programs.causes import causes_of
from jaxmem_callbacks.programs.steps.program import large_constants
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError, JaxmemError, PlanError
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.costs import MARGIN


def remedies(entry: Entry, donation: str) -> tuple[str, ...]:
    """What makes the nearest candidate fit as it is, a sentence each, the cheapest first; empty where nothing does.

    Args:
        entry: The candidate that came nearest.
        donation: What donating makes fit, or empty.
    """
    return tuple(words for words in (donation, _larger_share(entry), _fewer_resident(entry)) if words)


def _larger_share(entry: Entry) -> str:
    """Words for a larger share of an absent GPU, where nobody but JAX's own limit stands in the way."""
    problem, need = entry.compiler.problem, entry.candidate.need_bytes
    budget = problem.budget
    if need is None or problem.target is None or budget.bytes is None or budget.device_bytes is None:
        return ""
    share = budget.share_for(need)
    if share is None or share > MOST_OF_A_GPU or budget.bytes != budget.limit_bytes:
        return ""
    rest = format_bytes(int((1 - share) * budget.device_bytes))
    return (
        f"It fits as it is into a larger share of the GPU: start with {advise('plan.share', share=f'{share:g}')}, which leaves "
        f"{rest} to CUDA and NCCL."
    )


def _fewer_resident(entry: Entry) -> str:
    """Words for what stays beside the step, where the step would fit without it."""
    candidate, problem = entry.candidate, entry.compiler.problem
    limit, resident = problem.budget.bytes, problem.resident_bytes
    if (
        not resident
        or limit is None
        or candidate.step_bytes is None
        or candidate.step_bytes > limit
        or candidate.sets_need
    ):
        return ""
    return f"Without the {format_bytes(resident)} that stay beside the step it fits: are they needed while it runs?"


def searches(parsed: ParsedRequest, results: CompileResults) -> tuple[str, ...]:
    """Searches that were not tried and that the step's losses can have, as options of the command line."""
    problem = parsed.problem
    tried = [entry.candidate.policy for entry in results.entries]
    about = " ".join(note for note in results.notes if "not tried" in note or "not compiled" in note).lower()
    ways = {
        "microbatches=2,4": replace(problem.base, microbatches=2),
        "offload": cuts_moved(problem.base),
        "chunks": replace(problem.base, chunks=FIRST_CHUNKS),
        "compiler_options": problem.base,
        "state_offload": problem.base,
    }
    save_bytes = problem.device_count > 1 and known_options(problem.platform, problem.device_count)
    looked_at = {
        "microbatches=2,4": any(each.microbatches > 1 for each in tried) or "microbatches" in about,
        "offload": problem.platform == "cpu" or any(each.offload for each in tried) or "offload" in about,
        "chunks": any(each.chunked for each in tried),
        "compiler_options": bool(parsed.space.compiler_options) or not save_bytes,
        "state_offload": problem.platform == "cpu" or parsed.space.state_offload or not _holds_state(parsed, results),
    }
    return tuple(
        advise("plan.search", search=way)
        for way, policy in ways.items()
        if not looked_at[way] and _can_be_had(parsed, policy)
    )


def _holds_state(parsed: ParsedRequest, results: CompileResults) -> bool:
    """Whether the optimizer's state is at least half of what the smallest step needs, and could wait on the host."""
    needs = [entry.candidate.step_bytes for entry in results.entries if entry.candidate.step_bytes is not None]
    return bool(needs) and can_be_moved(parsed.problem, min(needs))


def _can_be_had(parsed: ParsedRequest, policy: StepPolicy) -> bool:
    """Whether the step can be traced under a policy, and where it accumulates, whether its gradient stays the same."""
    problem = parsed.problem
    try:
        if policy.microbatches > 1:
            rows = find_rows(problem, parsed.traced).count
            if rows % policy.microbatches:
                return False
    except PlanError:  # the losses' own arguments show the batch
        pass
    step, kwargs = problem.step(policy), dict(problem.kwargs)
    try:
        with problem.in_mesh(), traced_with_rows(f"{problem.name} under {policy}"):
            traced = step.traced(problem.args, kwargs)
            if policy.chunked and 2 * largest_value(traced.jaxpr) > largest_value(parsed.traced.jaxpr):
                return False  # the head is not what is large
            if policy.microbatches > 1:
                step.compare(problem.args, kwargs)
    except JaxmemError:
        return False
    return True


# The CPU's compiler keeps checkpoints outside loops from this JAX on.
_CPU_KEEPS_REMAT = (0, 12)


def needed_share(best: Entry) -> float | None:
    """The share of a GPU that must be set for the choice; None where the default is enough."""
    need = best.candidate.need_bytes
    return best.compiler.problem.budget.share_for(need) if need is not None and best.candidate.fits else None


def note_choice(results: CompileResults, best: Entry, traced: Traced) -> None:
    """Note what the user should know of the policy that is used."""
    if best.candidate.peak is not None:
        note = results.note_obstacle if best.candidate.fits is False else results.note
        for words in causes_of(best.compiler.problem.name, traced, best.candidate.peak):
            note(words)
    _note_share(results, best)
    note_limit(results, best)
    _note_idle_devices(results, best)
    _note_undone(results, best)
    for words in large_constants(best.compiler.problem.name, best.candidate.step_bytes, best.candidate.constant_bytes):
        results.note(words)


def _note_share(results: CompileResults, best: Entry) -> None:
    """Where the choice needs more of a GPU than JAX's allocator takes by default, note the share to set."""
    problem, share = best.compiler.problem, needed_share(best)
    if share is not None and problem.target is not None:
        results.note(
            f"It needs more than the {format_bytes(problem.budget.default_bytes)} that JAX's allocator takes of "
            f"{problem.target.name} unless set otherwise. Start with {FRACTION}={share:g} or more."
        )


def _note_idle_devices(results: CompileResults, best: Entry) -> None:
    """Where a step is planned for some of the attached devices, note how to use the others."""
    problem, count = best.compiler.problem, jax.device_count()
    if problem.target is None and problem.device_count < count:
        results.note(
            f"This is planned for {problem.device_count} of {count} attached devices. To divide the step among all of them, give "
            "arguments without shardings and search={'sharding': True}."
        )


def _note_undone(results: CompileResults, best: Entry) -> None:
    """Where the CPU's compiler may have undone every checkpoint, note why all policies need the same."""
    tried = [entry.candidate for entry in results.entries if entry.compiler is best.compiler]
    own = best.compiler.problem.base.own_checkpoints
    whole = [each for each in tried if each.policy.microbatches == 1 and each.policy.own_checkpoints == own]
    plain = [each.temp_bytes or 0 for each in whole if each.policy.remat == "none"]
    again = [each.temp_bytes or 0 for each in whole if each.policy.remat != "none"]
    is_old_cpu = best.compiler.problem.platform == "cpu" and jax.__version_info__ < _CPU_KEEPS_REMAT
    # Temporaries of a step whose checkpoints were undone are about the plain step's.
    if is_old_cpu and plain and again and min(again) > (1 - MARGIN) * min(plain):
        results.note(
            f"No remat saves much here. This may be the CPU's compiler: before jax {'.'.join(map(str, _CPU_KEEPS_REMAT))} (this "
            f"is {jax.__version__}) it undoes checkpoints outside loops. Plan for the hardware that trains, such as "
            "target='h100_sxm'; it need not be there."
        )


def unfit_reason(record: PlanRecord) -> str:
    """What did not fit and by how much, for whoever is to run the policy all the same."""
    best = record.candidates[record.chosen]
    over = f"Nothing fits: {record.step} {_over(record, best)} ({record.least[0]})."
    otherwise = "Plan for more or larger devices, a larger budget or a smaller batch."
    stops = (record.left_alone, *record.obstacles)
    return " ".join(words for words in (over, *stops, *best.peak_sentences, *record.remedies, otherwise) if words)


def _over(record: PlanRecord, best: Candidate) -> str:
    over, need, where = record.over_bytes, record.need_of(best), f"{record.hardware} under the policy that came nearest"
    if best.step_bytes is None or over is None or need is None:
        return f"is too much for {where}; by how much is unknown, because the compiler refused it without a figure"
    most = need - over
    allowed = f"budget of {format_bytes(most)} allows"
    if most != record.budget_bytes:
        allowed = f"{format_bytes(most)} that can be used there"
    return f"needs {format_bytes(best.step_bytes)} on {where}, {format_bytes(over)} more than the {allowed}"


def note_donation(queue: CompileQueue, entry: Entry, donation: Any, undonated: Sequence[str]) -> str:
    """Note what donation saves in the chosen step.

    Args:
        queue: Counts the one compile that this takes.
        entry: The chosen candidate.
        donation: The step's own setting of it.
        undonated: Arguments that the step, by that setting, returns updated and does not donate.

    Returns:
        The sentence where donation makes a step fit that does not fit without it, else an empty text.
    """
    policy, compiled = entry.candidate.policy, entry.candidate.step_bytes
    if not undonated or compiled is None or _is_off(queue.results):
        return ""
    names = ", ".join(undonated)
    try:
        if policy.donate != donation:
            (other,) = queue.compile([(entry.compiler, replace(policy, donate=donation))])
            if other is not None and other.step_bytes is not None:
                saved = format_bytes(other.step_bytes - compiled)
                queue.results.note(
                    f"Donating {names} saves {saved}: {format_bytes(compiled)} in place of {format_bytes(other.step_bytes)}."
                )
            return ""
        queue.report(f"{names} donated")
        queue.budget.use(1)
        donating, cached = entry.compiler.donating(policy, undonated)
        queue.results.coresident_uncached += not cached
    except CompileError as error:
        queue.results.note(f"What donating {names} would save is unknown: {error}")
        return ""
    if donating is None or donating >= compiled:
        queue.results.note(f"{names}: returned updated and not donated; donating would save nothing here, as compiled.")
        return ""
    problem = entry.compiler.problem
    limit = problem.budget.bytes
    is_enough = entry.candidate.fits is False and limit is not None and donating + problem.resident_bytes <= limit
    before, after = format_bytes(compiled), format_bytes(donating)
    figures = f": {after} in place of {before}" if after != before else f" of {before}"
    words = (
        f"{names}: returned updated and not donated. Donating would save {format_bytes(compiled - donating)}{figures}, "
        f"compiled{', and it fits' if is_enough else ''}. {_line(entry, tuple(undonated))}"
    )
    if is_enough:
        return words
    queue.results.note(words)
    return ""


def _is_off(results: CompileResults) -> bool:
    """Whether JAX donates nothing, which is noted."""
    is_off = bool(jax.config.jax_debug_nans)  # pyright: ignore[reportAttributeAccessIssue] - 0.10
    if is_off:
        results.note("jax_debug_nans is on: JAX donates nothing while it is.")
    return is_off


def _line(entry: Entry, names: tuple[str, ...]) -> str:
    donated = [leaf.argument for leaf in entry.compiler.leaves if leaf.donated]
    step = entry.compiler.problem
    own = own_jit(step.train_step)
    if own is None or own.may_donate:
        return f"Let the plan donate: {advise('plan.donate')}."
    return f"{own.donating(step.name, names, donated)} No search changes your own jit."
