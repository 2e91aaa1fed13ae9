"""Which policies offload, and when one of them is to be used: where its modelled time beats computing again.

Enters: a policy, or compiled candidates. Leaves: policies to compile, or the candidate to use. Operations cannot tell here,
since offloading costs none; bytes over the host's link against the time of what is not computed again can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy


def offloading_policies(base: StepPolicy) -> tuple[StepPolicy, ...]:
    """Policies with offload worth compiling, those that compute most again and move least first.

    Args:
        base: What else they say: sharding, microbatches, donation. Its remat is not looked at.
    """
    full = replace(base, remat="full", segments=None, levels=1, keep=0.0, save=(), offload=(OFFLOAD_CUTS,))
    everything = replace(full, keep=1.0)
    return (full, everything, replace(everything, offload=(OFFLOAD_KEPT,)), replace(everything, offload=_BOTH))


_BOTH = (OFFLOAD_CUTS, OFFLOAD_KEPT)


def with_offload(best: Candidate, offloading: Sequence[Candidate]) -> tuple[Candidate, str | None]:
    """The candidate to use where offloading was tried too.

    Args:
        best: What was chosen of those that keep all on the device.
        offloading: Candidates that offload.

    Returns:
        The candidate, and why it is another than ``best``; None where it is not. One that offloads is used where it fits and
        its modelled time is less, or where nothing else fits so many rows; never where nothing was moved, nor for the same
        rows where either time is unknown.
    """
    fitting = [each for each in offloading if each.fits and each.host_bytes]
    if best.fits is False and fitting:
        return min(fitting, key=_most_rows), "it fits by what waits in host memory, and nothing else fits"
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


def _most_rows(candidate: Candidate) -> tuple[float, float, int]:
    return -(candidate.batch_rows or 0), *_time(candidate)


def _time(candidate: Candidate) -> tuple[float, int]:
    return (
        float("inf") if candidate.modelled_s is None else candidate.modelled_s,
        candidate.step_bytes or 0,
    )
