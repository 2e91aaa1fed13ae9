"""Candidate policies of remat between the two ends of a search."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy
from jaxmem_callbacks.transforms.save_frontier import FrontierPoint

_DIGITS = 10**5
# Of more segments than this, what each may keep is fine enough, and one more or less changes little.
_FEW = 4
# Another number of segments must promise no more than this part of the estimated peak, at no more operations: of smaller
# differences compilers often make the opposite.
_MARGIN = 0.9
# As many operations, as a share of those that nothing kept computes again, are no difference: elementwise work at the ends.
_ALIKE = 0.02
# Policies nearer to each other than this are not worth two compiles.
_CLOSE = 1.01
_BISECTIONS = 24


@dataclass(frozen=True, slots=True)
class CandidatePolicy:
    """A policy that may be compiled.

    Attributes:
        policy: What to ask for.
        bytes: Modelled, above what the policy that keeps only its cuts needs.
        flops: Operations computed again.
        work: These with what is moved again; see `transforms/costs.py`.
    """

    policy: StepPolicy
    bytes: int
    flops: int
    work: float


def candidates_for(compiler: Compiler, full: StepPolicy) -> list[CandidatePolicy]:
    """Policies from ``full``, which keeps only what is alive at its cuts, to hardly anything dear computed again.

    Args:
        compiler: Traces the step under a policy.
        full: The policy of the lower end.

    Returns:
        Ascending in bytes, and each does less work again than all before it; of a step with several losses, no more.

    Raises:
        PolicyError, LossRefusedError: the step takes no gradient through this library, or cannot be cut.
    """
    curves = _surveyed(compiler, full)
    if len(curves) != 1:
        return [_offer(full, share, share.bytes) for share in _joined(curves)]
    return unbeaten([_offer(full, share, share.bytes) for share in curves[0]])


def number_of_segments(compiler: Compiler, full: StepPolicy) -> int | None:
    """How many segments the library chose; None where the step has several losses."""
    curves = _surveyed(compiler, full)
    return curves[0][0].segments if len(curves) == 1 else None


def other_numbers_for(
    compiler: Compiler, full: StepPolicy
) -> tuple[list[CandidatePolicy], list[CandidatePolicy]] | None:
    """The same with other numbers of segments, and those of all that are estimated to be beaten or not to be worth it.

    None where the library chose more than a few segments, or the step has several losses.

    Args:
        compiler: Traces the step under a policy.
        full: The policy of the lower end, whose segments the library chooses.

    Raises:
        PolicyError, LossRefusedError: as `candidates_for`.
    """
    curves = _surveyed(compiler, full)
    if len(curves) != 1 or curves[0][0].segments > _FEW:
        return None
    (own,), unlikely = curves, list[CandidatePolicy]()
    promising = [_offer(full, share, share.bytes) for share in own]
    for policy, curve in _of_given_numbers(compiler, full, range(2, _FEW + 1)).items():
        # The chosen number, given, estimates only the last segment otherwise, and may cut elsewhere for that.
        for offer, is_promising in _compared(policy, curve, own) if policy.segments != own[0].segments else ():
            (promising if is_promising else unlikely).append(offer)
    between = unbeaten(promising)
    beaten = [offer for offer in promising if offer not in between]
    return between, [offer for some in (beaten, unlikely) for offer in sorted(some, key=lambda each: each.work)]


def _surveyed(compiler: Compiler, policy: StepPolicy) -> list[tuple[FrontierPoint, ...]]:
    """For each loss of the step that may keep anything, what other shares would keep; where none may, for the first."""
    curves = compiler.facts(policy, survey=True).shares
    return [curve for curve in curves if len(curve) > 1] or list(curves[:1])


def _of_given_numbers(
    compiler: Compiler, full: StepPolicy, numbers: Iterable[int]
) -> dict[StepPolicy, tuple[FrontierPoint, ...]]:
    """Policies of given numbers of segments, as far as the loss can be cut so, and what each may keep."""
    found: dict[StepPolicy, tuple[FrontierPoint, ...]] = {}
    for segments in numbers:
        policy = replace(full, segments=segments)
        # Fewer than its loops and checkpoints make, or more than it has places.
        with contextlib.suppress(PolicyError, LossRefusedError):
            curves = _surveyed(compiler, policy)
            if len(curves) == 1:
                found[policy] = curves[0]
    return found


def _compared(
    policy: StepPolicy, curve: Sequence[FrontierPoint], own: Sequence[FrontierPoint]
) -> Iterator[tuple[CandidatePolicy, bool]]:
    """What another number of segments offers, and whether its estimated peak is enough below that of the chosen number."""
    for share in curve:
        alike = share.work + _ALIKE * own[0].work
        least = min((mine.peak for mine in own if mine.work <= alike), default=math.inf)
        yield _offer(policy, share, _bytes_at(own, share.peak)), share.peak <= _MARGIN * least


def _bytes_at(own: Sequence[FrontierPoint], peak: int) -> int:
    """Modelled bytes of an estimated peak: what the chosen number of segments keeps where its own is as high."""
    for share in own:
        if share.peak >= peak:
            return share.bytes
    return own[-1].bytes + peak - max(share.peak for share in own)


def _offer(policy: StepPolicy, share: FrontierPoint, bytes_: int) -> CandidatePolicy:
    """A share as people can write it: rounded up, so that nothing of it is left out."""
    keep = min(math.ceil(share.share * _DIGITS) / _DIGITS, 1.0)
    return CandidatePolicy(replace(policy, keep=keep), bytes_, share.flops, share.work)


def unbeaten(found: Sequence[CandidatePolicy]) -> list[CandidatePolicy]:
    """The first, and those that do less work again than all with fewer bytes."""
    chosen = [found[0]]
    for offer in sorted(found[1:], key=lambda each: (each.bytes, each.work)):
        if offer.work < chosen[-1].work:
            chosen.append(offer)
    return chosen


def _joined(curves: Sequence[Sequence[FrontierPoint]]) -> list[FrontierPoint]:
    """Several losses of one step, each with its own shares, at a few common ones."""
    grid = [place / 20 for place in range(21)]
    rows = [[[point for point in curve if point.share <= share + 1e-12][-1] for curve in curves] for share in grid]
    return [
        FrontierPoint(
            share,
            sum(point.bytes for point in row),
            sum(point.flops for point in row),
            work=sum(point.work for point in row),
        )
        for share, row in zip(grid, rows, strict=True)
    ]


def spread(
    offered: Sequence[CandidatePolicy], count: int, *, needs: np.ndarray, flops: int, known: Collection[int] = (0,)
) -> list[CandidatePolicy]:
    """At most so many offers that any policy between two of them is near one of the two.

    Near is a factor: the bytes of the larger of the two over those of what lies between, or the work of the smaller. The
    greatest of these factors is made as small as so many compiles allow.

    Args:
        offered: Offers, each of which does less work again than all before it.
        count: How many may be asked for.
        needs: float64[offers], ascending: bytes of the step under each of them, measured or modelled.
        flops: Operations of the plain step.
        known: Places of offers that were compiled before, the first among them.
    """
    work = flops + np.array([each.work for each in offered], np.float64)
    there = np.array(sorted(known), np.int64)
    low, high = _CLOSE, float(max(needs[-1] / needs[0], work[0] / work[-1], _CLOSE)) + 1
    places = _within(high, needs, work, there)
    for _ in range(_BISECTIONS if count > 0 else 0):
        middle = (low + high) / 2
        some = _within(middle, needs, work, there)
        if len(some) <= count:
            places, high = some, middle
        else:
            low = middle
    return [offered[place] for place in places[:count]]


def _within(factor: float, needs: np.ndarray, work: np.ndarray, known: np.ndarray) -> list[int]:
    """The fewest places, the last included, between which and the known ones all is within a factor."""
    places, start, last = list[int](), 0, len(needs) - 1
    while start < last:
        # Up to here the work of the one below is near; from there on the bytes of the next one have to be.
        beyond = start + 1 + int(np.searchsorted(-work[start + 1 :], -work[start] / factor, side="right"))
        reach = int(np.searchsorted(needs, factor * needs[min(beyond, last)], side="right")) - 1
        farthest = min(max(beyond, reach), last)
        there = known[(known > start) & (known <= farthest)]
        start = int(there[-1]) if len(there) else farthest
        if not len(there):
            places.append(start)
    return places


MOST_POLICIES = 4  # that `offloading_policies` returns: compiles that a search sets aside
_BOTH = (OFFLOAD_CUTS, OFFLOAD_KEPT)


def cuts_moved(base: StepPolicy) -> StepPolicy:
    """The policy that offloads and needs fewest bytes: cuts wait in host memory, and nothing else is kept.

    Args:
        base: The other settings: sharding, microbatches, donation. Its remat is ignored.
    """
    plain = replace(base, remat="full", segments=None, levels=1, keep=0.0, assume_fusion=True, save=())
    return replace(plain, offload=(OFFLOAD_CUTS,))


def offloading_policies(compiler: Compiler, base: StepPolicy) -> list[StepPolicy]:
    """The policies worth compiling, those that compute most again and move least first.

    What is kept on the device is all that is dear to compute again, since it costs no time. What is kept on the host is as much
    of it as comes back sooner than it is computed again, as modelled; where nothing does or nobody knows, all of it, for the
    sake of bytes.

    Args:
        compiler: Traces the step under a policy.
        base: The other settings, as for `cuts_moved`.
    """
    full = cuts_moved(base)
    moved = replace(full, keep=_share_worth_moving(compiler, replace(full, offload=())))
    kept = replace(full, keep=1.0)
    return [full, kept, replace(moved, offload=(OFFLOAD_KEPT,)), replace(moved, offload=_BOTH)]


def _share_worth_moving(compiler: Compiler, full: StepPolicy) -> float:
    """The share of what loops could keep that takes least time where it waits in host memory; 1 where none is worth its way.

    The costs of an operation and of a byte come from three modelled times: all computed again, all kept on the device, all kept
    on the host.
    """
    everything = replace(full, keep=1.0)
    try:
        there = compiler.facts(replace(everything, offload=(OFFLOAD_KEPT,))).modelled_s
        here, again = compiler.facts(everything).modelled_s, compiler.facts(full).modelled_s
        if there is None or here is None or again is None:  # the speed of the device or of its host's link is unknown
            return 1.0
        offered = candidates_for(compiler, full)
    except (PolicyError, LossRefusedError):  # such as that there is no loop; reported where such a policy is lowered
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
