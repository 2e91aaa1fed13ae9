"""What remat may be asked for between its ends: numbers of segments with shares of what they could keep.

Enters: a compiler, which traces. Leaves: policies with the bytes and operations that are modelled for them. How much is kept is
varied for the number of segments that the library chooses; where that is small other numbers are surveyed too, and offered
where they promise more than the estimate may be wrong by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmem_callbacks.planning.candidates import Compiler
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.keeping import Share

_DIGITS = 10**5
# Of more segments than this, what each may keep is fine enough, and one more or less changes little.
_FEW = 4
# Another number of segments must promise no more than this part of the estimated peak, at no more operations: of smaller
# differences compilers often make the opposite.
_MARGIN = 0.9
# As many operations, as a share of those that nothing kept computes again, are no difference: elementwise work at the ends.
_ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class Offer:
    """A policy that may be compiled.

    Attributes:
        policy: What to ask for.
        bytes: Modelled, above what the policy that keeps only its cuts needs.
        flops: Operations computed again.
    """

    policy: StepPolicy
    bytes: int
    flops: int


def offers(compiler: Compiler, full: StepPolicy) -> tuple[list[Offer], list[Offer]]:
    """Policies from ``full`` to hardly anything dear computed again, ascending in bytes, and those that no estimate prefers.

    Args:
        compiler: Traces the step under a policy.
        full: The policy that keeps only what is alive at its cuts.

    Returns:
        Offers, each of which computes less again than all before it; and the others, which one of another number of
        segments is estimated to beat.

    Raises:
        PolicyError, LossRefusedError: the step takes no gradient through this library, or cannot be cut.
    """
    curves = _surveyed(compiler, full)
    if len(curves) != 1:
        return [_offer(full, share, share.bytes) for share in _joined(curves)], []
    own = curves[0]
    found = [_offer(full, share, share.bytes) for share in own]
    if full.segments is None and own[0].segments <= _FEW:
        found += _of_other_numbers(compiler, full, own)
    unbeaten = _unbeaten(found)
    return unbeaten, [offer for offer in found if offer not in unbeaten]


def _surveyed(compiler: Compiler, policy: StepPolicy) -> list[tuple[Share, ...]]:
    """For each loss of the step that may keep anything, what other shares would keep; where none may, for the first."""
    told = compiler.facts(policy, survey=True).shares
    return [curve for curve in told if len(curve) > 1] or list(told[:1])


def _of_other_numbers(compiler: Compiler, full: StepPolicy, own: Sequence[Share]) -> Iterator[Offer]:
    """Other numbers of segments, where their estimated peak is enough below that of the chosen number."""
    for segments in range(2, _FEW + 1):
        if segments == own[0].segments:
            continue
        policy = replace(full, segments=segments)
        try:
            curves = _surveyed(compiler, policy)
        except (PolicyError, LossRefusedError):  # fewer than its loops and checkpoints make, or more than it has places
            continue
        for share in curves[0] if len(curves) == 1 else ():
            alike = share.flops + _ALIKE * own[0].flops
            least = min((mine.peak for mine in own if mine.flops <= alike), default=math.inf)
            if share.peak <= _MARGIN * least:
                yield _offer(policy, share, _bytes_at(own, share.peak))


def _bytes_at(own: Sequence[Share], peak: int) -> int:
    """Modelled bytes of an estimated peak: what the chosen number of segments keeps where its own is as high."""
    for share in own:
        if share.peak >= peak:
            return share.bytes
    return own[-1].bytes + peak - max(share.peak for share in own)


def _offer(policy: StepPolicy, share: Share, bytes_: int) -> Offer:
    """A share as people can write it: rounded up, so that nothing of it is left out."""
    return Offer(replace(policy, keep=min(math.ceil(share.share * _DIGITS) / _DIGITS, 1.0)), bytes_, share.flops)


def _unbeaten(found: Sequence[Offer]) -> list[Offer]:
    """The first, and those that compute less again than all with fewer bytes."""
    chosen = [found[0]]
    for offer in sorted(found[1:], key=lambda each: (each.bytes, each.flops)):
        if offer.flops < chosen[-1].flops:
            chosen.append(offer)
    return chosen


def _joined(curves: Sequence[Sequence[Share]]) -> list[Share]:
    """Several losses of one step, each with its own shares, at a few common ones."""
    grid = [place / 20 for place in range(21)]
    rows = [[[point for point in curve if point.share <= share + 1e-12][-1] for curve in curves] for share in grid]
    return [
        Share(share, sum(point.bytes for point in row), sum(point.flops for point in row))
        for share, row in zip(grid, rows, strict=True)
    ]


def evenly(offered: Sequence[Offer], count: int) -> Iterator[Offer]:
    """Offers evenly spaced in operations, without the first."""
    if not offered[1:]:
        return
    most, least = offered[0].flops, offered[-1].flops
    step = (most - least) / count
    reached = float(most)
    for place in range(1, count + 1):
        offer = next(each for each in offered if each.flops <= most - step * place + 1)
        if offer.flops < reached - step / 4 or (offer.flops < reached and place == count):
            reached = offer.flops
            yield offer
