"""Where to cut a loss, and what its segments keep.

`choose` makes a `Choice` of the profile of a loss and a policy; `checkpoints.apply` puts it into effect. Cuts are positions in
the list of equations that make the estimated peak of the backward pass smallest. Behind them is a model of what is alive while
one segment is differentiated: the values stored at the cuts before it, what it holds of its own, and gradients. The smallest
budget under which a sequence of segments exists is found by bisection; for one budget a dynamic programme finds the sequence
that stores least. Distances between cuts follow from bytes, not from layers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import OFFLOAD_CUTS, StepPolicy
from jaxmem_callbacks.transforms.costs import (
    ALIKE,
    MARGIN,
    NOTABLE,
    SIDE,
    WORTH,
    alive,
    equation_flops,
    is_inexact,
    residual_values,
)
from jaxmem_callbacks.transforms.cut_moves import LiveBytes, lowered
from jaxmem_callbacks.transforms.loss_profile import (
    CheapValues,
    LiveBytesProfile,
    LossProfile,
    held_and_stored,
    held_together,
    repeated_blocks,
    stored_between,
)
from jaxmem_callbacks.transforms.save_frontier import MergedFrontier, least_work, merge_frontiers
from jaxmem_callbacks.transforms.segments import (
    Choice,
    Loop,
    Piece,
    Segment,
    offloads_by_kind,
    results_by_segment,
    sizes,
)
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    operands_of,
    subjaxprs,
)

_OPAQUE = {"jit", "pjit", "shard_map"}


def choose(
    loss: LossProfile,
    policy: StepPolicy,
    *,
    differentiated: Collection[Any] | None = None,
    is_local: bool = False,
    survey: bool = False,
) -> Choice:
    """Choose where a loss is cut and what its pieces keep: a function of the loss and the policy alone.

    Args:
        loss: The loss.
        policy: Its ``segments``, ``levels``, ``keep`` and ``offload``.
        differentiated: Arguments that are; None where that is not known.
        is_local: Whether the loss is the body of a `shard_map`. It gets one level of checkpoints, and its loops are not traced
            again: their collectives have no axis there.
        survey: Whether to find what the pieces could keep even where ``keep`` is 0.

    Raises:
        PolicyError: more segments than the loss can be cut into, or fewer than it has.
    """
    levels = 1 if is_local else policy.levels
    live = loss.live if policy.assume_fusion else loss.live.unfused()
    steps, profile = _steps_of_loops(replace(loss, live=live), policy.offloaded, is_local=is_local)
    blocks = repeated_blocks(loss, profile) if policy.segments == "blocks" else None
    if policy.segments == "blocks":
        places, groups = sorted({*itertools.chain(*(blocks or ())), *profile.forced} - {0, profile.length}), []
    else:
        places, groups = _places(profile, policy.segments, loss.flat.eqns, levels)
    uncut = _Uncut(
        loss=loss,
        profile=profile,
        loops={at: Loop(loss.flat.eqns[at], n, policy.offloaded) for at, n in steps.items()},
        differentiated=differentiated,
        blocks=None if blocks is None else frozenset(start for start, _ in blocks),
        # What waits for the head keeps values by name, which groups of segments would compute again and offloading by kind does
        # not combine with; inside a shard_map its collectives would come again.
        may_wait=levels == 1 and not is_local and not offloads_by_kind(policy),
    )
    cut, merged = uncut.at(places), None
    if policy.keep or survey:
        is_free = policy.segments is None and levels == 1 and not is_local and not policy.offloaded
        others = [each for each in looser_cuts(profile) if list(each) != places] if is_free else []
        cuts = [cut, *map(uncut.at, others)]
        frontiers = [each.frontier(profile, live=bool(others)) for each in cuts]
        merged, chosen = least_work(frontiers, WORTH * uncut.flops)
        if policy.keep:
            number, point = chosen[merged.within(policy.keep)]
            cut = cuts[number].keeping(frontiers[number].kept(point))
    return Choice(
        pieces=tuple(uncut.with_waiting(cut)),
        shared=tuple(cut.shared),
        cheap=cut.cheap,
        levels=levels,
        groups=tuple(groups),
        frontier=merged,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A loss cut at some places.

    Attributes:
        places: Positions, ascending, without the ends.
        pieces: What is between them, and what waits for the head, if anything does.
        shared: Cheap values that are made once.
        cheap: The others.
    """

    places: Sequence[int]
    pieces: Sequence[Piece]
    shared: Sequence[Any]
    cheap: CheapValues

    def frontier(self, profile: LiveBytesProfile, *, live: bool) -> MergedFrontier:
        """What the pieces may keep, without what waits for the head; ``live`` for the peak of `LiveBytes`."""
        some, peaks = self.pieces[: len(self.places) + 1], segment_peaks(profile, self.places)
        if live:
            above = LiveBytes(profile).under(tuple(self.places))[0] - max(peaks)
            peaks = [peak + above for peak in peaks]
        return merge_frontiers([each.frontier() for each in some], [each.trips for each in some], peaks)

    def keeping(self, values: Sequence[frozenset[Any]]) -> _Cut:
        """The same whose pieces keep some values."""
        kept = [replace(piece, kept=some) for piece, some in zip(self.pieces, values, strict=False)]
        return replace(self, pieces=[*kept, *self.pieces[len(kept) :]])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Uncut:
    """A loss, and what holds for it wherever it is cut.

    Attributes:
        loss: The loss.
        profile: Its bytes, with its loops as they are cut.
        loops: Those, by their places.
        differentiated: Arguments that are; None where that is not known.
        blocks: Where blocks that repeat begin; None where cuts are not around these.
        may_wait: Whether what waits for the head may be computed again.
    """

    loss: LossProfile
    profile: LiveBytesProfile
    loops: Mapping[int, Loop]
    differentiated: Collection[Any] | None
    blocks: Collection[int] | None
    may_wait: bool

    @property
    def flops(self) -> int:
        """Operations of the loss."""
        return sum(map(equation_flops, self.loss.flat.eqns))

    def at(self, places: Sequence[int]) -> _Cut:
        """The loss cut at some places, where nothing is kept yet."""
        loss = self.loss
        head = head_position(self.profile, places) if self.may_wait and self.blocks is None else None
        bounds = [0, *places, *([] if head is None else [head]), len(loss.flat.eqns)]
        shared = _shared(loss.flat, bounds, loss.cheap, self.differentiated)
        cheap = loss.cheap.without(shared)
        bare = set(bounds[:-1]).difference(self.blocks) if self.blocks is not None else set(bounds[len(places) : -1])
        return _Cut(places=places, pieces=_pieces(loss, bounds, cheap, self.loops, bare), shared=shared, cheap=cheap)

    def with_waiting(self, cut: _Cut) -> Sequence[Piece]:
        """The pieces, and a checkpoint around what waits for the head where that keeps less."""
        if len(cut.pieces) == len(cut.places) + 1:
            return cut.pieces
        *others, waiting, last = cut.pieces
        dear = waiting.segment.dear_values([*self.loss.flat.invars, *cut.shared], self.flops)
        return cut.pieces if dear is None else [*others, replace(waiting, is_checkpointed=True, kept=dear), last]


def _steps_of_loops(
    loss: LossProfile, offload: Collection[str], *, is_local: bool
) -> tuple[dict[int, int], LiveBytesProfile]:
    """How many steps of each loop one checkpoint is put around, and the bytes of the loss with its loops so."""

    def with_steps(steps: Mapping[int, int]) -> LiveBytesProfile:
        return _with_loops(loss.live, loss.flat.eqns, steps)

    steps = dict.fromkeys(loss.loops, 1)
    if not is_local:
        scans = {at: loss.flat.eqns[at] for at in loss.loops}
        steps = steps_together(scans, offload, lambda chosen: smallest_peak(with_steps(chosen)))
    return steps, with_steps(steps)


def _with_loops(profile: LiveBytesProfile, eqns: Sequence[Any], steps: Mapping[int, int]) -> LiveBytesProfile:
    """The same with loops of so many steps under one checkpoint."""
    rows, stored, residuals = [profile.held], profile.stored.copy(), profile.residuals.copy()
    for index, together in steps.items():
        stored[index] = stored_between(eqns[index], together)  # there for the loop itself too, and for all before it
        residuals[index] = held_together(eqns[index], together) + stored[index]
        rows.append(np.array([(residuals[index], index, index)], np.int64))
    return replace(profile, held=np.vstack(rows), stored=stored, residuals=residuals)


def _places(
    profile: LiveBytesProfile, segments: int | None, eqns: Sequence[Any], levels: int
) -> tuple[list[int], list[int]]:
    """Where to cut, and after how many segments each group of two levels ends; no groups where they are of equally many."""
    try:
        places = choose_cuts(profile, segments)
    except ValueError as error:
        raise PolicyError(str(error)) from None
    # One checkpoint around all that a single equation hides would recompute it and save nothing.
    opaque = sum(eqn.primitive.name in _OPAQUE for eqn in eqns) == 1
    if not places and segments is None and not opaque:
        # Where parameters outweigh activations the estimate sees nothing to gain; it was asked for, so the best cut is made.
        with contextlib.suppress(ValueError):
            places = choose_cuts(profile, 2)
    if levels == 1 or not places or profile.forced or segments is not None:
        return places, []
    places, bounds = choose_two_levels(profile, places)
    return places, [places.index(bound) + 1 for bound in bounds]


def _pieces(
    loss: LossProfile, bounds: Sequence[int], cheap: CheapValues, loops: Mapping[int, Loop], bare: Collection[int]
) -> list[Piece]:
    """What is between the cuts, ``bare`` where it begins at one of these; nothing is kept yet."""
    eqns = loss.flat.eqns
    results = results_by_segment(eqns, loss.flat.outvars, bounds)
    stored = [*_stored_results(loss.flat, bounds), None]
    return [
        Piece(
            segment=Segment(eqns[start:end], cheap, results[place], stored[place]),
            loop=loops.get(start),
            is_checkpointed=start not in loops and start not in loss.whole and start not in bare,
        )
        for place, (start, end) in enumerate(itertools.pairwise(bounds))
    ]


def _shared(
    flat: Equations, bounds: Sequence[int], cheap: CheapValues, differentiated: Collection[Any] | None
) -> list[Any]:
    """CheapValues values that several segments use and differentiate: casts, such as that of an embedding that is also the head.

    Made again in each segment a cast would have a gradient in each, and these would be added behind it: in another dtype than
    in the loss as it is written, and by some compilers not before all are there. A v5e's then makes the head's product at the
    end of the step, and the logits' gradient waits for it. What each segment uses another part of, such as a stack of all
    layers' weights, or computes something else from is made again all the same: its gradients would need what it is made of.
    """
    spans = (flat.eqns[start:end] for start, end in itertools.pairwise(bounds))
    uses = collections.Counter(var for span in spans for var in cheap.casts_for(operands_of(span), differentiated))
    return [var for var, count in uses.items() if count > 1]


def _stored_results(flat: Equations, bounds: Sequence[int]) -> list[frozenset[Any]]:
    """What of each segment but the last is in memory until the backward pass, whatever the segment keeps.

    A checkpoint stores all that it takes, and so may a loop or branch. The last segment, which has no checkpoint, stores what
    derivatives need: not what it only adds.
    """
    *bounds, end = bounds
    last = flat.eqns[bounds[-1] : end]
    needed = residual_values(last, set(), {var for var in operands_of(last) if is_inexact(var)})
    inside = operands_of([eqn for eqn in last if subjaxprs(eqn)])
    return results_by_segment(flat.eqns, [*needed, *inside, *flat.outvars], bounds)


# An estimated peak this much above the smallest is as good, if it computes less again.
SLACK = 1 + ALIKE
# Routes that are followed from one place: each takes another part of the budget.
_MOST_LABELS = round(1 / ALIKE)
# Limits that are tried: their results differ by less than a compiler's may by chance.
_LIMITS = round(1 / MARGIN)
# Bytes of a route that is not there; another such, or a segment, may be added to it.
_NEVER = np.iinfo(np.int64).max // 2


def choose_cuts(profile: LiveBytesProfile, segments: int | None = None) -> list[int]:
    """Positions of the cuts, ascending, without 0 and n; empty where cutting cannot help.

    Args:
        profile: What lives where.
        segments: How many segments to make, or None for as many as the smallest estimated peak asks for.

    Raises:
        ValueError: more segments than there are places to cut, or fewer than the forced cuts make.
    """
    places = _candidates(profile) if segments is None and profile.fuses else _outside_the_head(profile, segments)
    least = len(set(profile.forced)) + 1
    if segments is not None and segments < least:
        msg = (
            f"segments={segments}: this loss has loops or checkpoints of its own, which stay whole, and so {least} "
            f"segments at least. Use segments={least} or more, or leave segments out."
        )
        raise ValueError(msg)
    if segments is not None and segments > len(places) - 1:
        msg = (
            f"segments={segments}: this loss can be cut into {len(places) - 1} segments at most. Use a smaller number."
        )
        raise ValueError(msg)
    # For a given number the last segment is taken to hold all that JAX keeps of it: so `RematSearch` asks where a compiler fuses
    # less than the number that is chosen here relies on, or may do so.
    table = _Table(profile, places, unfused=segments is not None)
    bound = int(_smallest(table, segments) * SLACK)
    # Where a compiler fuses, cuts that store least take fewer bytes: a U-Net on an H100 285 MiB in place of 321. On a CPU more.
    route = table.route(bound, segments) if profile.fuses or segments is not None else table.cheapest(bound)
    assert route is not None
    # What compilers hold that fuse is less than `lowered` follows.
    if profile.fuses or not len(profile.uses):
        return places[route].tolist()
    others = _others(table, bound) if segments is None else ()
    routes = tuple(tuple(places[each].tolist()) for each in (route, *others))
    return list(lowered(profile, routes, tuple(places[1:-1].tolist()), fixed=segments is not None))


def _others(table: _Table, bound: int) -> Iterator[list[int]]:
    """Routes of limits on what a single segment holds: moves from one may end where those from another do not."""
    least = int(table.own[table.allowed].min(initial=0))
    for limit in np.linspace(least, bound, _LIMITS).tolist():
        if (route := table.route(int(limit), None, alone=True)) is not None:
            yield route


@functools.lru_cache(maxsize=SIDE)
def looser_cuts(profile: LiveBytesProfile) -> tuple[tuple[int, ...], ...]:
    """Cuts of looser bounds on the estimated peak, which leave less of it for what is kept, and with nothing kept do less again.

    None where compilers fuse: `LiveBytes`, by which different cuts are compared, follows what others hold.
    """
    if profile.fuses or not len(profile.uses):
        return ()
    table = _Table(profile, _outside_the_head(profile, None))
    least, most = _smallest(table, None), int(table.own[0, -1])
    found: dict[tuple[int, ...], None] = {}
    for bound in np.geomspace(max(least, 1), max(least, most, 1), _LIMITS, endpoint=False).astype(np.int64).tolist():
        if route := table.cheapest(bound):
            found[tuple(table.places[route].tolist())] = None
    return tuple(found)


def choose_two_levels(profile: LiveBytesProfile, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cuts for two levels of checkpoints, and those of them that bound groups, which have a checkpoint of their own.

    While a group is differentiated its own cuts are alive, and of the groups before it those that bound them. So segments may be
    shorter than where all cuts are alive at once, and which are best depends on the groups: those of several limits on what a
    single segment holds are tried.

    Args:
        profile: What lives where.
        cuts: Those of one level, ascending, without the ends.

    Returns:
        Positions of all cuts, and of the bounds, each ascending without the ends; as given and none where two levels are not
        estimated to take notably less.
    """
    places = np.union1d(_before_the_head(profile, _candidates(profile)), cuts)
    table = _Table(profile, places, unfused=True)
    here = np.searchsorted(places, [0, *cuts, profile.length])
    most, least = int(table.own[here[:-1], here[1:]].max()), int(table.own[table.allowed].min(initial=0))
    found = [(_grouped(profile, cuts), list(cuts))]
    for limit in np.linspace(least, most, round(1 / NOTABLE)).tolist():
        route = table.route(int(limit), None, alone=True)
        if route is not None:
            fine = [int(places[index]) for index in route]
            found.append((_grouped(profile, fine), fine))
    (peak, bounds), fine = min(found, key=lambda each: (each[0][0], len(each[1])))
    return (fine, bounds) if peak <= (1 - NOTABLE) * max(segment_peaks(profile, cuts)) else (list(cuts), [])


def _grouped(profile: LiveBytesProfile, cuts: Sequence[int]) -> tuple[int, list[int]]:
    """The smallest estimated peak of groups of given segments, and the bounds of these groups."""
    table = _Table(profile, np.array([0, *cuts, profile.length]), unfused=True)
    count = len(table.places)
    here = np.arange(count - 1)
    stored, own = table.stored[here, here + 1], table.own[here, here + 1]
    before = np.cumsum(stored) - stored
    for start in range(count - 1):
        table.own[start, start + 1 :] = np.maximum.accumulate((before - before[start] + own)[start:])
    peak = _smallest(table, None)
    route = table.route(int(peak * SLACK), None)
    assert route is not None
    return peak, [int(table.places[index]) for index in route]


def _is_head(profile: LiveBytesProfile) -> bool:
    """Whether the last product makes more than is alive before it, as logits are; other layers hand on as much as they got."""
    last = profile.last_product
    return last < profile.length and bool(profile.made[last] > alive(profile.spans, profile.length)[last])


def _before_the_head(profile: LiveBytesProfile, places: np.ndarray) -> np.ndarray:
    """The places behind which no head is computed again, the end and the forced ones."""
    last = profile.last_product if _is_head(profile) else profile.length
    return places[(places <= last) | (places == profile.length) | np.isin(places, profile.forced)]


def _outside_the_head(profile: LiveBytesProfile, segments: int | None) -> np.ndarray:
    """The candidates before the head where these are enough, for so many segments or for any; else all."""
    places = _candidates(profile)
    before = _before_the_head(profile, places)
    return before if len(before) > (segments or 2) else places


def smallest_peak(profile: LiveBytesProfile) -> int:
    """The estimated peak in bytes under the best cuts."""
    return _smallest(_Table(profile, _candidates(profile)), None)


def _smallest(table: _Table, segments: int | None) -> int:
    """The smallest budget for which there is a route."""
    low, high = 0, table.upper_bound()
    while high - low > 1:
        middle = (low + high) // 2
        if table.route(middle, segments) is None:
            low = middle
        else:
            high = middle
    return high


def segment_peaks(profile: LiveBytesProfile, cuts: Sequence[int]) -> list[int]:
    """Estimated bytes alive at most while each segment is differentiated, with what was stored before it.

    The last one, most of which has no checkpoint, is taken to hold all that JAX keeps of it: compilers seldom hold as little as
    fusions would let them, and that is how segments that are computed again are estimated.

    Args:
        profile: What lives where.
        cuts: Positions, ascending, without the ends.
    """
    table = _Table(profile, np.array([0, *cuts, profile.length]), unfused=True)
    here = np.arange(len(cuts) + 1)
    stored, own = table.stored[here, here + 1], table.own[here, here + 1]
    return (np.cumsum(stored) - stored + own).tolist()


def head_position(profile: LiveBytesProfile, cuts: Sequence[int]) -> int | None:
    """Position of the last product, such as the logits, where the last segment's peak comes after it; None elsewhere.

    It is so where differentiating the rest from there on takes more than the gradients between the last cut and there: what
    is held in between waits while that peak lasts, and is needed only afterwards.

    Args:
        profile: What lives where.
        cuts: Positions, ascending, without the ends.
    """
    head, start = profile.last_product, cuts[-1] if cuts else profile.length
    if not start < head < profile.length:
        return None
    most = (
        _own_peaks(profile, np.array([head, profile.length]))[0, 1]
        + _unneeded(profile)[head]
        + _not_fused(profile)[head]
    )
    return head if most > profile.gradients[start:head].max() else None


def _candidates(profile: LiveBytesProfile) -> np.ndarray:
    """Positions worth cutting at: the ends, the forced ones, and where little is alive or something lasting is made.

    Of too many, those where no neighbour has less alive; of too many of these the least live one of each stretch of work.
    """
    n, live, inner = profile.length, alive(profile.spans, profile.length), np.arange(1, profile.length)
    low = inner[(live[inner] <= live[inner - 1]) & (live[inner] <= live[inner + 1])]
    beside = inner[(profile.made[inner - 1] >= 0) | (profile.made[inner] >= 0)]
    chosen = np.union1d(low, beside)
    if len(chosen) > SIDE:
        chosen = low if len(low) <= SIDE else _spaced(profile, low, live)
    return np.unique(np.concatenate([[0, n], chosen, np.array(profile.forced, np.int64)])).astype(np.int64)


def _spaced(profile: LiveBytesProfile, places: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Of many places the least live one of each stretch of work."""
    size, maker, _ = profile.held.T
    made = np.bincount(maker, size, profile.length).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(made + profile.stored)])
    bucket = work[places] * SIDE // max(int(work[-1]), 1)
    order = np.lexsort((places, live[places], bucket))
    return places[order][np.r_[True, np.diff(bucket[order]) != 0]]


def _own_peaks(profile: LiveBytesProfile, places: np.ndarray) -> np.ndarray:
    """Most bytes that a segment takes besides what was stored before it, as a matrix over (start, end).

    Differentiated backwards, an equation finds what the segment holds of those before it, the gradients of what is alive
    there, and of what it makes itself. At the segment's end that is all it holds and the gradients it is handed.
    """
    gradients, length = profile.gradients, profile.length
    size, maker, first = profile.held.T
    fused = profile.made < 0
    peaks = np.zeros((len(places), len(places)), np.int64)
    for index, start in enumerate(places[:-1]):
        ends = places[index + 1 :]
        own = maker >= start  # what is before the segment is stored, and counted there
        held = np.cumsum(np.bincount(first[own] - start, size[own], length - start).astype(np.int64))
        most = np.maximum.accumulate(np.where(fused[start:], 0, held + gradients[start:length] + profile.made[start:]))
        handed = held[ends - start - 1] + np.where(ends < length, gradients[ends], 0)
        peaks[index, index + 1 :] = np.maximum(most[ends - start - 1], handed)
    peaks[:, -1] -= _unneeded(profile)[places]
    return peaks


def _not_fused(profile: LiveBytesProfile) -> np.ndarray:
    """Bytes that JAX keeps of what comes after each position above those that fusions hold of it, int64[n + 1]."""
    size, maker, _ = profile.held.T
    more = profile.residuals - np.bincount(maker, size, profile.length).astype(np.int64)
    return np.maximum(np.append(np.cumsum(more[::-1])[::-1], 0), 0)


def _unneeded(profile: LiveBytesProfile) -> np.ndarray:
    """Bytes alive at each position that no derivative behind it needs.

    A segment in the middle is computed again from them. The last one is not, and so does not store them.
    """
    size, first, last, needed = profile.spans[profile.spans[:, 2] < profile.length].T
    begin = np.maximum(first, needed + 1)
    some = begin <= last
    return alive(np.stack([size[some], begin[some], last[some]], axis=1), profile.length)


class _Table:
    """Costs of every segment between two candidate places, as matrices over (start, end).

    Args:
        profile: What lives where.
        places: Positions, the ends included.
        unfused: Whether the last segment holds all that JAX keeps of it, and not only what fusions would.
    """

    def __init__(self, profile: LiveBytesProfile, places: np.ndarray, *, unfused: bool = False) -> None:
        self.places = places
        count = len(places)
        # A value made before place i+1 and alive at place j is stored by every segment that starts at or before its
        # making and ends within its life: a rectangle in (start, end), added at its corners and summed once.
        corners = np.zeros((count + 1, count + 1), np.int64)
        size, first, last, _ = profile.spans.T
        start = np.searchsorted(places, first - 1, side="right")  # starts 0 .. start-1 are at or before the making
        begin = np.searchsorted(places, first, side="left")
        end = np.searchsorted(places, last, side="right")  # ends begin .. end-1 are within the life
        alive = end > begin
        for row, sign_row in ((np.zeros_like(start), 1), (start, -1)):
            for column, sign in ((begin, 1), (end, -1)):
                np.add.at(corners, (row[alive], column[alive]), sign_row * sign * size[alive])
        self.stored = corners.cumsum(0).cumsum(1)[:count, :count]
        self.stored[:, -1] = 0  # results of the loss leave it anyway
        always = np.concatenate([[0], np.cumsum(profile.stored)])[places]
        self.own = _own_peaks(profile, places)
        self.own[:, -1] += _not_fused(profile)[places] if unfused else 0
        self.stored = self.stored + (always[None, :] - always[:, None])
        forced = np.isin(places, profile.forced)
        until = np.array([next((k for k in range(i + 1, count) if forced[k]), count - 1) for i in range(count)])
        ends = np.arange(count)
        self.allowed = (ends[None, :] > ends[:, None]) & (ends[None, :] <= until[:, None])

        # Done again by every segment that holds an equation and one behind it whose derivative needs what that makes: what only
        # a later segment needs is stored at the cut between. The last segment does nothing again.
        again = np.zeros((count + 1, count + 1))
        start = np.searchsorted(places, np.arange(profile.length), side="right") - 1
        np.add.at(again, (start, np.searchsorted(places, profile.needed_from, side="right")), profile.work)
        self.work = again[::-1].cumsum(0)[::-1].cumsum(1)[:count, :count]
        self.work[:, -1] = 0

    def upper_bound(self) -> int:
        """A budget under which every allowed route is possible."""
        return int(self.own.max(initial=0) + 2 * self.stored.max(initial=0) * len(self.places) + 1)

    def cheapest(self, budget: int) -> list[int] | None:
        """Indices of the cut places that do least work again with no segment's peak over ``budget``; None where there are none.

        Less stored before a segment leaves more for it and all behind it. So of the routes to a place those are followed that no
        other beats in both stored bytes and work; of very many one for each small part of the budget.
        """
        # Of all labels so far the place that they end at, and the label that each was lengthened from.
        stored, work, at, before = np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
        end = 0
        for end in range(1, len(self.places)):
            labels = np.flatnonzero(self.allowed[at, end] & (stored + self.own[at, end] <= budget))
            starts = at[labels]
            bytes_, again = stored[labels] + self.stored[starts, end], work[labels] + self.work[starts, end]
            order = np.lexsort((again, bytes_))
            order = order[np.diff(np.minimum.accumulate(again[order]), prepend=np.inf) < 0]
            part = bytes_[order] * _MOST_LABELS // max(budget, 1)
            # Of each part the last; and the first of all, with which there is a route wherever there is any.
            order = order[(np.diff(part, append=-1) != 0) | (np.arange(len(order)) == 0)]
            stored, work = np.append(stored, bytes_[order]), np.append(work, again[order])
            at, before = np.append(at, np.full(len(order), end)), np.append(before, labels[order])
        if at[-1] != end:
            return None
        route, label = list[int](), before[-1]
        while label:
            route.append(int(at[label]))
            label = before[label]
        return route[::-1]

    def route(self, budget: int, segments: int | None, *, alone: bool = False) -> list[int] | None:
        """Indices of the cut places that store least with no segment's peak over ``budget``; None where there are none.

        Args:
            budget: Bytes.
            segments: How many; None for as many as are best.
            alone: Whether a segment's peak is what it holds itself, what was stored before it left aside.
        """
        if segments is not None:
            return self._route_of(budget, segments)
        count = len(self.places)
        cost = np.full(count, _NEVER)
        before = np.full(count, -1)
        cost[0] = 0
        for end in range(1, count):
            candidate = self._extended(cost, end, budget, alone=alone)
            before[end] = int(np.argmin(candidate))
            cost[end] = candidate[before[end]]
        return self._walk(lambda end, _: int(before[end]), int(cost[-1]), None)

    def _route_of(self, budget: int, segments: int) -> list[int] | None:
        count = len(self.places)
        cost = np.full(count, _NEVER)
        cost[0] = 0
        # Over (end, start): the routes with one segment more are found to all ends at once.
        own = np.ascontiguousarray(np.where(self.allowed, self.own, _NEVER).T)
        stored = np.ascontiguousarray(self.stored.T)
        layers = []
        for _ in range(segments):
            candidate = np.where(cost + own <= budget, cost + stored, _NEVER)
            layers.append(candidate.argmin(axis=1))
            cost = candidate.min(axis=1)
            if cost.min() >= _NEVER:
                return None
        return self._walk(lambda end, layer: int(layers[layer][end]), int(cost[-1]), segments)

    def _extended(self, cost: np.ndarray, end: int, budget: int, *, alone: bool = False) -> np.ndarray:
        """Stored bytes of the routes to each start, lengthened by the segment from there to ``end``."""
        peak = self.own[:end, end] if alone else cost[:end] + self.own[:end, end]
        fits = self.allowed[:end, end] & (peak <= budget)
        return np.where(fits, cost[:end] + self.stored[:end, end], _NEVER)

    def _walk(self, before: Any, total: int, segments: int | None) -> list[int] | None:
        if total >= _NEVER:
            return None
        route, end, layer = [], len(self.places) - 1, (segments or 0) - 1
        while (end := before(end, layer)) > 0:
            route.append(end)
            layer -= 1
        return route[::-1]


def steps_together(
    loops: Mapping[int, Any], offload: Collection[str], peak: Callable[[Mapping[int, int]], int]
) -> dict[int, int]:
    """For each loop the number of steps under one checkpoint; 1 is a checkpointed body.

    Args:
        loops: The scans, by any key.
        offload: What waits in host memory, in the policy's words.
        peak: The estimated peak of the whole function with so many steps together.
    """
    # What reports stays in a loop of its own: two loops would not change its order, but its place in the trace. What a step
    # itself sends to the host stays there too: XLA for GPUs fails at a loop in a loop that stacks host memory.
    fixed = bool(set(offload) - {OFFLOAD_CUTS})
    alone = dict.fromkeys(loops, 1)
    some = {key: eqn for key, eqn in loops.items() if not fixed and not eqn.effects and _is_worth_it(eqn)}
    tried = [alone | chosen for chosen in _choices(some)]
    if len(tried) < 2:  # noqa: PLR2004 - nothing to compare
        return tried[0] if tried else alone
    peaks = [peak(chosen) for chosen in tried]
    least = min(peaks)
    # Of equals the one that takes least by itself: the rest of the function may be less than it is estimated to be.
    return min(
        (chosen for chosen, found in zip(tried, peaks, strict=True) if found <= least),
        key=lambda chosen: sum(held_and_stored(loops[key], steps) for key, steps in chosen.items()),
    )


def _sizes(eqn: Any) -> list[int]:
    """What is worth trying: where steps are left over, compilers copy stacks once more, and so divisors do if they do as well."""
    length, every = int(eqn.params["length"]), sizes(int(eqn.params["length"]))
    divisors = [part for part in every if length % part == 0]
    least = min((held_and_stored(eqn, part) for part in divisors), default=0)
    return every if any(held_and_stored(eqn, part) < (1 - MARGIN) * least for part in every) else divisors


def _is_worth_it(eqn: Any) -> bool:
    totals = [held_and_stored(eqn, part) for part in _sizes(eqn)]
    return bool(totals) and min(totals) < (1 - MARGIN) * totals[0]


def _choices(loops: Mapping[int, Any]) -> Iterator[dict[int, int]]:
    """For each amount of memory that steps may hold together, as many in each loop as stay within it."""
    parts = {key: _sizes(eqn) for key, eqn in loops.items()}
    amounts = sorted({held_together(loops[key], part) for key, several in parts.items() for part in several[1:]})
    seen: list[dict[int, int]] = []
    for most in amounts:
        chosen = {
            key: max((part for part in several[1:] if held_together(loops[key], part) <= most), default=1)
            for key, several in parts.items()
        }
        if chosen not in seen:
            seen.append(chosen)
            yield chosen
