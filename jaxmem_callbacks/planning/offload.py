"""Candidate policies that offload, and when one of them is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxmem_callbacks.planning.candidate_policies import own_offers
from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy

MOST_POLICIES = 4  # that `offloading_policies` tells: compiles that a search sets aside
_BOTH = (OFFLOAD_CUTS, OFFLOAD_KEPT)


def cuts_moved(base: StepPolicy) -> StepPolicy:
    """The policy that offloads and needs fewest bytes: cuts wait in host memory, and nothing else is kept.

    Args:
        base: What else it says: sharding, microbatches, donation. Its remat is not looked at.
    """
    return replace(base, remat="full", segments=None, levels=1, keep=0.0, save=(), offload=(OFFLOAD_CUTS,))


def offloading_policies(compiler: Compiler, base: StepPolicy) -> list[StepPolicy]:
    """The policies worth compiling, those that compute most again and move least first.

    What is kept on the device is all that is dear to compute again, since it costs no time. What is kept on the host is as much
    of it as comes back sooner than it is computed again, as modelled; where nothing does or nobody knows, all of it, for the
    sake of bytes.

    Args:
        compiler: Traces the step under a policy.
        base: What else they say, as of `cuts_moved`.
    """
    full = cuts_moved(base)
    moved = replace(full, keep=_share_worth_moving(compiler, replace(full, offload=())))
    kept = replace(full, keep=1.0)
    return [full, kept, replace(moved, offload=(OFFLOAD_KEPT,)), replace(moved, offload=_BOTH)]


def _share_worth_moving(compiler: Compiler, full: StepPolicy) -> float:
    """The share of what loops could keep that takes least time where it waits in host memory; 1 where none is worth its way.

    What an operation and a byte cost is told by three modelled times: all computed again, all kept here, all kept there.
    """
    everything = replace(full, keep=1.0)
    try:
        there = compiler.facts(replace(everything, offload=(OFFLOAD_KEPT,))).modelled_s
        here, again = compiler.facts(everything).modelled_s, compiler.facts(full).modelled_s
        if there is None or here is None or again is None:  # nobody says how fast the device or its host's link is
            return 1.0
        offered = own_offers(compiler, full)
    except (PolicyError, LossRefusedError):  # such as that there is no loop; told where such a policy is lowered
        return 1.0
    an_operation = (again - here) / max(offered[0].work - offered[-1].work, 1.0)
    a_byte = (there - here) / max(offered[-1].bytes, 1)
    for offer in sorted(offered, key=lambda offer: an_operation * offer.work + a_byte * offer.bytes):
        keep = offer.policy.keep
        if not keep or _is_obeyed(compiler, replace(full, keep=keep, offload=(OFFLOAD_KEPT,))):
            return keep or 1.0
    return 1.0


def _is_obeyed(compiler: Compiler, policy: StepPolicy) -> bool:
    """Whether each loss keeps anything that could be moved: of several, one may keep nothing at a share that another wants."""
    try:
        compiler.facts(policy)
    except (PolicyError, LossRefusedError):
        return False
    return True


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
        return min([best, *offloading], key=_bytes), None
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


def _most_rows(candidate: Candidate) -> tuple[float, float, float]:
    return -(candidate.batch_rows or 0), *_time(candidate)


def _time(candidate: Candidate) -> tuple[float, float]:
    return (math.inf if candidate.modelled_s is None else candidate.modelled_s), _bytes(candidate)


def _bytes(candidate: Candidate) -> float:
    return math.inf if candidate.step_bytes is None else candidate.step_bytes
