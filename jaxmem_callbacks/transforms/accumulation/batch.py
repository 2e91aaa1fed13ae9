"""The arguments of a loss's call that are its batch, or an error with what to type.

Never a guess that could be wrong: an argument that might be rows or might not is asked about, not sliced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.arg_roles import BATCH, OTHER, kind_of_argument
from jaxmem_callbacks.transforms.frameworks import framework_of

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
    name = getattr(loss, "__name__", type(loss).__name__)
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


def is_key(leaf: Any) -> bool:
    """Whether an array is a typed random key or keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
    msg = (
        f"microbatches={count}: no batch among the arguments of {name}. Given: {given}. {known}Expected arguments whose arrays "
        "all have the batch as their leading dimension; a batch that the loss closes over must become an argument "
        f"of {name}. Or name it: {advise('loss.batch', loss=name, names=repr(('x',)))}."
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
