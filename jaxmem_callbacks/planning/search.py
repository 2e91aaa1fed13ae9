"""The search over remat policies: which to compile for a target, and which of them to use.

The two ends come first, in parallel: the plain step and the step that keeps only what is alive at the cuts that the library
chooses. Then what the author of the loss would write: a checkpoint around each block that repeats. Between the lower ends and
the plain step are shares of what is expensive to recompute, whose operations are known from a trace; only bytes have to be asked
for: `candidates_for` makes the list.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxmem_callbacks.planning.bisect import BytesBracket, closer
from jaxmem_callbacks.planning.choice import bytes_or_inf
from jaxmem_callbacks.planning.compiles import SHARE_DIGITS, CompileQueue, Compiler
from jaxmem_callbacks.records.errors import LossRefusedError, PolicyError
from jaxmem_callbacks.records.plans import Candidate, FrontierPoint
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, OFFLOAD_KEPT, StepPolicy
from jaxmem_callbacks.transforms.costs import ALIKE, MARGIN, NOTABLE, SAME, WORTH

# Tuned: the needs of policies between the ends are less than this below those of the ends.
_NEAR = 1.3
# Compiles at a time, as many as compilers run.
_AT_ONCE = 2
# Of n segments that hold as much as is stored at their cuts, one more changes the peak by 1 / (2 n (n + 1)) of it. Of more than
# this that is less than what estimates resolve.
_FEW = round(1 / math.sqrt(2 * SAME))
MOST_POLICIES = 4  # that `offloading_policies` returns: compiles that a search sets aside
_BOTH = (OFFLOAD_CUTS, OFFLOAD_KEPT)


@final
class RematSearch:
    """Finds the cheapest remat policy that fits.

    Args:
        compiler: Compiles the step under a policy.
        queue: Compiles, within this search's part of the budget.
        base: The policy without remat; None for the problem's own.
    """

    def __init__(self, compiler: Compiler, queue: CompileQueue, base: StepPolicy | None = None) -> None:
        self._compiler = compiler
        self._queue = queue
        self._plain = compiler.problem.base if base is None else base
        self._full = compiler.problem.lower_end(self._plain)
        self._between: list[CandidatePolicy] = []
        self._others: list[CandidatePolicy] = []
        self.found: dict[StepPolicy, Candidate] = {}

    @property
    def plain(self) -> Candidate | None:
        """The step without remat, once it is compiled."""
        return self.found.get(self._plain)

    @property
    def full(self) -> Candidate | None:
        """The step that needs fewest bytes of those between which is searched, once it is compiled: it keeps its cuts, mostly."""
        return self.found.get(self._full)

    @property
    def plain_fits(self) -> bool:
        """Whether the plain step is the answer: it fits, and its compiler recomputes nothing to make it fit."""
        return self.plain is not None and self.plain.fits is not False and not self.plain.compiler_remat

    def run(self, *, frontier: bool) -> None:
        """Compile what is worth compiling.

        Args:
            frontier: Fill the whole range between the ends; else stop as soon as the answer is known.
        """
        if not self.compile_endpoints():
            return
        if frontier:
            self._try_blocks()
            if all(each.fits is False for each in self.found.values()):
                self._try_two_levels()
            self.fill()
        elif not self.plain_fits:
            self.close_in()

    def compile_endpoints(self, *, plain: bool = True) -> bool:
        """Compile the two ends, or the full one alone; whether there is anything between them."""
        try:
            self._between = candidates_for(self._compiler, self._full)
        except (PolicyError, LossRefusedError) as error:
            if isinstance(error, LossRefusedError) and self._compiler.left_alone:  # the verdict names them
                self._queue.results.note("Remat was not tried: nothing but the loss's own checkpoints could be cut.")
            else:
                self._queue.results.note_obstacle(f"Remat was not tried: {error}")
            self._compile([self._plain] if plain else [])
            return False
        self._compile([self._plain, self._full] if plain else [self._full])
        return True

    def compile_plain(self) -> None:
        """Compile the plain step and nothing else."""
        self._compile([self._plain])

    def _try_blocks(self) -> None:
        """Compile a checkpoint around each block that repeats; where that hardly helps either, cuts of another estimate.

        They are one more than are chosen where a compiler fuses, on whatever the step is planned for. Of them both ends are
        compiled: where what is computed again takes as much as what was kept, a step that keeps more may take less.
        """
        if not self._queue.remaining:
            return
        try:
            self._try_segments(self._compiler.problem.lower_end(self._plain, "blocks"))
        except (PolicyError, LossRefusedError):  # nothing repeats
            self._look_at_other_numbers()
        least = min(map(bytes_or_inf, (self.full, *self.found.values())))
        if self._queue.remaining and least > (1 - MARGIN) * bytes_or_inf(self.plain):
            fusing = replace(self._plain, remat="full")
            with contextlib.suppress(PolicyError, LossRefusedError):  # there is no more place to cut
                curves = _surveyed(self._compiler, fusing)
                if len(curves) == 1:  # of several losses each has a number of its own
                    self._try_segments(replace(fusing, segments=curves[0][0].segments + 1), both_ends=True)

    def _try_segments(self, policy: StepPolicy, *, both_ends: bool = False) -> None:
        """Compile another lower end, and go on with what takes no more bytes and computes no more again.

        Else with both: what the one may keep is above its own lower end, and that by so many bytes above the lower of the two.

        Args:
            policy: The lower end.
            both_ends: Compile the one that keeps most too; the lower end is then the one between them that needs least.

        Raises:
            PolicyError, LossRefusedError: the loss cannot be cut so.
        """
        offered = candidates_for(self._compiler, policy)
        if not self._is_another(policy):
            return
        self._compile([policy, offered[-1].policy] if both_ends else [policy])
        if both_ends:
            offered = self._from_the_least(offered)
            policy = offered[0].policy
        own, asked = self.full, self.found.get(policy)
        if asked is None or (own is not None and _is_no_worse(own, asked)):
            return
        if own is None or _is_no_worse(asked, own):
            self._full, self._between = policy, offered
            return
        above = int(bytes_or_inf(asked) - bytes_or_inf(own)) * self._compiler.problem.workers
        if above > 0:
            self._between = unbeaten([*self._between, *_above(offered, above)])
        else:
            self._full, self._between = policy, unbeaten([*offered, *_above(self._between, -above)])

    def _from_the_least(self, offered: list[CandidatePolicy]) -> list[CandidatePolicy]:
        """The offers from the one that needs least bytes on, where the last needs no more than the first, both compiled.

        There are two peaks then: one of what is kept, and one of what is computed again. A byte kept more adds a byte to the
        first and takes at most one from the second. So the least is sought where both are as high, between an offer of each;
        two are compiled at a time, and what they need brings both nearer.
        """
        some = sparse(offered, WORTH * self._compiler.plain.flops)
        kept = [offer.bytes / self._compiler.problem.workers for offer in some]
        low, high, least = 0, len(some) - 1, math.inf
        needs = {place: need for place in (low, high) if (need := self._measured(some[place])) is not None}
        if not {low, high} <= needs.keys() or needs[high] > needs[low]:
            return offered
        while high - low > 1 and self._queue.remaining and min(needs.values()) < (1 - SAME) * least:
            least = min(needs.values())
            even = (kept[low] + kept[high] + needs[low] - needs[high]) / 2
            below = min(max(bisect.bisect_right(kept, even) - 1, low + 1), high - 1)
            places = [place for place in (below, below + 1) if place < high][: self._queue.remaining]
            self._compile([some[place].policy for place in places])
            for place in reversed(places):
                if (need := self._measured(some[place])) is None:
                    break
                needs[place] = need
                if needs[high] - need < (kept[high] - kept[place]) / 2:  # it does not fall with what is kept
                    low = place
                    break
                high = place
        first = some[min(needs, key=needs.__getitem__)]
        return [replace(offer, bytes=offer.bytes - first.bytes) for offer in offered[offered.index(first) :]]

    def _look_at_other_numbers(self) -> None:
        """Of a loss in which nothing repeats, offer what other numbers of segments are estimated to need."""
        found = other_numbers_for(self._compiler, self._full)
        if found is not None:
            self._between, self._others = found

    def fill(self) -> None:
        """Points between the ends, spread so that what is between two of them is near one of the two.

        Two compilers run at a time, so two are compiled before the next are chosen: they show the model's error. The first are
        the last, and of many one in the middle.
        """
        asked, chosen = set[StepPolicy](), self._spread()
        if len(chosen) > _AT_ONCE:
            first = [chosen[-1], chosen[len(chosen) // 2 - 1]][: len(chosen) - _AT_ONCE]
            self._compile([offer.policy for offer in first])
            asked |= {offer.policy for offer in first}
        while policies := [offer.policy for offer in self._spread() if offer.policy not in asked][:_AT_ONCE]:
            self._compile(policies)
            asked |= set(policies)

    def _spread(self) -> list[CandidatePolicy]:
        """What to compile next of the offers, as far as compiles are left."""
        offered = sparse(_worth_keeping(self._between), WORTH * self._compiler.plain.flops)
        points = [
            (need, offer)
            for need, offer in zip(self._foreseen(offered), offered, strict=True)
            if offer.policy not in self._unlucky or offer is offered[0]
        ]
        for found in self._of_other_cuts():
            place = sum(offer.flops > found.flops for _, offer in points)
            need = self._measured(found) or 0
            if 0 < place < len(points) and need < points[place][0]:
                before, offer = points[place - 1]
                # What it moves again nobody counted: as much as its neighbour does.
                points.insert(place, (max(need, before), replace(found, work=found.flops + offer.work - offer.flops)))
        known = {place for place, (_, offer) in enumerate(points) if self._measured(offer) is not None}
        needs, every = np.array([need for need, _ in points]), [offer for _, offer in points]
        return spread(every, self._queue.remaining, needs=needs, flops=self._compiler.plain.flops, known={0, *known})

    def _of_other_cuts(self) -> list[CandidatePolicy]:
        """What was compiled with remat and is not among the offers: points of the frontier too, where they are not beaten."""
        offered = {offer.policy for offer in self._between}
        return [
            CandidatePolicy(policy, 0, candidate.extra_flops, float(candidate.extra_flops))
            for policy, candidate in self.found.items()
            if policy.remat != "none"
            and policy not in offered
            and candidate.step_bytes
            and not candidate.compiler_remat
        ]

    @property
    def _unlucky(self) -> set[StepPolicy]:
        """Offers that take more bytes than one that computes less again: by how a compiler packs buffers, not by what is kept."""
        unlucky, least = set[StepPolicy](), math.inf
        for offer in reversed(self._between):
            need = self._measured(offer) or least
            if need > least:
                unlucky.add(offer.policy)
            least = min(need, least)
        return unlucky

    def _measured(self, offer: CandidatePolicy) -> int | None:
        found = self.found.get(offer.policy)
        return None if found is None else found.step_bytes

    def _foreseen(self, offered: Sequence[CandidatePolicy]) -> np.ndarray:
        """Bytes of the step under some offers, float64[offers]: on the line between compiled ones, modelled beyond the last."""
        points = [(offer, self._measured(offer)) for offer in self._between]
        known = [
            (offer.bytes, needs) for offer, needs in points if needs is not None and offer.policy not in self._unlucky
        ]
        known = known or [(0, min((each.step_bytes or 1 for each in self.found.values()), default=1))]
        modelled = np.array([offer.bytes for offer in offered], np.float64)
        between = np.interp(modelled, [at for at, _ in known], [needs for _, needs in known])
        beyond = self._corrected(known[0][1]) * np.maximum(modelled - known[-1][0], 0)
        return np.maximum.accumulate(between + beyond)

    def close_in(self) -> None:
        """Keep as much as fits: bytes are modelled between compiled points, and every compile narrows the range."""
        problem = self._compiler.problem
        limit = problem.budget.bytes
        if problem.beside_alone_is_too_much:
            return
        self._try_blocks()
        if not _fits(self.full):
            self._try_lower(limit)
        full = self.full
        if full is None or limit is None or not full.fits or full.step_bytes is None:
            return
        offered = sparse(self._between, WORTH * self._compiler.plain.flops)
        # Behind what wins all but this of what keeping more can win, there is little left.
        little = offered[-1].work + NOTABLE * (offered[0].work - offered[-1].work)
        room = BytesBracket(
            bytes=limit - problem.resident_bytes,
            kept=np.array([offer.bytes / problem.workers for offer in offered]),
            knee=next(place for place, offer in enumerate(offered) if offer.work <= little),
        )
        between = (0, len(offered))
        while True:  # until nothing is between what fits and what does not
            needs = {place: need for place, offer in enumerate(offered) if (need := self._measured(offer)) is not None}
            places = room.next_places(needs, between, self._queue.remaining)
            if not places:
                break
            self._compile([offered[place].policy for place in places])
            low, high = closer(*between, {place: _fits(self.found.get(offered[place].policy)) for place in places})
            between = low, len(offered) if high is None else high
        self._try_alternatives((room.bytes - full.step_bytes) / self._corrected(full.step_bytes))

    def _try_lower(self, limit: int | None) -> None:
        """Where the lower end does not fit: two levels, then what is above it and may need less all the same.

        Where two levels take no less, the most is alive elsewhere, and a step that computes less again may have less of it.
        """
        self._try_two_levels()
        if limit is None or any(each.fits for each in self.found.values()):
            return
        twice = self.found.get(self._twice)
        is_elsewhere = twice is not None and bytes_or_inf(twice) >= (1 - SAME) * bytes_or_inf(self.full)
        if is_elsewhere or self._is_near(limit):
            self.fill()

    @property
    def _twice(self) -> StepPolicy:
        return replace(self._full, keep=0.0, levels=2)

    def _try_two_levels(self) -> None:
        """Two levels of checkpoints, where one level makes another program."""
        if self._is_another(self._twice):
            self._compile([self._twice])

    def _is_another(self, policy: StepPolicy) -> bool:
        """Whether a policy makes another program than all that were compiled, by what JAX traces of it."""
        made = {each.operations for each in self.found.values()}
        return self._compiler.facts(policy).operations not in made

    def _try_alternatives(self, spare: float) -> None:
        """Policies that another number of segments is only estimated to beat, where they may fit and compute less again."""
        again = min(each.extra_flops for each in self.found.values() if each.fits)
        worth = WORTH * self._compiler.plain.flops
        near = [each for each in self._others if each.bytes <= _NEAR * spare and each.flops < again - worth]
        self._compile([each.policy for each in near[: self._queue.remaining]])

    def _is_near(self, limit: int) -> bool:
        """Whether what comes nearest, of what does not fit, is so near that another policy may fit."""
        needs = [each.need_bytes for each in self.found.values() if each.need_bytes is not None]
        return bool(needs) and min(needs) <= _NEAR * limit

    def _corrected(self, least: int) -> float:
        """What a modelled byte costs on one device, by the points that were compiled; before any, its part of the devices."""
        part = 1 / self._compiler.problem.workers
        modelled = {offer.policy: offer.bytes for offer in self._between}
        ratios = [
            (candidate.step_bytes - least) / modelled[policy]
            for policy, candidate in self.found.items()
            if candidate.step_bytes is not None and modelled.get(policy)
        ]
        # A modelled byte that seems to cost less is one that the peak does not see yet.
        return max(max(ratios, default=part), NOTABLE * part)

    def _compile(self, policies: Sequence[StepPolicy]) -> None:
        answers = self._queue.compile([(self._compiler, policy) for policy in policies])
        self.found |= {policy: found for policy, found in zip(policies, answers, strict=False) if found is not None}


def _fits(candidate: Candidate | None) -> bool:
    return candidate is not None and candidate.fits is True


def _is_no_worse(one: Candidate, other: Candidate) -> bool:
    """Whether a lower end takes no more bytes than another, and computes no more again; or its bytes are known, and only its."""
    return other.step_bytes is None or (bytes_or_inf(one) <= other.step_bytes and one.extra_flops <= other.extra_flops)


def _above(offered: Sequence[CandidatePolicy], bytes_: int) -> list[CandidatePolicy]:
    """Offers with their bytes counted from so many lower."""
    return [replace(offer, bytes=offer.bytes + bytes_) for offer in offered]


@dataclass(frozen=True, slots=True)
class CandidatePolicy:
    """A policy that may be compiled.

    Attributes:
        policy: What to ask for.
        bytes: Modelled, above what the first offer needs.
        flops: Operations computed again.
        work: These with what is moved again; see `transforms/costs.py`.
    """

    policy: StepPolicy
    bytes: int
    flops: int
    work: float


def candidates_for(compiler: Compiler, full: StepPolicy) -> list[CandidatePolicy]:
    """Policies from ``full``, which keeps only what is alive at its cuts, to hardly anything expensive recomputed.

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
        alike = share.work + ALIKE * own[0].work
        least = min((mine.peak for mine in own if mine.work <= alike), default=math.inf)
        yield _offer(policy, share, _bytes_at(own, share.peak)), share.peak <= (1 - MARGIN) * least


def _bytes_at(own: Sequence[FrontierPoint], peak: int) -> int:
    """Modelled bytes of an estimated peak: what the chosen number of segments keeps where its own is as high."""
    for share in own:
        if share.peak >= peak:
            return share.bytes
    return own[-1].bytes + peak - max(share.peak for share in own)


def _offer(policy: StepPolicy, share: FrontierPoint, bytes_: int) -> CandidatePolicy:
    """A share as people can write it: rounded up, so that nothing of it is left out."""
    keep = min(math.ceil(share.share * 10**SHARE_DIGITS) / 10**SHARE_DIGITS, 1.0)
    return CandidatePolicy(replace(policy, keep=keep), bytes_, share.flops, share.work)


def unbeaten(found: Sequence[CandidatePolicy]) -> list[CandidatePolicy]:
    """The first, and those that do less work again than all with fewer bytes."""
    chosen = [found[0]]
    for offer in sorted(found[1:], key=lambda each: (each.bytes, each.work)):
        if offer.work < chosen[-1].work:
            chosen.append(offer)
    return chosen


def _worth_keeping(offered: Sequence[CandidatePolicy]) -> Sequence[CandidatePolicy]:
    """The offers without the last ones, which keep more and win next to nothing of what keeping can win."""
    enough = offered[-1].work + WORTH * (offered[0].work - offered[-1].work)
    return offered[: 1 + next(place for place, offer in enumerate(offered) if offer.work <= enough)]


def sparse(offered: Sequence[CandidatePolicy], worth: float) -> list[CandidatePolicy]:
    """Offers that stand for all: each other one does at most so much less work than one of them with no more bytes.

    The first and the last, which keeps all that is dear to compute, are among them. Of those that may come next, it is the one
    that saves most work by byte. Where products save most, that one keeps no small result of a reduction besides. A compiler
    that has to write such a result may fuse less of what is around it, so that a few bytes more become many.

    Args:
        offered: Ascending in bytes, each with less work again than all before it.
        worth: Work that is worth another offer.
    """
    chosen = [offered[0]]
    while (last := chosen[-1]).work - offered[-1].work > worth:
        end = next(place for place, offer in enumerate(offered) if offer.work < last.work - worth)
        enough = min(offered[end].work + worth, last.work - worth / 2)  # what is nearer would make many of them
        following = [offer for offer in offered[: end + 1] if offer.work <= enough]
        chosen.append(max(following, key=lambda offer: (last.work - offer.work) / max(offer.bytes - last.bytes, 1)))
    return chosen if chosen[-1] is offered[-1] else [*chosen, offered[-1]]


def _joined(curves: Sequence[Sequence[FrontierPoint]]) -> list[FrontierPoint]:
    """Several losses of one step, each with its own shares, at a few common ones."""
    grid = np.linspace(0, 1, 1 + round(1 / NOTABLE)).tolist()
    rows = [[[point for point in curve if point.share <= share][-1] for curve in curves] for share in grid]
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

    Near is a factor: the bytes of the larger of the two over those of what is between, or the work of the smaller. The
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
    close = 1 + SAME  # what is nearer is not worth two compiles
    low, high = close, float(max(needs[-1] / needs[0], work[0] / work[-1], close)) + 1
    places = _within(high, needs, work, there)
    while count > 0 and high - low > WORTH * (low - 1):
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


def cuts_moved(base: StepPolicy) -> StepPolicy:
    """The policy that offloads and needs fewest bytes: cuts wait in host memory, and nothing else is kept.

    Args:
        base: The other settings: sharding, microbatches, donation. Its remat is ignored.
    """
    plain = replace(base, remat="full", segments=None, levels=1, keep=0.0, assume_fusion=True, save=())
    return replace(plain, offload=(OFFLOAD_CUTS,))


def offloading_policies(compiler: Compiler, base: StepPolicy) -> list[StepPolicy]:
    """The policies worth compiling, those that compute most again and move least first.

    What is kept on the device is all that is expensive to recompute, since it costs no time. What is kept on the host is as much
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
