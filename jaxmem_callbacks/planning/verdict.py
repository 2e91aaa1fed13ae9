"""What would make a step fit where a plan found nothing that does: the cheapest first, and what may still be searched.

Each way in `remedies` was compiled, or is arithmetic with compiled bytes. Each search in `searches` was traced: a loss that it
cannot be had for is not asked to.
"""

from __future__ import annotations

from dataclasses import replace

from jaxmem_callbacks.planning.ledger import Entry, Ledger
from jaxmem_callbacks.planning.offloading import cuts_moved
from jaxmem_callbacks.planning.own_step import traced_with_rows
from jaxmem_callbacks.planning.rows import find_rows
from jaxmem_callbacks.planning.spending import Planned
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import JaxmemError, PlanError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes

_MOST_OF_A_GPU = 0.95  # the rest is CUDA's context, its libraries' and NCCL's


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
    if share is None or share > _MOST_OF_A_GPU or budget.bytes != budget.limit_bytes:
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


def searches(planned: Planned, ledger: Ledger) -> tuple[str, ...]:
    """Searches that were not tried and that the step's losses can have, as options of the command line."""
    problem = planned.problem
    tried = [entry.candidate.policy for entry in ledger.entries]
    about = " ".join(note for note in ledger.notes if "not tried" in note or "not compiled" in note).lower()
    ways = {
        "microbatches=2,4": replace(problem.base, microbatches=2),
        "offload": cuts_moved(problem.base),
    }
    looked_at = {
        "microbatches=2,4": any(each.microbatches > 1 for each in tried) or "microbatches" in about,
        "offload": problem.platform == "cpu" or any(each.offload for each in tried) or "offload" in about,
    }
    return tuple(
        advise("plan.search", search=way)
        for way, policy in ways.items()
        if not looked_at[way] and _can_be_had(planned, policy)
    )


def _can_be_had(planned: Planned, policy: StepPolicy) -> bool:
    """Whether the step can be traced under a policy, and where it accumulates, whether its gradient stays the same."""
    problem = planned.problem
    try:
        if policy.microbatches > 1:
            rows = find_rows(problem, planned.traced).count
            if rows % policy.microbatches:
                return False
    except PlanError:  # which argument holds the batch is the losses' to say
        pass
    step, kwargs = problem.step(policy), dict(problem.kwargs)
    try:
        with problem.in_mesh(), traced_with_rows(f"{problem.name} under {policy}"):
            step.traced(problem.args, kwargs)
            if policy.microbatches > 1:
                step.compare(problem.args, kwargs)
    except JaxmemError:
        return False
    return True
