"""The arrays of a state of any framework, each with its path, shape, role and its author's names of its axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, kind_of_argument, kind_of_node
from jaxmem_callbacks.transforms.frameworks import annotator_of
from jaxmem_callbacks.transforms.sharding.annotations import Annotation

Words = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLeaf:
    """One array of a state.

    Attributes:
        path: Where it is, as the user would write it behind the state's name: ``.params['dense']['kernel']``.
        words: The same as names and indices, without the wrapper's own ``value``.
        shape: Its global shape.
        itemsize: Bytes of an element; None for PRNG keys, which are never sharded.
        is_optimizer: Whether it is optimizer state.
        annotation: What its author wrote about its axes, or None.
    """

    path: str
    words: Words
    shape: tuple[int, ...]
    itemsize: int | None
    is_optimizer: bool
    annotation: Annotation | None


def state_leaves(state: Any) -> list[StateLeaf | None]:
    """One entry for each leaf of `jax.tree.flatten`, in its order; None for what is no array and no number."""
    return [
        _leaf(path, words, value, is_optimizer=is_optimizer, annotation=annotation)
        for path, words, value, is_optimizer, annotation in _walk(state, (), (), False, None)
    ]


_Found = tuple[tuple[Any, ...], Words, Any, bool, Annotation | None]


def _walk(
    node: Any,
    path: tuple[Any, ...],
    words: Words,
    is_optimizer: bool,  # noqa: FBT001 - handed down
    annotation: Annotation | None,
) -> Iterator[_Found]:
    """Leaves under a node; stops at nodes whose class says something, and goes on inside them."""
    annotator = annotator_of(node)
    if annotator is not None:
        annotation = annotator.annotation(node) or annotation
    kind = kind_of_node(node)
    is_optimizer = is_optimizer or (kind is not None and kind.name == OPTIMIZER)

    def tells(inner: Any) -> bool:
        return inner is not node and (annotator_of(inner) is not None or kind_of_node(inner) is not None)

    for step, inner in jax.tree_util.tree_flatten_with_path(node, is_leaf=tells)[0]:
        deeper = (*path, *step)
        # The wrapper's own field is no name of the user's.
        named = words if annotator is not None else (*words, *map(_word, step))
        if tells(inner):
            yield from _walk(inner, deeper, named, is_optimizer, annotation)
        else:
            by_name = kind_of_argument("", deeper) == OPTIMIZER
            yield deeper, named, inner, is_optimizer or by_name, annotation


def _word(key: Any) -> str | int:
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)


def _leaf(
    path: tuple[Any, ...], words: Words, value: Any, *, is_optimizer: bool, annotation: Annotation | None
) -> StateLeaf | None:
    shape = getattr(value, "shape", None)
    if shape is None and not isinstance(value, bool | int | float | complex):
        return None
    return StateLeaf(
        path=jax.tree_util.keystr(path),
        words=words,
        shape=tuple(shape or ()),
        itemsize=_itemsize(getattr(value, "dtype", None)),
        is_optimizer=is_optimizer,
        annotation=annotation,
    )


def _itemsize(dtype: Any) -> int | None:
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return jax.numpy.dtype(dtype).itemsize
