"""The rungs below a policy: settings, the policy in force and the rows of the batch enter, offers in order leave.

Pure data: what an offer is worth is compiled by whoever takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import RecoverySettings, Rung

# From what keeps most to what keeps least. Everything between `none` and `full` differs by model: a plan knows better.
_REMATS = (("none", 1), ("dots_saveable", 1), ("full", 1), ("full", 2))
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One thing to try.

    Attributes:
        rung: What it is.
        microbatches: How many there are to be.
        remat: A policy whose remat is to be taken.
        why: Why there is nothing to try on this rung, or an empty text.
    """

    rung: Rung
    microbatches: int | None = None
    remat: StepPolicy | None = None
    why: str = ""

    def on(self, policy: StepPolicy) -> StepPolicy:
        """The policy in force with this change: microbatches keep the remat chosen before, and the other way round."""
        if self.microbatches is not None:
            return replace(policy, microbatches=self.microbatches)
        if self.remat is None:
            return policy
        other = self.remat
        return replace(
            policy,
            remat=other.remat,
            segments=other.segments,
            levels=other.levels,
            keep=other.keep,
            save=other.save,
            offload=other.offload,
        )


def offers(
    settings: RecoverySettings, policy: StepPolicy, *, rows: int | None, frontier: Sequence[StepPolicy] = ()
) -> Iterator[Offer]:
    """What to try one after the other.

    Args:
        settings: Has the ladder.
        policy: The one that failed.
        rows: Of the batch, or None where it has no common leading dimension.
        frontier: Policies of a plan from most bytes to least, below the one in force; they take the place of the usual ones.
    """
    for rung in settings.ladder:
        if rung == "microbatches":
            counts = microbatch_counts(policy.microbatches, settings.max_microbatches, rows)
            yield from (Offer(rung=rung, microbatches=count) for count in counts)
            if not counts:
                yield Offer(rung=rung, why=_no_count(policy.microbatches, settings.max_microbatches, rows))
        elif rung == "remat":
            yield from (Offer(rung=rung, remat=stronger) for stronger in frontier or stronger_remats(policy))
        else:
            yield Offer(rung=rung)


def microbatch_counts(now: int, most: int, rows: int | None) -> list[int]:
    """Numbers of microbatches above ``now``, each at least twice the one before, that divide the rows."""
    counts: list[int] = []
    for _ in range(_MOST_DOUBLINGS):
        wanted = 2 * now
        if rows is not None:
            wanted = next((count for count in range(wanted, rows + 1) if rows % count == 0), most + 1)
        if wanted > most:
            break
        counts.append(wanted)
        now = wanted
    return counts


def fitting_count(rows: int, count: int, chosen_for: int | None) -> int:
    """The fewest microbatches that divide a batch of other rows, none of them larger than those that were chosen.

    Args:
        rows: Of this batch, 1 at least.
        count: How many microbatches were chosen.
        chosen_for: For how many rows; None where that is not known, and there are to be as many at least.
    """
    least = min(count, rows) if chosen_for is None else -(-rows * count // chosen_for)
    return next(number for number in range(max(least, 1), rows + 1) if rows % number == 0)


def _no_count(now: int, most: int, rows: int | None) -> str:
    if 2 * now > most:
        return f"twice the {now} in force are more than max_microbatches={most}"
    return f"no number from {2 * now} to max_microbatches={most} divides the batch's {rows} rows"


def stronger_remats(policy: StepPolicy) -> list[StepPolicy]:
    """The usual policies that keep less than this one, from most to least."""
    at = next((i for i, pair in enumerate(_REMATS) if pair == (policy.remat, policy.levels)), 1)
    if policy.remat == "full" and (policy.keep or policy.save or policy.segments is not None):
        at -= 1  # the same policy without what it keeps besides
    return [StepPolicy(remat=remat, levels=levels) for remat, levels in _REMATS[at + 1 :]]
