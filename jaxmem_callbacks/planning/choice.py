"""Which candidate a plan uses, and which of them no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.units import format_extra
from jaxmem_callbacks.transforms.costs import MARGIN, SAME, WORTH


def bytes_or_inf(candidate: Candidate | None) -> float:
    """For comparisons: what a compiler refused without a figure, or was not asked for, is more than all that is known."""
    return math.inf if candidate is None or candidate.step_bytes is None else candidate.step_bytes


def choose(candidates: Sequence[Candidate]) -> tuple[int, str]:
    """The candidate to use: of those that fit the one with fewest extra operations, then least time, then fewest bytes.

    Operations that differ by less than is worth a compile are the same where modelled times differ: collectives cost none.
    Where batch sizes were searched the most rows come before all that. Where there is no limit the plain step; where nothing
    fits, what comes nearest.
    """
    index = min(range(len(candidates)), key=lambda place: rank(candidates[place]))
    return index, _reason(candidates[index], candidates)


def rank(candidate: Candidate) -> tuple[Any, ...]:
    """What `choose` prefers comes first."""
    misses = candidate.fits is False
    return misses, bytes_or_inf(candidate) if misses else 0, *_cost(candidate)


def _reason(best: Candidate, candidates: Sequence[Candidate]) -> str:
    if best.fits is None:
        return "there is no limit here, so nothing is worth computing twice"
    if not best.fits:
        return "nothing fits; this comes nearest"
    if best.batch_rows is not None:
        return f"{best.batch_rows} rows are the largest batch that was compiled and fits{_price(best, candidates)}"
    without = " without its own checkpoints" if best.policy.own_checkpoints == "replace" else ""
    return f"the plain step fits{without}" if best.extra_flops == 0 else "it computes least again of all that fit"


def _price(best: Candidate, candidates: Sequence[Candidate]) -> str:
    """What the most rows cost beside fewer that compute less again; empty where these are fewer by far, or cost as much."""
    rows, share = best.batch_rows or 0, best.extra_share or 0.0
    mine = best.policy.sharding, best.policy.microbatches  # collectives and accumulation take time, and no operations
    like = [each for each in candidates if each.fits and (each.policy.sharding, each.policy.microbatches) == mine]
    fewer = [each for each in like if (1 - 2 * MARGIN) * rows <= (each.batch_rows or 0) < rows]
    cheapest = min(fewer, key=lambda each: (each.extra_share or 0.0, -(each.batch_rows or 0)), default=best)
    least = cheapest.extra_share or 0.0
    if share - least < WORTH:
        return ""
    return f" at {format_extra(share)} FLOPs; {cheapest.batch_rows} rows fit at {format_extra(least)}"


def _cost(candidate: Candidate) -> tuple[float, float, float, float, float, bool, str]:
    """What is least is best. Of equals the plain step, and never what a compiler happened to be done with first."""
    rows, policy = candidate.batch_rows or 0, candidate.policy
    return (
        -rows,
        candidate.extra_flops // max(int(WORTH * (candidate.plain_flops or 0)), 1),
        candidate.modelled_s or 0.0,
        candidate.extra_flops,
        bytes_or_inf(candidate),
        policy.remat != "none",
        repr(policy),
    )


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that no other beats in bytes without costing more operations, rows or notably more time, in their order.

    A candidate that its compiler refused is never one of them: how much that compiler would recompute, and its cost, is unknown.
    """
    known = [each for each in candidates if each.step_bytes is not None and not each.refusal]

    def figures(one: Candidate) -> tuple[float, float, float]:
        return one.step_bytes or 0, one.extra_share or one.extra_flops, -(one.batch_rows or 0)

    def beaten(one: Candidate) -> bool:
        mine = figures(one)
        return any(
            theirs != mine and all(t <= m for t, m in zip(theirs, mine, strict=True))
            for theirs in map(figures, known if one.modelled_s is None else faster_than(one.modelled_s))
        )

    def faster_than(seconds: float) -> list[Candidate]:
        return [each for each in known if each.modelled_s is None or each.modelled_s <= (1 + SAME) * seconds]

    return tuple(each for each in known if not beaten(each))


def with_offload(best: Candidate, offloading: Sequence[Candidate]) -> tuple[Candidate, str | None]:
    """The candidate to use where offloading was tried too.

    Args:
        best: What was chosen of those that keep all on the device.
        offloading: Candidates that offload.

    Returns:
        The candidate, and why it is another than ``best``; None where it is not, or where nothing fits and it comes nearest.
        One that offloads is used where it fits and its modelled time is less, or where nothing else fits so many rows; never
        where nothing was moved, nor for the same rows where either time is unknown.
    """
    fitting = [each for each in offloading if each.fits and each.host_bytes]
    if best.fits is False and fitting:
        return min(fitting, key=_most_rows), "it fits by what waits in host memory, and nothing else fits"
    if best.fits is False:
        return min([best, *offloading], key=bytes_or_inf), None
    most = min(fitting, key=_most_rows, default=best)
    if (most.batch_rows or 0) > (best.batch_rows or 0):
        return (
            most,
            f"{most.batch_rows} rows fit by what waits in host memory, and no more do otherwise than {best.batch_rows}",
        )
    fitting = [each for each in fitting if each.batch_rows == best.batch_rows]
    known = [each for each in fitting if each.modelled_s is not None]
    if best.modelled_s is None or not known:
        return best, None
    fastest = min(known, key=_time)
    if _time(fastest) >= _time(best):
        return best, None
    return fastest, "what waits in host memory comes back sooner, as modelled, than it is computed again"


def with_options(best: Candidate, optioned: Sequence[Candidate]) -> tuple[Candidate, str | None]:
    """The candidate to use where compiler options were tried too.

    Args:
        best: What was chosen of those without.
        optioned: Candidates with other compiler options.

    Returns:
        The candidate, and why it is another than ``best``; None where it is not. One with options is used where it fits and takes
        less time, as modelled, or where no time is known fewer operations; where nothing else fits; and where more rows do.
    """
    if best.fits is None or not optioned:
        return best, None
    fitting = sorted((each for each in optioned if each.fits), key=lambda each: -(each.batch_rows or 0))
    fitting = [each for each in fitting if each.batch_rows == fitting[0].batch_rows]  # of several batches the most rows
    if best.fits is False:
        least = min([best, *optioned], key=bytes_or_inf)
        return (
            (min(fitting, key=cost), "it fits by options of the compiler, and nothing else fits")
            if fitting
            else (least, None)
        )
    cheapest = min(fitting, key=cost, default=best)
    most, without = cheapest.batch_rows or 0, best.batch_rows or 0
    if most > without:
        return cheapest, f"{most} rows fit by options of the compiler, and no more do otherwise than {without}"
    if most == without and cost(cheapest) < cost(best):
        return cheapest, "with options of the compiler it takes less than what fits without"
    return best, None


def with_state_on_host(best: Candidate, moved: Sequence[Candidate]) -> tuple[Candidate, str | None]:
    """The candidate to use where the optimizer's state was also moved to the host.

    Args:
        best: What was chosen of those whose state stays on the device.
        moved: Candidates with the state on the host.

    Returns:
        The candidate, and why it is another than ``best``; None where it is not. A state that is moved passes the link twice a
        step: where its time is not known it is used only where nothing else fits.
    """
    if best.fits is None or not moved:
        return best, None
    fitting = sorted((each for each in moved if each.fits), key=bytes_or_inf)  # of equal cost the one of fewest bytes
    if best.fits is False:
        least = min([best, *moved], key=bytes_or_inf)
        reason = "it fits with the optimizer's state on the host, and nothing else fits"
        return (min(fitting, key=cost), reason) if fitting else (least, None)
    known = [each for each in fitting if each.modelled_s is not None]
    fastest = min(known, key=cost, default=best)
    if best.modelled_s is not None and cost(fastest) < cost(best):
        return (
            fastest,
            "the optimizer's state comes from the host sooner, as modelled, than what it makes room for is computed again",
        )
    return best, None


def cost(candidate: Candidate) -> float:
    """Modelled seconds, or operations where no time is known; within one plan they are the same."""
    return float(candidate.extra_flops) if candidate.modelled_s is None else candidate.modelled_s


def _most_rows(candidate: Candidate) -> tuple[float, float, float]:
    return -(candidate.batch_rows or 0), *_time(candidate)


def _time(candidate: Candidate) -> tuple[float, float]:
    return (math.inf if candidate.modelled_s is None else candidate.modelled_s), bytes_or_inf(candidate)


class Compiled(Protocol):
    """A candidate, and whether it was compiled with other compiler options than the step's own."""

    @property
    def candidate(self) -> Candidate:
        """What its compiler made of the step."""
        ...

    @property
    def has_options(self) -> bool:
        """Whether options differ."""
        ...


_Compiled = TypeVar("_Compiled", bound=Compiled)


def chosen(entries: Sequence[_Compiled]) -> tuple[_Compiled, str]:
    """What to use of all that was compiled, and why."""
    every = entries
    moved = [entry.candidate for entry in every if entry.candidate.policy.state_offload is not None]
    entries = [entry for entry in entries if entry.candidate.policy.state_offload is None] or entries
    plain = [entry for entry in entries if not entry.has_options]
    staying = [entry for entry in plain if not entry.candidate.policy.offload] or plain
    index, reason = choose([entry.candidate for entry in staying])
    best, why = with_offload(staying[index].candidate, [entry.candidate for entry in plain])
    best, by_options = with_options(best, [entry.candidate for entry in entries if entry.has_options])
    best, by_state = with_state_on_host(best, moved)
    why = by_state or by_options or why
    return next(entry for entry in every if entry.candidate is best), why or reason
