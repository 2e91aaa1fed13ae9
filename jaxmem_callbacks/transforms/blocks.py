"""The blocks that repeat in a loss: what its author would put checkpoints around.

Layers that were written out one by one trace to equal runs of equations. Where they differ in their shapes, as in a U-Net, the
scopes that modules give their equations tell them apart. Of several ways to see blocks the one is taken under which least is
estimated to be alive at once, if each block keeps only its inputs and everything else is left alone.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxmem_callbacks.transforms.costs import has_product
from jaxmem_callbacks.transforms.loss_profile import LiveBytesProfile, LossProfile, alive, small_part
from jaxmem_callbacks.transforms.tracing import subjaxprs

# First and last position of a block, the last excluded.
Span = tuple[int, int]
# Scopes that JAX's transformations write around those of modules.
_TRANSFORMATIONS = ("jvp(", "transpose(", "vmap(", "jit(", "remat(", "checkpoint(", "rematted_computation(")


def repeated_blocks(loss: LossProfile, profile: LiveBytesProfile) -> list[Span]:
    """Blocks worth a checkpoint each, in order; none where nothing repeats, or checkpoints around what does save nothing.

    Args:
        loss: The loss. No block holds a loop or a checkpoint that stays as it is.
        profile: The bytes along its equations, what its loops store among them.
    """
    ways = [*_equal_runs(loss, profile), *_scopes(loss)]
    gain = max(small_part(float(profile.residuals.sum())), 1)
    chosen: list[Span] = []
    least = _peak(profile, chosen)
    while True:
        added = [
            sorted([*chosen, *blocks])
            for blocks in ways
            if all(_are_apart(one, two) for one in blocks for two in chosen)
        ]
        peaks = [_peak(profile, blocks) for blocks in added]
        # Of equals the first: equal runs come before scopes, and short blocks before long ones.
        best = min(range(len(added)), key=peaks.__getitem__, default=None)
        if best is None or peaks[best] > least - gain:
            return chosen
        chosen, least = added[best], peaks[best]


def _are_apart(one: Span, two: Span) -> bool:
    return one[1] <= two[0] or two[1] <= one[0]


def _peak(profile: LiveBytesProfile, blocks: Sequence[Span]) -> int:
    """Estimated bytes alive at most, where each block is computed again from its inputs and nothing else is.

    What is left alone keeps what JAX keeps of it until it is differentiated; a block keeps that while it is differentiated.
    """
    size, first, last, _ = profile.spans.T
    kept = np.concatenate([[0], np.cumsum(profile.residuals)])
    if not blocks:
        return int(kept[-1])
    starts, ends = np.array(blocks, np.int64).T
    taker = np.searchsorted(starts, first)  # the first block that begins at or behind where a value is made
    handed = (taker < len(starts)) & (last >= np.append(starts, profile.length + 1)[taker])
    between = kept[starts] - kept[np.append(0, ends[:-1])]
    waiting = np.cumsum(np.bincount(taker[handed], size[handed], len(starts)).astype(np.int64) + between)
    return int(max((waiting + kept[ends] - kept[starts]).max(), waiting[-1] + kept[-1] - kept[ends[-1]]))


def _equal_runs(loss: LossProfile, profile: LiveBytesProfile) -> Iterator[list[Span]]:
    """Blocks that are equal, equation for equation: of each stretch that repeats itself the shortest period.

    Where a stretch holds more than a whole number of blocks, they begin where least is alive.
    """
    kinds, place_of = _kinds(loss)
    live, length = alive(profile.spans, profile.length)[place_of], len(kinds)
    seen: list[Span] = []
    for period in range(1, length // 2 + 1):
        repeats = np.r_[False, kinds[:-period] == kinds[period:], False].astype(np.int8)
        edges = np.flatnonzero(np.diff(repeats))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            stretch = start, stop + period
            if stop - start < period or any(low <= stretch[0] and stretch[1] <= high for low, high in seen):
                continue
            seen.append(stretch)
            count, left = divmod(stretch[1] - start, period)
            bounds = start + np.arange(left + 1)[:, None] + period * np.arange(count + 1)
            chosen = place_of[bounds[live[bounds].sum(1).argmin()]].tolist()
            blocks = [(begin, end) for begin, end in itertools.pairwise(chosen) if begin < end]
            if len(blocks) > 1:
                yield blocks


def _kinds(loss: LossProfile) -> tuple[np.ndarray, np.ndarray]:
    """A number for each equation as it was written, the same for equal ones; and its place among those that are cut.

    Equations of cheap values are part of the pattern: a first block that works on arguments alone has fewer others than the next.
    """
    cheap = dict(loss.cheap.makers.values())
    is_cut = np.ones(len(cheap) + len(loss.flat.eqns), bool)
    is_cut[list(cheap)] = False
    place_of = np.concatenate([[0], np.cumsum(is_cut)])
    numbers: dict[Hashable, int] = {}
    kinds = list[int]()
    for place, own in enumerate(place_of[:-1].tolist()):
        stays = is_cut[place] and (own in loss.loops or own in loss.whole)
        kind = place if stays else _kind(loss.flat.eqns[own] if is_cut[place] else cheap[place])
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return np.array(kinds, np.int64), place_of


def _kind(eqn: Any) -> Hashable:
    """What two equations are equal in: the operation, with the shapes and dtypes that it takes and makes, in its bodies too.

    The values of literals and parameters may differ: they say which layer's weights are taken, or how far a layer looks.
    """
    types = [
        (getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)) for atom in (*eqn.invars, *eqn.outvars)
    ]
    return eqn.primitive.name, *types, *(tuple(map(_kind, body.eqns)) for body in subjaxprs(eqn))


def _scopes(loss: LossProfile) -> Iterator[list[Span]]:
    """Blocks that are the parts of one scope, such as the modules of a model; those that hold a product."""
    eqns = loss.flat.eqns
    parts: dict[tuple[str, ...], list[tuple[str, int, int]]] = collections.defaultdict(list)
    for place, eqn in enumerate(eqns):
        name = _scope(eqn)
        for depth, part in enumerate(name):
            runs = parts[name[:depth]]
            if runs and runs[-1][0] == part and runs[-1][2] == place:
                runs[-1] = part, runs[-1][1], place + 1
            else:
                runs.append((part, place, place + 1))
    products = np.array([has_product(eqn) for eqn in eqns], bool)
    stay = {*loss.loops, *loss.whole}
    for runs in parts.values():
        blocks = [(a, b) for _, a, b in runs if products[a:b].any() and stay.isdisjoint(range(a, b))]
        if len(blocks) > 1:
            yield blocks


def _scope(eqn: Any) -> tuple[str, ...]:
    """The names of the modules around an equation, without those of JAX's transformations."""
    found = []
    for part in str(eqn.source_info.name_stack).split("/"):
        name = part
        while name.startswith(_TRANSFORMATIONS):
            name = name.partition("(")[2].removesuffix(")")
        if name:
            found.append(name)
    return tuple(found)
