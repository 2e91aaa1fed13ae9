"""The profile of a loss: its equations, what is made again rather than kept, the bytes alive along them, and blocks that repeat.

Blocks are what the loss's author would put checkpoints around. Layers that were written out one by one trace to equal runs of
equations. Where they differ in their shapes, as in a U-Net, the scopes that modules give their equations tell them apart. Of
several ways to see blocks the one is taken under which least is estimated to be alive at once, if each block keeps only its
inputs and everything else is left alone.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from jaxmem_callbacks.transforms.costs import (
    CHEAP,
    PRODUCTS,
    SAME,
    alive,
    collective_work,
    equation_flops,
    has_product,
    inner_residual_bytes,
    is_differentiated,
    is_fused,
    is_inexact,
    nbytes,
    needed_by,
    scan_carry_bytes,
    scan_step_bytes,
    view_roots,
)
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    flatten,
    has_own_checkpoint,
    is_chunked,
    reports_inside,
    scan_arity,
    side_effects,
    subjaxprs,
    variables,
)

# The same elements in another dtype, shape or order.
_RELABELLED = {"convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
# Tuned: a longer chain is no longer cheap (a dropout mask from its key takes about a dozen steps).
_MOST_STEPS = 24
# First and last position of a block, the last excluded.
Span = tuple[int, int]
# Scopes that JAX's transformations write around those of modules.
_TRANSFORMATIONS = ("jvp(", "transpose(", "vmap(", "jit(", "remat(", "checkpoint(", "rematted_computation(")


@dataclass(frozen=True, slots=True)
class CheapValues:
    """Values that are cheap functions of the arguments alone, such as parameters cast to bf16, masks and folded keys.

    Arguments are in memory anyway, so such a value is made again where it is used and never kept across a cut. Without
    this a cast of all parameters at the top of a loss costs 1.6 times the bytes of hand-written remat.

    Attributes:
        makers: Value -> the equation that makes it, with its place in the whole list.
        origins: Value -> the arguments it is made of.
    """

    makers: dict[Any, tuple[int, Any]]
    origins: dict[Any, frozenset[Any]]

    def equations_for(self, wanted: Iterable[Any]) -> list[Any]:
        """The equations that make the cheap values among ``wanted``, in order."""
        found: dict[int, Any] = {}
        pending = [var for var in wanted if var in self.makers]
        while pending:
            index, eqn = self.makers[pending.pop()]
            if index not in found:
                found[index] = eqn
                pending.extend(var for var in variables(eqn.invars) if var in self.makers)
        return [found[index] for index in sorted(found)]

    def casts_for(self, wanted: Iterable[Any], differentiated: Collection[Any] | None) -> dict[Any, None]:
        """The cheap values that make those ``wanted`` which are differentiated arguments in another dtype.

        Args:
            wanted: Values that some equations use.
            differentiated: The arguments that are; None where that is not known, for all that can be.
        """
        found: dict[Any, None] = {}
        for value in wanted:
            argument, var = self._argument_of(value), value
            if argument is None or not (is_inexact(argument) and is_inexact(value)):
                continue
            while var.aval.dtype != argument.aval.dtype and (differentiated is None or argument in differentiated):
                found[var] = None
                (var,) = variables(self.makers[var][1].invars)
        return found

    def _argument_of(self, var: Any) -> Any | None:
        """The argument all of whose elements a value holds; None where something else is made of it, or of a part."""
        while var in self.makers:
            _, maker = self.makers[var]
            operands = variables(maker.invars)
            # A literal that is cast has no operand that is a variable.
            if maker.primitive.name not in _RELABELLED or [one.aval.size for one in operands] != [var.aval.size]:
                return None
            (var,) = operands
        return var

    def without(self, kept: Collection[Any]) -> CheapValues:
        """The same, but for values that are kept all the same."""
        return replace(self, makers={var: maker for var, maker in self.makers.items() if var not in kept})


def cheap_values(flat: Equations) -> tuple[CheapValues, Equations]:
    """The values of a function that are made again rather than kept, and the function without their equations.

    What is left are the equations that can be cut.
    """
    origins = {var: frozenset((var,)) for var in flat.invars}
    depth = dict.fromkeys(flat.invars, 0)
    makers: dict[Any, tuple[int, Any]] = {}
    for index, eqn in enumerate(flat.eqns):
        operands = variables(eqn.invars)
        if eqn.primitive.name not in CHEAP or eqn.effects or not all(var in origins for var in operands):
            continue
        steps = 1 + max((depth[var] for var in operands), default=0)
        if steps > _MOST_STEPS:
            continue
        made_of = frozenset[Any]().union(*(origins[var] for var in operands))
        makers.update((var, (index, eqn)) for var in eqn.outvars)
        origins.update((var, made_of) for var in eqn.outvars)
        depth.update((var, steps) for var in eqn.outvars)
    left = tuple(eqn for eqn in flat.eqns if not eqn.outvars or not all(var in makers for var in eqn.outvars))
    return CheapValues(makers, origins), replace(flat, eqns=left)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBytes:
    """What is in memory while a list of n equations is differentiated.

    Attributes:
        rows: int64[values, 3]: bytes of what is held, the equation that makes it, and the first whose derivative uses it.
        made: int64[n]: bytes each equation makes at once; -1 where it is done inside a fusion.
        needed: Value -> last equation whose derivative uses it, or something that a fusion makes of it.
        roots: Value that is a view -> what it is a view of.
        last_product: The last matrix product that is differentiated; n without one.
    """

    rows: np.ndarray
    made: np.ndarray
    needed: dict[Any, int]
    roots: dict[Any, Any]
    last_product: int

    def needed_until(self, var: Any) -> int:
        """The last equation whose derivative uses a value or a view of it; -1 where none does."""
        return self.needed.get(self.roots.get(var, var), -1)


def backward_bytes(eqns: Sequence[Any], resident: set[Any]) -> BackwardBytes:
    """What a list of equations has in memory while it is differentiated.

    Args:
        eqns: Flat equations.
        resident: Values that cost nothing: arguments, constants and cheap values.
    """
    roots, active = view_roots(eqns), _active(eqns, resident)
    read = {roots.get(var, var) for eqn in eqns if eqn.primitive.name in PRODUCTS for var in variables(eqn.invars)}
    wanted, rows = _Wanted(roots), list[tuple[int, int, int]]()
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if not active.isdisjoint(variables(eqn.invars)):
            rows.append((inner_residual_bytes(eqn), index, index))
            wanted.add(needed_by(eqn, active), index, index)
        for var in eqn.outvars:
            if var not in wanted.first or var in resident:
                continue
            if is_fused(eqn) and var not in read:
                # A fusion makes it again of its operands, which are wanted as long as it is.
                wanted.add(variables(eqn.invars), wanted.first[var], wanted.last[var])
            else:
                rows.append((nbytes(var), index, wanted.first[var]))
    made = [-1 if is_fused(eqn) else sum(map(nbytes, eqn.outvars)) for eqn in eqns]
    products = [
        index for index, eqn in enumerate(eqns) if has_product(eqn) and not active.isdisjoint(variables(eqn.invars))
    ]
    some = np.array([row for row in rows if row[0]], np.int64).reshape(-1, 3)
    return BackwardBytes(
        rows=some,
        made=np.array(made, np.int64),
        needed=wanted.last,
        roots=roots,
        last_product=products[-1] if products else len(eqns),
    )


def gradient_spans(eqns: Sequence[Any], lives: Sequence[tuple[Any, int, int]]) -> np.ndarray:
    """Bytes, first and last position of the gradients that are in memory while a list of equations is differentiated.

    What a fusion makes of one value alone has no gradient in memory: it is computed where it goes into that value's. Such are a
    norm's float32 copies of a bfloat16 value. What it is computed from stays until then: the gradient of a product's operand.

    Args:
        eqns: Flat equations.
        lives: Each value with the first and last position at which it is alive.
    """
    read = {var for eqn in eqns if eqn.primitive.name in PRODUCTS for var in variables(eqn.invars)}
    source, since = dict[Any, Any](), dict[Any, int]()
    for index, eqn in enumerate(eqns):
        operands = [var for var in variables(eqn.invars) if is_inexact(var)]
        most = max(map(_elements, operands), default=0)
        if not most or not is_fused(eqn):
            continue
        large = [var for var in operands if 2 * _elements(var) > most]
        begins = min(since[var] if var in source else index + 1 for var in large)
        sources = {source.get(var, var) for var in large}
        for var in eqn.outvars:
            since[var] = begins
            if len(sources) == 1 and var not in read and _elements(var) == most:
                source[var] = next(iter(sources))
    rows = [
        (nbytes(var), min(first, since.get(var, first)), last)
        for var, first, last in lives
        if is_inexact(var) and var not in source
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def _elements(var: Any) -> int:
    return math.prod(var.aval.shape)


class _Wanted:
    """The first and the last equation whose derivative uses each value."""

    def __init__(self, roots: dict[Any, Any]) -> None:
        self._roots = roots
        self.first: dict[Any, int] = {}
        self.last: dict[Any, int] = {}

    def add(self, used: Sequence[Any], first: int, last: int) -> None:
        for var in used:
            root = self._roots.get(var, var)
            self.first[root] = min(first, self.first.get(root, first))
            self.last[root] = max(last, self.last.get(root, last))


def _active(eqns: Sequence[Any], resident: set[Any]) -> set[Any]:
    """The values that are differentiated."""
    active = {var for var in resident if is_inexact(var)}
    for eqn in eqns:
        is_differentiated(eqn, active)
    return active


def held_by_body(eqn: Any) -> int:
    """Bytes that are held while one step of a loop is differentiated."""
    flat = flatten(subjaxprs(eqn)[0])
    return int(backward_bytes(flat.eqns, set(flat.invars)).rows[:, 0].sum())


def held_together(eqn: Any, steps: int) -> int:
    """Bytes that are held while so many steps of a loop are differentiated under one checkpoint."""
    if steps == 1:
        return held_by_body(eqn)
    # No fusion reaches from a loop into the next: the inner one stacks all that JAX keeps. And in parts, compilers copy what
    # the loop is given a slice of in each step: stacked weights, or a sequence's inputs.
    return steps * scan_step_bytes(eqn) + sum(map(nbytes, eqn.invars[sum(scan_arity(eqn)) :]))


def stored_between(eqn: Any, steps: int) -> int:
    """Bytes of the carries that a loop stores with so many steps under one checkpoint."""
    length = int(eqn.params["length"])
    return scan_carry_bytes(eqn) // max(length, 1) * -(-length // steps)


def held_and_stored(eqn: Any, steps: int) -> int:
    """Bytes of a loop with so many steps under one checkpoint: of its carries, and while it is differentiated."""
    held = scan_step_bytes(eqn) if steps == 1 else held_together(eqn, steps)
    return held + stored_between(eqn, steps)


def residual_rows(eqns: Sequence[Any], resident: Collection[Any]) -> tuple[np.ndarray, np.ndarray]:
    """What JAX keeps of a plain list of n equations, and what that asks a segment to compute again.

    Args:
        eqns: Flat equations.
        resident: Values that are there anyway: arguments, constants and cheap values.

    Returns:
        int64[values, 3]: bytes, the equation that makes them, and the first whose derivative needs them. And int64[n]: for each
        equation the first whose derivative needs something made of its results; n where none does.
    """
    count, roots, active = len(eqns), view_roots(eqns), {var for var in resident if is_inexact(var)}
    first, rows = dict[Any, int](), list[tuple[int, int, int]]()
    for index, eqn in enumerate(eqns):
        if not is_differentiated(eqn, active):
            continue
        for var in needed_by(eqn, active):
            first.setdefault(roots.get(var, var), index)
        rows.append((inner_residual_bytes(eqn), index, index))
    of_readers, needed_from = dict[Any, int](), np.full(count, count, np.int64)
    for index in reversed(range(count)):
        for var in eqns[index].outvars:
            if var in first and var not in resident:
                rows.append((nbytes(var), index, first[var]))
            own = first.get(roots.get(var, var), count)
            needed_from[index] = min(needed_from[index], own, of_readers.get(var, count))
        for var in variables(eqns[index].invars):
            of_readers[var] = min(of_readers.get(var, count), int(needed_from[index]))
    return np.array([row for row in rows if row[0]], np.int64).reshape(-1, 3), needed_from


def value_uses(eqns: Sequence[Any], resident: Collection[Any]) -> np.ndarray:
    """Who uses what, as `LiveBytesProfile.uses`; views as what they are views of.

    Args:
        eqns: Flat equations.
        resident: Values that are there anyway: arguments, constants and cheap values.
    """
    roots, active = view_roots(eqns), {var for var in resident if is_inexact(var)}
    maker, number, rows = dict[Any, int](), dict[Any, int](), dict[tuple[int, ...], None]()
    for index, eqn in enumerate(eqns):
        needed = needed_by(eqn, active) if is_differentiated(eqn, active) else []
        maker.update((var, index) for var in eqn.outvars if var not in resident and var not in roots)
        for used, is_derived in ((variables(eqn.invars), 0), (needed, 1)):
            for var in (roots.get(each, each) for each in used):
                if var in maker:
                    row = (number.setdefault(var, len(number)), nbytes(var), maker[var], index, is_derived)
                    rows[row] = None
    return np.array(list(rows), np.int64).reshape(-1, 5)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveBytesProfile:
    """Bytes along a list of n equations; a position p is before equation p, and n is the end.

    Two are equal where their bytes are: each step of a search traces the loss anew, and asks for the same cuts.

    Attributes:
        spans: int64[values, 4]: bytes, first and last position at which a value that must be stored is alive, and the last
            equation whose derivative needs it (-1 for none).
        held: int64[values, 3]: bytes of what is in memory while its segment is differentiated, the equation that makes it,
            and the first whose derivative needs it; as compilers hold that do elementwise work inside its readers.
        kept: int64[values, 3]: the same of what JAX keeps, which a CPU's compiler holds.
        uses: int64[uses, 5]: who uses what: a value's number, its bytes, the equation that makes it, one that uses it, and 1
            where that one's derivative does.
        fuses: Whether ``held`` is what is held by compilers that fuse.
        work: float64[n]: operations of each equation, with what it moves between devices; see `costs.collective_work`.
        needed_from: int64[n]: the first equation whose derivative needs something made of an equation's results; n for none.
        gradients: int64[n + 1]: bytes of the gradients that are in memory at each position on the way back.
        made: int64[n]: bytes each equation makes at once; -1 where compilers do it inside another.
        stored: int64[n]: bytes an equation stores from forward to backward whatever the cuts (a scan's carries).
        forced: Positions at which a cut must be, because an equation brings its own checkpoint.
        residuals: int64[n]: bytes JAX keeps of each equation where it is in no checkpoint; of a loop, what its checkpoints keep.
        last_product: Position before the last matrix product that is differentiated: behind it a cut would compute that product
            again. n without one.
    """

    spans: np.ndarray
    held: np.ndarray
    kept: np.ndarray
    work: np.ndarray
    needed_from: np.ndarray
    gradients: np.ndarray
    made: np.ndarray
    stored: np.ndarray
    forced: tuple[int, ...]
    residuals: np.ndarray
    last_product: int
    uses: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.int64))
    fuses: bool = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveBytesProfile) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        values = (getattr(self, each.name) for each in fields(self))
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in values)

    @property
    def length(self) -> int:
        """Number of equations."""
        return len(self.made)

    def unfused(self) -> LiveBytesProfile:
        """The same as a compiler holds it that fuses little, such as a CPU's."""
        return replace(self, held=self.kept, fuses=False)


def lives_of(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Each value that is used, with the first and last position at which it is alive."""
    last = {var: index for index, eqn in enumerate(eqns) for var in variables(eqn.invars)}
    last |= dict.fromkeys(variables(outvars), len(eqns))
    return [
        (var, index + 1, last[var])
        for index, eqn in enumerate(eqns)
        for var in eqn.outvars
        if last.get(var, -1) > index
    ]


def is_layer_scan(eqn: Any, enough: int) -> bool:
    """Whether an equation is a loop whose stacked residuals, at least ``enough`` bytes, are worth a checkpointed body.

    A body that itself holds a loop or branch which reports is left as it is: its reports would come twice.
    """
    if eqn.primitive.name != "scan" or has_own_checkpoint(eqn) or is_chunked(eqn):
        return False
    if side_effects(eqn) and any(map(reports_inside, flatten(eqn.params["jaxpr"], hoist_constants=False).eqns)):
        return False
    return int(eqn.params["length"]) * scan_step_bytes(eqn) >= max(enough, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossProfile:
    """A flat loss and all that its cuts are chosen from. Made by `profile_loss`, and never changed.

    Attributes:
        flat: The loss, without the equations of its cheap values.
        cheap: Values that are made again where they are used.
        loops: Equations that are loops over layers: their bodies get checkpoints.
        whole: Equations that are left as they are: their author's checkpoints, loops over chunks, and loops and
            branches that report.
        live: Bytes along the equations, without what the loops over layers hold and store.
    """

    flat: Equations
    cheap: CheapValues
    loops: tuple[int, ...]
    whole: frozenset[int]
    live: LiveBytesProfile


def profile_loss(flat: Equations, cheap: CheapValues, kept_bytes: int | None = None) -> LossProfile:
    """Estimate what lives where in a loss.

    Args:
        flat: The loss, without the equations of its cheap values.
        cheap: Those values.
        kept_bytes: What the loss as it was written keeps for its backward pass, where checkpoints were put into it since;
            None for what ``flat`` keeps.
    """
    eqns, resident = flat.eqns, set(cheap.origins)
    kept, needed_from = residual_rows(eqns, resident)
    residuals = np.bincount(kept[:, 1], kept[:, 0], len(eqns)).astype(np.int64)
    least = small_part(residuals.sum() if kept_bytes is None else kept_bytes)
    loops = tuple(index for index, eqn in enumerate(eqns) if is_layer_scan(eqn, least))
    alone = {*loops, *(index for index, eqn in enumerate(eqns) if _stays(eqn))}
    backward = backward_bytes(eqns, resident)
    lives = lives_of(eqns, flat.outvars)
    spans = [(nbytes(var), first, last, backward.needed_until(var)) for var, first, last in lives]
    live = LiveBytesProfile(
        spans=np.array(spans, np.int64).reshape(-1, 4),
        held=backward.rows[~np.isin(backward.rows[:, 1], list(alone))],
        kept=kept[~np.isin(kept[:, 1], list(alone))],
        work=np.array([equation_flops(eqn) + collective_work(eqn) for eqn in eqns], np.float64),
        needed_from=needed_from,
        gradients=alive(gradient_spans(eqns, lives), len(eqns)),
        made=backward.made,
        stored=np.zeros(len(eqns), np.int64),
        forced=tuple(sorted({place for index in alone for place in (index, index + 1)} - {0, len(eqns)})),
        residuals=residuals,
        last_product=backward.last_product,
        uses=value_uses(eqns, resident),
    )
    return LossProfile(flat=flat, cheap=cheap, loops=loops, whole=frozenset(alone.difference(loops)), live=live)


def _stays(eqn: Any) -> bool:
    """Whether an equation is left as it is: its author's checkpoint, a loop over chunks, or one that reports inside."""
    return has_own_checkpoint(eqn) or is_chunked(eqn) or reports_inside(eqn)


def small_part(kept_bytes: float) -> int:
    """Bytes that are not worth a checkpoint, of all that a loss keeps."""
    return int(kept_bytes * SAME)  # a checkpoint there costs time and saves nothing


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
