"""Chunks: a stretch of a loss that is a map along one dimension, computed a part of its positions at a time.

From a large value equations are gathered that make it and use it, until what crosses is small. They are proved to be a map along
one of its dimensions (`maps.prove`). Then they become one `scan` over chunks of the positions under a checkpoint: what crosses in
is divided, or shared by all chunks; what crosses out is put together again, or is a sum and added up. Values are the same,
and so are random draws, which are made outside for all positions at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxmem_callbacks._compat.remat3 import first_checkpoints
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import HEAD
from jaxmem_callbacks.transforms.costs import PRODUCTS, has_product, nbytes
from jaxmem_callbacks.transforms.maps.evaluation import Positions, compute, widened
from jaxmem_callbacks.transforms.maps.places import SUM, NotAMapError, Passing, Place, Result, Where
from jaxmem_callbacks.transforms.maps.proof import Mapped, passing, prove
from jaxmem_callbacks.transforms.own_checkpoints import own_lines
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    close,
    derive,
    evaluate,
    flatten,
    is_chunked,
    is_variable,
    keep_nothing,
    side_effects,
    typed,
    variables,
)

# Tuned: values of fewer elements than this part of the largest cross into a stretch and out of it.
_SMALL = 4
# Tuned: values around which a stretch is looked for, which takes as long as there are equations for each.
_SEEDS = 24
# Reasons that a refusal names.
_REASONS = 3
# The same elements in a narrower dtype, or in another order.
_RELABELLED = {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Equations of a function that are a map along one dimension.

    Attributes:
        indices: Where they are among the function's equations.
        steps: They, as proved.
        positions: The first position and the one behind the last.
        outs: Their results that are used elsewhere, and where the dimension is in each.
        saved: Bytes of what is made and used inside.
    """

    indices: tuple[int, ...]
    steps: tuple[Mapped, ...]
    positions: tuple[int, int]
    outs: dict[Any, Result]
    saved: int

    @property
    def length(self) -> int:
        """How many positions it has."""
        return self.positions[1] - self.positions[0]


class _Graph:
    """Which equation makes each value of a function, and which use it."""

    def __init__(self, flat: Equations) -> None:
        self.flat, self.eqns = flat, flat.eqns
        self.maker = {var: index for index, eqn in enumerate(flat.eqns) for var in eqn.outvars}
        self.users: dict[Any, list[int]] = {}
        for index, eqn in enumerate(flat.eqns):
            for var in dict.fromkeys(variables(eqn.invars)):
                self.users.setdefault(var, []).append(index)

    def behind(self, values: Iterable[Any]) -> set[int]:
        """The equations that need one of some values, themselves or by others."""
        reached, found = set(values), set[int]()
        for index, eqn in enumerate(self.eqns):
            if not reached.isdisjoint(variables(eqn.invars)):
                reached.update(eqn.outvars)
                found.add(index)
        return found

    def before(self, values: Iterable[Any]) -> set[int]:
        """The equations that some values need, themselves or by others."""
        needed, found = set(values), set[int]()
        for index in reversed(range(len(self.eqns))):
            if not needed.isdisjoint(self.eqns[index].outvars):
                needed.update(variables(self.eqns[index].invars))
                found.add(index)
        return found


def _elements(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS


class _Growth:
    """The equations around one value, with where its dimension is in all that they touch.

    Args:
        graph: The function.
        seed: The value.
        axis: Its dimension.
        between_products: Whether to stop at matrix products: at what the first ones take, and at what the last ones make.
    """

    def __init__(self, graph: _Graph, seed: Any, axis: int, *, between_products: bool) -> None:
        self._graph, self._seed, self._between = graph, seed, between_products
        self._known: dict[Any, Result] = {seed: Place(axis)}
        self._todo = [seed]
        self.places: dict[int, Passing] = {}

    def run(self) -> dict[int, Passing]:
        """All of them.

        Raises:
            NotAMapError: one of them works along the dimension, or needs what is outside.
        """
        while self._todo:
            value = self._todo.pop()
            if value in self._graph.flat.outvars:
                msg = f"{value.aval.str_short()} is a result of the loss itself"
                raise NotAMapError(msg)
            self._reach(value)
            if not self._todo:
                self._close()
        return self.places

    def _reach(self, value: Any) -> None:
        maker = self._graph.maker.get(value)
        if maker is None and value is self._seed:
            msg = f"{value.aval.str_short()} is an argument of the loss"
            raise NotAMapError(msg)
        if maker is not None and maker not in self.places:
            try:
                self._add(maker)
            except NotAMapError:  # it is made whole, and divided
                if value is self._seed:
                    raise
        for index in self._graph.users.get(value, ()):
            self._add(index)

    def _add(self, index: int) -> None:
        if index in self.places:
            return
        eqn = self._graph.eqns[index]
        if is_chunked(eqn):
            msg = f"`{eqn.primitive.name}` is in chunks already"
            raise NotAMapError(msg)
        ins, outs = passing(eqn, self._known)
        self.places[index] = ins, outs
        is_end = self._between and _is_product(eqn)
        for atom, at in zip(eqn.invars, ins, strict=True):
            self._note(eqn, atom, at, goes_on=not is_end)
        for var, at in zip(eqn.outvars, outs, strict=True):
            self._note(eqn, var, at, goes_on=not is_end or var is self._seed)

    def _note(self, eqn: Any, atom: Any, at: Result, *, goes_on: bool) -> None:
        if at is None or not is_variable(atom):
            return
        is_large = _SMALL * _elements(atom) > _elements(self._seed)
        if self._known.setdefault(atom, at) != at and (is_large or atom in eqn.outvars):
            msg = f"`{eqn.primitive.name}` meets two positions of {atom.aval.str_short()}"
            raise NotAMapError(msg)
        # What a product makes at the end of a stretch crosses; one inside it is reached from its other side.
        if is_large and at != SUM and goes_on:
            self._todo.append(atom)

    def _close(self) -> None:
        """Add what is between two equations of the stretch."""
        eqns = self._graph.eqns
        late = self._graph.behind(var for index in self.places for var in eqns[index].outvars)
        early = self._graph.before(var for index in self.places for var in variables(eqns[index].invars))
        for index in sorted(late & early - self.places.keys()):
            atoms = (*eqns[index].outvars, *variables(eqns[index].invars))
            if not any(self._known.get(atom) is not None for atom in atoms):
                msg = f"`{eqns[index].primitive.name}` is between and does not have the dimension"
                raise NotAMapError(msg)
            self._add(index)


def _stretch(graph: _Graph, places: dict[int, Passing]) -> Stretch:
    """Equations proved to be a map; see `_Growth`.

    Raises:
        NotAMapError: they are none.
    """
    indices = tuple(sorted(places))
    eqns = [graph.eqns[index] for index in indices]
    for eqn in eqns:
        if side_effects(eqn):
            msg = f"`{eqn.primitive.name}` reports, and would do so once for each chunk"
            raise NotAMapError(msg)
    steps = prove(eqns, {}, [places[index] for index in indices])
    made: dict[Any, Result] = {var: at for step in steps for var, at in zip(step.eqn.outvars, step.outs, strict=True)}
    inside, returned = set(indices), set(variables(graph.flat.outvars))
    outs: dict[Any, Result] = {
        var: at for var, at in made.items() if var in returned or not inside.issuperset(graph.users.get(var, ()))
    }
    if any(at is None for at in made.values()):
        msg = "some of what is computed has no position"
        raise NotAMapError(msg)
    ends = [(at, var) for var, at in outs.items() if isinstance(at, Place)]
    ends += [(step.ins[0], step.eqn.invars[0]) for step in steps if SUM in step.outs and step.ins[0] is not None]
    ranges = {(at.offset, at.offset + at.positions(var)) for at, var in ends}
    if len(ranges) != 1:
        msg = "its results are of different positions"
        raise NotAMapError(msg)
    ((low, high),) = ranges
    for step in steps:
        for atom, at in zip(step.eqn.invars, step.ins, strict=True):
            if at is not None and not at.offset <= low < high <= at.offset + at.positions(atom):
                msg = f"`{step.eqn.primitive.name}` has fewer positions than the results"
                raise NotAMapError(msg)
    saved = sum(nbytes(var) for var in made if var not in outs)
    return Stretch(indices=indices, steps=tuple(steps), positions=(low, high), outs=outs, saved=saved)


# --- which stretch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    stretch: Stretch
    seed: Any


def _stretches(
    graph: _Graph, seeds: Sequence[Any], *, between_products: bool, refused: dict[str, None]
) -> Iterator[_Found]:
    """The stretches around some values, each once."""
    seen: set[tuple[Any, int]] = set()
    for seed in seeds:
        for axis, length in enumerate(seed.aval.shape):
            if length < 2 or (seed, axis) in seen:  # noqa: PLR2004 - there is nothing to part
                continue
            try:
                places = _Growth(graph, seed, axis, between_products=between_products).run()
                stretch = _stretch(graph, places)
            except NotAMapError as why:
                refused[f"along dimension {axis} of {seed.aval.str_short()} ({_place(graph, seed)}): {why}"] = None
                continue
            for step in stretch.steps:
                seen.update(
                    (var, at.axis) for var, at in zip(step.eqn.outvars, step.outs, strict=True) if isinstance(at, Place)
                )
            if stretch.saved:
                yield _Found(stretch=stretch, seed=seed)


def _place(graph: _Graph, value: Any) -> str:
    """Where a value is made: its source line and scope."""
    if value not in graph.maker:
        return "an argument"
    eqn = graph.eqns[graph.maker[value]]
    lines = own_lines(eqn)[:1]
    scope = str(eqn.source_info.name_stack)
    words = [f"{file.rpartition('/')[2]}:{line}" for file, line in lines] + ([scope] if scope else [])
    return ", ".join(words) or f"`{eqn.primitive.name}`"


def _seeds(graph: _Graph, indices: Iterable[int]) -> list[Any]:
    """The largest values that some equations make, the largest first."""
    made = [var for index in indices for var in graph.eqns[index].outvars if _elements(var) > 1]
    largest = sorted(made, key=nbytes, reverse=True)[:_SEEDS]
    return [var for var in largest if _SMALL * nbytes(var) > nbytes(largest[0])]


def _best(found: Iterable[_Found], count: int) -> _Found | None:
    """The one that saves most; of several dimensions the one with enough positions and the fewest that fill up the last chunk."""

    def key(each: _Found) -> tuple[bool, int, float]:
        length = each.stretch.length
        # What is added up is there whole in each chunk.
        added = sum(nbytes(var) for var, at in each.stretch.outs.items() if at == SUM)
        return length >= count, each.stretch.saved - count * added, -(-length % min(count, length)) / length

    return max(found, key=key, default=None)


def _is_last(graph: _Graph, stretch: Stretch) -> bool:
    """Whether no matrix product comes behind a stretch."""
    behind = graph.behind(stretch.outs) - set(stretch.indices)
    return not any(has_product(graph.eqns[index]) for index in behind)


def _head(graph: _Graph, count: int, refused: dict[str, None]) -> _Found | None:
    """The stretch around the largest value behind which there is no other matrix product than its own."""
    seeds = _seeds(graph, _at_the_end(graph))
    for between_products in (True, False):
        found = _stretches(graph, seeds, between_products=between_products, refused=refused)
        best = _best((each for each in found if _is_last(graph, each.stretch)), count)
        if best is not None:
            return best
    return None


def _at_the_end(graph: _Graph) -> list[int]:
    """The equations behind which no matrix product makes as much as they do, up to a small factor."""
    most = [0] * len(graph.eqns)  # what the products behind each equation make at most
    found: list[int] = []
    for index in reversed(range(len(graph.eqns))):
        eqn = graph.eqns[index]
        users = [user for var in eqn.outvars for user in graph.users.get(var, ())]
        most[index] = max((max(most[user], _product(graph.eqns[user])) for user in users), default=0)
        if max(map(_elements, eqn.outvars), default=0) >= _SMALL * most[index]:
            found.append(index)
    return found


def _product(eqn: Any) -> int:
    """Elements of the largest result of an equation that is or holds a matrix product; 0 of others."""
    return max(map(_elements, eqn.outvars), default=0) if has_product(eqn) else 0


def _in_path(graph: _Graph, path: str, written: Collection[int], count: int, refused: dict[str, None]) -> _Found | None:
    """The stretch that saves most among those around what a part of the loss makes, as it was ``written``, by identity."""
    own = (index for index, eqn in enumerate(graph.eqns) if id(eqn) in written and _is_in(eqn, path))
    seeds = _seeds(graph, own)
    for between_products in (True, False):
        found = _stretches(graph, seeds, between_products=between_products, refused=refused)
        if (best := _best(found, count)) is not None:
            return best
    return None


def _is_in(eqn: Any, path: str) -> bool:
    """Whether an equation is in a module or scope, or on a line, of this name."""
    scope = "/".join(filter(None, re.split(r"[/()]+", str(eqn.source_info.name_stack))))
    lines = (f"{file.rpartition('/')[2]}:{line}" for file, line in own_lines(eqn)) if ":" in path else ()
    return f"/{path.strip('/')}/" in f"/{scope}/" or path in lines


# --- in chunks


def in_chunks(flat: Equations, path: str, count: int) -> Equations:
    """A function with the stretches that a path names computed in chunks.

    Raises:
        PolicyError: none is a map along a dimension, or of fewer positions than chunks; says what was found, where, and what to
            type.
    """
    refused: dict[str, None] = {}
    changed = _changed(flat, path, count, refused)
    if changed is None:
        _refuse(path, count, list(refused))
    return changed


def _changed(flat: Equations, path: str, count: int, refused: dict[str, None]) -> Equations | None:
    """A function with its head, or all that a path names, in chunks; None where nothing is."""
    graph = _Graph(flat)
    if path == HEAD:
        found = _head(graph, count, refused)
        if found is not None:
            return _rewritten(graph, found, path, count)
        return _with_changed_bodies(flat, path, count, refused)
    done, least = None, 0
    written = {
        id(eqn) for eqn in flat.eqns
    }  # what splits and joins a stretch keeps its place in the loss, and is no part of it
    while (found := _in_path(graph, path, written, count, refused)) is not None and _SMALL * nbytes(found.seed) > least:
        least = max(least, nbytes(found.seed))
        done = _rewritten(graph, found, path, count)
        graph = _Graph(done)
    return _with_changed_bodies(done or flat, path, count, refused) or done


def _with_changed_bodies(flat: Equations, path: str, count: int, refused: dict[str, None]) -> Equations | None:
    """The same inside loops, shard_map and checkpoints; of the head in the last of them only."""
    eqns, is_changed = list(flat.eqns), False
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if eqn.primitive.name not in _ENTERED or is_chunked(eqn) or (path == HEAD and is_changed):
            continue
        if eqn.params.get("check_vma"):
            refused["inside a `shard_map` with check_vma=True, in which nothing can be traced again"] = None
            continue
        jaxpr = eqn.params["jaxpr"]
        inner = flatten(jaxpr, hoist_constants=False)
        changed = _changed(inner, path, count, refused)
        if changed is None or len(changed.invars) != len(inner.invars):
            continue
        body = derive(jaxpr, invars=changed.invars, outvars=changed.outvars, eqns=changed.eqns)
        is_changed = True
        eqns[index] = eqn.replace(params={**eqn.params, "jaxpr": close(body) if eqn.primitive.name == "scan" else body})
    return replace(flat, eqns=tuple(eqns)) if is_changed else None


_ENTERED = {"scan", "shard_map", "checkpoint", "remat", "remat2"}


def _rewritten(graph: _Graph, found: _Found, path: str, count: int) -> Equations:
    """The function with one stretch in chunks."""
    stretch, flat = found.stretch, graph.flat
    if stretch.length < count:
        msg = (
            f"chunks={_asked(path, count)}: what is computed around {found.seed.aval.str_short()} ({_place(graph, found.seed)}) "
            f"has {stretch.length} positions. Expected at most as many chunks: type chunks={_asked(path, stretch.length)}."
        )
        raise PolicyError(msg)
    made = {var for step in stretch.steps for var in step.eqn.outvars}
    uses = [
        (atom, at)
        for step in stretch.steps
        for atom, at in zip(step.eqn.invars, step.ins, strict=True)
        if is_variable(atom) and atom not in made
    ]
    rows = list(dict.fromkeys((atom, at) for atom, at in uses if at is not None))
    wholes = {atom: _source(graph, atom) for atom, at in uses if at is None}
    sources = [source for source, _ in wholes.values()]
    invars = list(dict.fromkeys([*(atom for atom, _ in rows), *wholes, *sources]))
    outvars = list(stretch.outs)

    def function(*values: Any) -> list[Any]:
        return _in_chunks(stretch, count, dict(zip(invars, values, strict=True)), rows, wholes)

    with first_checkpoints():
        traced = flatten(jax.make_jaxpr(function)(*(var.aval for var in invars)))
    own = traced.invars[: len(traced.consts)]
    names = dict(zip(traced.invars[len(own) :], invars, strict=True)) | dict(zip(traced.outvars, outvars, strict=True))
    source = graph.eqns[graph.maker[found.seed]].source_info
    new = [
        eqn.replace(
            invars=[names.get(atom, atom) if is_variable(atom) else atom for atom in eqn.invars],
            outvars=[names.get(var, var) for var in eqn.outvars],
            source_info=source,
        )
        for eqn in traced.eqns
    ]
    inside = set(stretch.indices)
    late = graph.behind(stretch.outs) - inside
    last = stretch.indices[-1]
    before = [
        eqn for index, eqn in enumerate(flat.eqns) if index not in inside and (index < last and index not in late)
    ]
    after = [
        eqn for index, eqn in enumerate(flat.eqns) if index not in inside and not (index < last and index not in late)
    ]
    return replace(
        flat,
        invars=(*own, *flat.invars),
        consts=(*traced.consts, *flat.consts),
        eqns=(*before, *new, *after),
    )


def _source(graph: _Graph, value: Any) -> tuple[Any, list[Any]]:
    """In what the gradient of a value that all chunks share adds up, and the equations that turn it into the value's shape.

    That is what the value is cast from, such as a parameter in float32; else the value itself.
    """
    chain: list[Any] = []
    source = value
    while source in graph.maker and jnp.issubdtype(source.aval.dtype, jnp.floating):
        eqn = graph.eqns[graph.maker[source]]
        operands = variables(eqn.invars)
        if eqn.primitive.name not in _RELABELLED or [_elements(var) for var in operands] != [_elements(value)]:
            break
        chain.insert(0, eqn)
        (source,) = operands
        if source.aval.dtype == widened(value.aval.dtype) != value.aval.dtype:
            return source, [each for each in chain if each.primitive.name != "convert_element_type"]
    return value, []


@jax.custom_jvp
def _with_gradient_of(value: Any, wide: Any) -> Any:  # noqa: ARG001 - its derivative is that of the other
    return value


@_with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1].astype(primals[0].dtype)


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended)


def _in_chunks(
    stretch: Stretch,
    count: int,
    env: dict[Any, Any],
    rows: Sequence[tuple[Any, Place]],
    wholes: dict[Any, tuple[Any, list[Any]]],
) -> list[Any]:
    """The stretch's results, computed in chunks.

    Args:
        stretch: It.
        count: How many chunks.
        env: What crosses in.
        rows: What of it is divided, and where.
        wholes: What all chunks share, in what its gradient adds up, and the equations from that.
    """
    low, high = stretch.positions
    size = -(-(high - low) // count)
    count = -(-(high - low) // size)
    sums = [var for var, at in stretch.outs.items() if at == SUM]
    joins = [(var, at) for var, at in stretch.outs.items() if isinstance(at, Place)]
    narrow = {value: _wide(env[source], chain) for value, (source, chain) in wholes.items() if _is_narrow(value)}

    def shared(value: Any) -> Any:
        # Else the chunks' gradients would add up in the narrow dtype, which the loss as it is written does not do.
        if value not in narrow:
            return env[value]
        return _with_gradient_of(jax.lax.stop_gradient(env[value]), narrow[value])

    def one(total: Any, part: Any) -> Any:
        first, given = part
        numbers = first + jnp.arange(size, dtype=jnp.int32)
        counts = numbers < high if count * size > high - low else None
        positions = Positions(jnp.minimum(numbers, high - 1), counts)
        mine: dict[tuple[Any, Where], Any] = {(var, at): value for (var, at), value in zip(rows, given, strict=True)}
        mine |= {(value, None): shared(value) for value in wholes}
        made = compute(stretch.steps, lambda atom, at: mine[atom, at], positions)
        return [old + made[var] for old, var in zip(total, sums, strict=True)], [made[var] for var, _ in joins]

    start = [jnp.zeros(var.aval.shape, widened(var.aval.dtype)) for var in sums]
    firsts = low + size * jnp.arange(count, dtype=jnp.int32)
    parts = [_divided(env[var], at, low, high, size) for var, at in rows]
    body = jax.checkpoint(one, policy=keep_nothing, prevent_cse=False)
    total, found = jax.lax.scan(body, start, (firsts, parts))
    results = dict(zip(sums, total, strict=True))
    results |= {var: _joined(value, at, var, high - low) for (var, at), value in zip(joins, found, strict=True)}
    return [
        value if _is_key(var) else typed(value, var.aval.dtype, weak=var.aval.weak_type)
        for var, value in ((var, results[var]) for var in stretch.outs)
    ]


def _is_narrow(value: Any) -> bool:
    """Whether sums of a value's dtype are better added up in another."""
    return not _is_key(value) and widened(value.aval.dtype) != value.aval.dtype


def _wide(value: Any, chain: Sequence[Any]) -> Any:
    """A value in a dtype for sums, in the shape that some equations give it."""
    value = value.astype(widened(value.dtype))
    for eqn in chain:
        (var,) = variables(eqn.invars)
        one = derive(jax.make_jaxpr(lambda: ())(), invars=[var], outvars=eqn.outvars, eqns=[eqn])
        (value,) = evaluate(one, [value])
    return value


def _divided(value: Any, at: Place, low: int, high: int, size: int) -> Any:
    """A value by chunks, [chunks, ...].

    What is missing in the last one is its last position again: a real one, from which nothing comes that the loss has not.
    """
    shape, axis = value.shape, at.axis + 1
    parts = value.reshape(*shape[: at.axis], at.before, -1, at.after, *shape[axis:])
    parts = jax.lax.slice_in_dim(parts, low - at.offset, high - at.offset, axis=axis)
    missing = -(high - low) % size
    if missing:
        last = jax.lax.slice_in_dim(parts, high - low - 1, high - low, axis=axis)
        parts = jnp.concatenate([parts, jnp.repeat(last, missing, axis=axis)], axis=axis)
    parts = parts.reshape(*parts.shape[:axis], -1, size, *parts.shape[axis + 1 :])
    parts = jnp.moveaxis(parts, axis, 0)
    return parts.reshape(parts.shape[0], *shape[: at.axis], at.before * size * at.after, *shape[axis:])


def _joined(parts: Any, at: Place, like: Any, length: int) -> Any:
    """A value from its chunks."""
    shape, axis = like.aval.shape, at.axis + 1
    size = parts.shape[axis] // (at.before * at.after)
    value = parts.reshape(parts.shape[0], *shape[: at.axis], at.before, size, at.after, *shape[axis:])
    value = jnp.moveaxis(value, 0, axis)
    value = value.reshape(*value.shape[:axis], -1, *value.shape[axis + 2 :])
    return jax.lax.slice_in_dim(value, 0, length, axis=axis).reshape(shape)


def _asked(path: str, count: int) -> str:
    return repr(count) if path == HEAD else repr({path: count})


def _refuse(path: str, count: int, refused: list[str]) -> NoReturn:
    """Refuse chunks of what is no map.

    Raises:
        PolicyError: always.
    """
    what = "the head of this loss" if path == HEAD else f"what this loss computes in {path!r}"
    looked = refused[:_REASONS]
    found = f"Looked {'; '.join(looked)}." if looked else "No equation of the loss makes an array there."
    msg = (
        f"chunks={_asked(path, count)}: {what} is no map along a dimension of its large values, so chunks would compute "
        f"something else. {found} Leave chunks out, or name another part of the loss by its scope, as jax.named_scope gives one."
    )
    raise PolicyError(msg)
