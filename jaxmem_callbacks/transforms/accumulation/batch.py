"""The batch of a loss's call: which arguments hold it, its microbatches, and a few of its rows to compare on.

Never a guess that could be wrong: an argument that might be rows or might not is asked about, not sliced. The few rows come in
variants of what later batches may hold.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.arg_roles import BATCH, OTHER, kind_of_argument
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import is_key, is_variable, split_arrays, subjaxprs

ROWS, KEY, WHOLE = "rows", "key", "whole"
_KEY_WORDS = ("key", "keys", "rng", "rngs", "prng")
_RAW_KEYS = ((2,), (4,))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChoice:
    """The user's choice of the batch in `jm.value_and_grad`; None where there is none.

    Attributes:
        argnames: Names of the loss's arguments that are the batch.
        argnums: Places of such arguments.
    """

    argnames: str | Sequence[str] | None = None
    argnums: int | Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlaces:
    """The batch of one call.

    Attributes:
        places: Positions and keywords of the arguments that are sliced.
        keys: Those that are random keys in their old form, plain ``uint32``.
        rows: Rows of the batch.
    """

    places: frozenset[int | str]
    keys: frozenset[int | str]
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Argument:
    place: int | str
    name: str
    value: Any

    @property
    def arrays(self) -> list[tuple[str, Any]]:
        """Its arrays by path, random keys of any form left out."""
        if framework_of(self.value) is not None:
            return []
        leaves = jax.tree_util.tree_flatten_with_path(self.value)[0]
        return [
            (self.name + jax.tree_util.keystr(path), leaf)
            for path, leaf in leaves
            if isinstance(leaf, (jax.Array, np.ndarray)) and not (is_key(leaf) and leaf.ndim == 0)
        ]

    @property
    def is_raw_key(self) -> bool:
        """Whether it holds random keys as plain integers, judged by its name, dtype and shape together."""
        words = self.name.lower().split("_")
        return any(word in _KEY_WORDS for word in words) and all(
            leaf.shape in _RAW_KEYS and leaf.dtype == np.uint32 for _, leaf in self.arrays
        )

    @property
    def common_rows(self) -> int | None:
        """The leading dimension that all its arrays share, or None."""
        sizes = {leaf.shape[0] if leaf.ndim else None for _, leaf in self.arrays}
        return sizes.pop() if len(sizes) == 1 else None


def find_batch(  # noqa: PLR0913 - a call, what is known of it, and a number
    loss: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    differentiated: set[int],
    choice: BatchChoice,
    count: int,
) -> BatchPlaces:
    """The arguments to slice into ``count`` microbatches.

    The user's choice is taken. Else the arguments named like a batch (`transforms.arg_roles`); where none is, all arguments
    whose arrays have one leading dimension in common. Scalars in a batch go whole to every microbatch.

    Raises:
        PolicyError: no batch, an argument that may or may not belong to it, or rows that ``count`` does not divide.
    """
    everything = [
        _Argument(place, name, value)
        for place, name, value in _named(loss, args, kwargs)
        if not (isinstance(place, int) and place in differentiated)
    ]
    name = name_of(loss)
    keys = [one for one in everything if one.is_raw_key and one.arrays]
    others = [one for one in everything if one.arrays and one not in keys]
    if choice.argnames is None and choice.argnums is None:
        batch = _by_name(others, name, count) or _by_shape(
            others, name, count, _given(loss, args, kwargs, differentiated)
        )
    else:
        batch = _as_chosen(everything, choice, name, len(args))
        keys = [one for one in keys if one not in batch]
    rows = _common_rows(batch, name, count)
    if rows % count:
        near = sorted({max(rows // count, 1) * count, (rows // count + 1) * count})
        fitting = [str(number) for number in range(2, rows + 1) if rows % number == 0][:6]
        msg = (
            f"microbatches={count}: the batch of {name} ({_list(batch)}) has {rows} rows, which {count} does not divide. "
            f"Expected a batch of {' or '.join(map(str, near))} rows, or microbatches={' or '.join(fitting) or 1}."
        )
        raise PolicyError(msg)
    return BatchPlaces(
        places=frozenset(one.place for one in batch), keys=frozenset(one.place for one in keys), rows=rows
    )


def _named(
    loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[int | str, str, Any]]:
    """Place, name and value of each argument."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    positional = [(i, names[i] if i < len(names) else f"args[{i}]", value) for i, value in enumerate(args)]
    return [*positional, *((key, key, value) for key, value in kwargs.items())]


def _as_chosen(everything: Sequence[_Argument], choice: BatchChoice, name: str, count: int) -> list[_Argument]:
    names = [choice.argnames] if isinstance(choice.argnames, str) else list(choice.argnames or ())
    numbers = [choice.argnums] if isinstance(choice.argnums, int) else list(choice.argnums or ())
    places = {number % count if -count <= number < count else number for number in numbers}
    batch = [one for one in everything if one.name in names or one.place in places]
    missing = [*(set(names) - {one.name for one in batch}), *(places - {one.place for one in batch})]
    if missing or not batch:
        msg = (
            f"microbatches, batch_argnames={choice.argnames!r}, batch_argnums={choice.argnums!r}: {name} has no such argument "
            f"that is not differentiated: {', '.join(map(repr, missing)) or 'none was named'}. Expected some of: "
            f"{', '.join(one.name for one in everything) or 'none'}."
        )
        raise PolicyError(msg)
    return batch


def _by_name(others: Sequence[_Argument], name: str, count: int) -> list[_Argument]:
    """Arguments called what batches are called; refused where another one could be a part of the batch too."""
    batch = [one for one in others if kind_of_argument(one.name) == BATCH]
    if not batch:
        return []
    rows = _common_rows(batch, name, count)
    unsure = [
        one
        for one in others
        if one not in batch
        and kind_of_argument(one.name) == OTHER
        and any(a.shape[:1] == (rows,) for _, a in one.arrays)
    ]
    if unsure:
        names = tuple(one.name for one in batch)
        with_all = (*names, *(one.name for one in unsure))
        msg = (
            f"microbatches={count}: the batch of {name} is {_list(batch)} with {rows} rows, and {_list(unsure)} has a leading "
            f"dimension of {rows} too. Expected batch_argnames that settle whether it has rows of the batch: "
            f"{advise('loss.batch', loss=name, names=repr(with_all))} if so, batch_argnames={names!r} if not."
        )
        raise PolicyError(msg)
    return batch


def _by_shape(others: Sequence[_Argument], name: str, count: int, given: str) -> list[_Argument]:
    """All arguments that hold arrays, where these share one leading dimension and no name decides."""
    candidates = [one for one in others if kind_of_argument(one.name) == OTHER]
    sizes = {one.common_rows for one in candidates}
    if candidates and len(sizes) == 1 and None not in sizes:
        return candidates
    known = (
        f"Arrays: {', '.join(f'{path} {_type(a)}' for one in candidates for path, a in one.arrays[:3])}. "
        if candidates
        else ""
    )
    rows = [one.name for one in (*candidates, *others) if one.common_rows and one.common_rows % count == 0]
    line = advise("loss.batch", loss=name, names=repr((rows[0],))) if rows and name.isidentifier() else ""
    msg = (
        f"microbatches={count}: no batch among the arguments of {name}. Given: {given}. {known}Expected arguments whose arrays "
        "all have the batch as their leading dimension; a batch that the loss closes over must become an argument "
        f"of {name}.{f' Is it {rows[0]}? Then name it: {line}.' if line else ''}"
    )
    raise PolicyError(msg)


def _given(loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], differentiated: set[int]) -> str:
    names = [
        f"{name} (differentiated)" if place in differentiated else name for place, name, _ in _named(loss, args, kwargs)
    ]
    return ", ".join(names) or "nothing"


def _common_rows(batch: Sequence[_Argument], name: str, count: int) -> int:
    """The leading dimension that all the batch's arrays share; scalars have none."""
    arrays = [(path, leaf) for one in batch for path, leaf in one.arrays if leaf.ndim]
    sizes = [leaf.shape[0] for _, leaf in arrays]
    rows = max(set(sizes), key=sizes.count, default=0)
    odd = [f"{path} {_type(leaf)}" for path, leaf in arrays if leaf.shape[0] != rows]
    if odd or not rows:
        problem = f"{', '.join(odd)} beside others of {rows} rows" if odd else "no array that has rows"
        msg = (
            f"microbatches={count}: the batch of {name} ({_list(batch)}) has {problem}. Expected the same leading dimension "
            "in all of its arrays. What does not belong to rows must be an argument of its own, outside the batch."
        )
        raise PolicyError(msg)
    return rows


def _list(arguments: Sequence[_Argument]) -> str:
    return ", ".join(one.name for one in arguments)


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


KeyOf = Callable[[jax.Array, Any], jax.Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCall:
    """The arguments of a call, taken apart.

    Attributes:
        arrays: Its arrays, in flattening order.
        roles: Of each array: sliced by ``rows``, a random ``key``, or passed ``whole``.
        join: Puts other arrays in their place; gives ``(args, kwargs)``.
        rows: Rows of the batch.
    """

    arrays: Sequence[jax.Array]
    roles: Sequence[str]
    join: Callable[[Sequence[Any]], Any]
    rows: int

    def microbatch(self, arrays: Sequence[Any], number: Any, count: int, key_of: KeyOf) -> Any:
        """The arguments of microbatch ``number`` of ``count``, which may be a tracer."""
        taken = [
            _slice(array, number, count) if role == ROWS else key_of(array, number) if role == KEY else array
            for array, role in zip(arrays, self.roles, strict=True)
        ]
        return self.join(taken)

    def replaced(self, arrays: Sequence[Any], rows: int | None = None) -> SplitCall:
        """The same call with other arrays."""
        return replace(self, arrays=arrays, rows=self.rows if rows is None else rows)


def split_call(args: Sequence[Any], kwargs: Mapping[str, Any], found: BatchPlaces) -> SplitCall:
    """The arguments of a call, its batch being known."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    def roles_of(place: int | str, value: Any) -> list[str]:
        kinds = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array)]
        return [_role(leaf, place, found) for leaf in kinds]

    args = tuple(jax.tree.map(as_array, value) if i in found.places else value for i, value in enumerate(args))
    kwargs = {k: jax.tree.map(as_array, value) if k in found.places else value for k, value in sorted(kwargs.items())}
    arrays, join = split_arrays((args, kwargs))
    roles = [role for place, value in [*enumerate(args), *kwargs.items()] for role in roles_of(place, value)]
    return SplitCall(arrays=arrays, roles=roles, join=join, rows=found.rows)


def _role(leaf: jax.Array, place: int | str, found: BatchPlaces) -> str:
    if place in found.places and leaf.ndim:
        return ROWS
    return KEY if is_key(leaf) or place in found.keys else WHOLE


def folded(key: jax.Array, number: Any) -> jax.Array:
    """A key of its own for each microbatch; typed or ``uint32``, one or several."""
    one = key.ndim == (0 if is_key(key) else 1)
    return jax.random.fold_in(key, number) if one else jax.vmap(lambda each: folded(each, number))(key)


def _slice(array: jax.Array, number: Any, count: int) -> jax.Array:
    """Rows ``number, number + count, ...``."""
    shape = (array.shape[0] // count, count, *array.shape[1:])
    place = explicit_place(array)
    if place is None:
        return jax.lax.dynamic_index_in_dim(array.reshape(shape), number, axis=1, keepdims=False)
    spec = P(place.spec[0], None, *place.spec[1:])
    split = jax.lax.reshape(array, shape, out_sharding=NamedSharding(place.mesh, spec))
    return jax.lax.dynamic_index_in_dim(split, number, axis=1, keepdims=False)


def explicit_place(array: Any) -> Any:
    """The sharding in the array's type, where its mesh has explicit axes; None elsewhere."""
    place = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(place, "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    return place


_UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def shared_key(like: jax.Array, *, first: Any, stride: int, rows: int) -> jax.Array:
    """A key, or keys, of the shape of ``like`` for the rows ``first``, ``first + stride``, ... of a batch.

    Args:
        like: The user's typed key or keys; only the shape is used.
        first: Row of the batch that is row 0 here.
        stride: Rows of the batch from one row here to the next.
        rows: Rows here.
    """
    salts = jnp.arange(math.prod(like.shape), dtype=jnp.uint32).reshape(*like.shape, 1)
    place = jnp.stack([jnp.asarray(part).astype(jnp.uint32) for part in (first, stride, rows)])
    data = jnp.concatenate([jnp.broadcast_to(place, (*like.shape, 3)), salts], axis=-1)
    return jax.random.wrap_key_data(data, impl=_implementation())


@functools.cache
def _implementation() -> Any:
    """JAX's own interface for new generators; made on first use, because it is JAX's business until then."""
    return define_prng_impl(
        key_shape=(4,), seed=_seed, split=_split, random_bits=_bits, fold_in=_fold_in, name="rows", tag="rows"
    )


def _mix(value: jax.Array) -> jax.Array:
    """A hash of 32 bits; see Wellons' "lowbias32"."""
    value = value.astype(jnp.uint32)
    value = (value ^ (value >> 16)) * jnp.uint32(0x7FEB352D)
    value = (value ^ (value >> 15)) * jnp.uint32(0x846CA68B)
    return value ^ (value >> 16)


def _seed(seed: jax.Array) -> jax.Array:
    """A key that serves no rows: what is drawn from it is the same for a batch and for its microbatches."""
    return jnp.zeros(4, jnp.uint32).at[3].set(_mix(seed))


def _fold_in(data: jax.Array, number: Any) -> jax.Array:
    return data.at[3].set(_mix(data[3] + _mix(jnp.asarray(number)) + jnp.uint32(1)))


def _numbered(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each element, in which a row's elements are those that it has in the whole batch."""
    first, stride, rows, _ = data
    lead, inner = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    row = jnp.arange(lead, dtype=jnp.uint32)
    row = jnp.where(rows == lead, row * stride + first, row)
    return row[:, None] * jnp.uint32(inner) + jnp.arange(inner, dtype=jnp.uint32)


def _split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # `key, other = split(key)` is far more common than one key for each of two rows.
    place = data.at[2].set(0) if shape == (2,) else data
    salts = _mix(_mix(data[3]) + _numbered(place, shape) + jnp.uint32(7)).reshape(*shape, 1)
    return jnp.concatenate([jnp.broadcast_to(data[:3], (*shape, 3)), salts], axis=-1)


def _bits(data: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = _mix(_numbered(data, shape) + _mix(data[3]))
    if width == 64:  # noqa: PLR2004 - bits
        bits = (bits.astype(jnp.uint64) << 32) | _mix(bits)
    return bits.reshape(shape).astype(_UINTS[width])


# Tuned: each is one more comparison, of a few rows, and so a program that is compiled with it.
_MOST = 8
# What hands a literal on.
_PASSING = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}


def compared_with(program: Any) -> tuple[int, ...]:
    """Whole numbers that a program compares something with by ``==`` or ``!=``, in order, each once, the first few.

    Args:
        program: A jaxpr, open or closed.
    """
    found: dict[int, None] = {}
    _walk(getattr(program, "jaxpr", program), {}, found)
    return tuple(found)[:_MOST]


def _walk(jaxpr: Any, known: dict[Any, int], found: dict[int, None]) -> None:
    """Through a jaxpr, some of whose inputs are known numbers."""

    def number(atom: Any) -> int | None:
        return known.get(atom) if is_variable(atom) else _whole(atom.val)

    for eqn in jaxpr.eqns:
        values = [number(atom) for atom in eqn.invars]
        if eqn.primitive.name in {"eq", "ne"}:
            found.update((value, None) for value in values if value is not None)
        elif eqn.primitive.name in _PASSING and values[0] is not None:
            known[eqn.outvars[0]] = values[0]
        for body in subjaxprs(eqn):
            inner = getattr(body, "jaxpr", body)
            given = zip(inner.invars, values, strict=False) if len(inner.invars) == len(values) else ()
            _walk(inner, {var: value for var, value in given if value is not None}, found)


def _whole(value: Any) -> int | None:
    array = np.asarray(value)
    return int(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else None


_MASKS = (0, -100)
_ROWS_EACH = 2
_ROWS_OF_NOISE = 5  # Tuned: a number that hardly any other dimension has: by it noise is known to belong to rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Some rows of a batch, for ``few`` microbatches of them.

    Attributes:
        batch: The whole batch.
        rows: Rows taken.
        few: Microbatches that they are divided into.
        masks: What some rows are masked with, in the variants after the first two.
        stacked: By the index of each array that has rows: the rows in all variants, one behind the other.
    """

    batch: SplitCall
    rows: int
    few: int
    masks: tuple[int, ...]
    stacked: dict[int, jax.Array] = field(repr=False)

    def variant(self, stacked: dict[int, jax.Array]) -> list[Any]:
        """The arrays of the call in one variant: an entry of ``self.stacked``, mapped over."""
        return [stacked.get(i, array) for i, array in enumerate(self.batch.arrays)]

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of one call on all rows; each row has the noise that it has in its microbatch."""
        return [
            _noise(array, 0, 1, self.rows) if role == KEY else array
            for array, role in zip(arrays, self.batch.roles, strict=True)
        ]

    def key(self, key: jax.Array, number: Any) -> jax.Array:
        """Stands for one of the user's keys in microbatch ``number``."""
        return _noise(key, number, self.few, self.rows // self.few)


def sample(batch: SplitCall, count: int, program: Any, shards: int) -> Sample:
    """A few rows of a batch.

    Args:
        batch: The arguments of a gradient call.
        count: Microbatches asked for.
        program: The gradient of one microbatch, traced.
        shards: Devices that the step runs on; every microbatch keeps a row for each.
    """
    available = batch.rows // count
    wanted = _ROWS_OF_NOISE if KEY in batch.roles else _ROWS_EACH
    each = min(shards * math.ceil(wanted / shards), available)
    few = max(2, min(count, available // each))
    rows = few * each
    masks = tuple(dict.fromkeys((*_MASKS, *compared_with(program))))
    stacked = {
        i: _variants(array, rows, few, masks)
        for i, (array, role) in enumerate(zip(batch.arrays, batch.roles, strict=True))
        if role == ROWS
    }
    return Sample(batch=batch, rows=rows, few=few, masks=masks, stacked=stacked)


def _noise(key: jax.Array, first: Any, stride: int, rows: int) -> jax.Array:
    """Stands for one of the user's keys, typed or ``uint32``."""
    like = key if is_key(key) else key[..., 0]
    return shared_key(like, first=first, stride=stride, rows=rows)


def _variants(array: jax.Array, rows: int, few: int, masks: Sequence[int]) -> jax.Array:
    """The rows to compare in all variants, one behind the other."""
    step = array.shape[0] // rows
    taken = _rows(array, np.arange(rows) * step)
    repeated = _rows(array, np.arange(rows) % few * step)
    if is_key(array):
        return jnp.stack([taken, repeated, *([taken] * len(masks))])
    return jnp.stack([taken, repeated, *(_masked(taken, few, mask) for mask in masks)])


def _rows(array: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Some rows of an array, placed as all of them are."""
    place = explicit_place(array)
    return array[numbers] if place is None else array.at[numbers].get(out_sharding=place)


def _masked(taken: jax.Array, few: int, mask: int) -> jax.Array:
    """The rows with half of every second microbatch's entries set to what masks and padding look like."""
    if (
        jnp.issubdtype(taken.dtype, jnp.integer)
        and not jnp.iinfo(taken.dtype).min <= mask <= jnp.iinfo(taken.dtype).max
    ):
        mask = 0
    row = np.arange(taken.shape[0])
    inner = math.prod(taken.shape[1:])
    late = np.arange(inner) >= inner / 2 if inner > 1 else np.ones(inner, bool)
    often = (row // few) % 2 == 0 if inner <= 1 else np.ones(taken.shape[0], bool)
    where = (((row % few) % 2 == 1) & often)[:, None] & late
    replaced = jnp.where(
        where.reshape(taken.shape), jnp.asarray(mask != 0 if taken.dtype == bool else mask, taken.dtype), taken
    )
    if taken.dtype == bool or jnp.issubdtype(taken.dtype, jnp.integer):
        return replaced
    # Weights that are alike in the first batch need not be in later ones.
    is_mask = jnp.all((taken == 0) | (taken == 1))
    if taken.size and jnp.issubdtype(taken.dtype, jnp.floating):
        is_mask |= taken.max() == taken.min()
    return jnp.where(is_mask, jnp.abs(jnp.clip(replaced, -1, 1)), taken)
