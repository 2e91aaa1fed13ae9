"""A call's leaves enter; those of which an optimizer keeps moments are known as parameters, whatever they are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, OTHER, STATE, is_named

_STEP = re.compile(r"\[[^\]]*\]|\.\w+")


class _Leaf(Protocol):
    """What is asked of one array; as `Leaf`."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def by_class(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def places_with_moments(leaves: Sequence[_Leaf]) -> set[int]:
    """Places of the leaves of no kind by class or name of which an optimizer keeps moments.

    Optax keeps trees of the parameters' structure under a name of its own, such as ``state[1][0].mu['w']`` for ``state[0]['w']``:
    below that name path and shape are those of the parameter.
    """
    mirrored = {
        (below, leaf.shape)
        for leaf in leaves
        if leaf.kind == OPTIMIZER and jnp.issubdtype(leaf.dtype, jnp.inexact)
        for below in _below_names(leaf.path)
        if below or leaf.shape  # a number of the optimizer's own is no moment of another number
    }

    def has_moments(leaf: _Leaf) -> bool:
        if leaf.by_class or leaf.kind not in (OTHER, STATE) or is_named(leaf.path):
            return False
        steps = _STEP.findall(leaf.path)
        return jnp.issubdtype(leaf.dtype, jnp.inexact) and any(
            (tuple(steps[start:]), leaf.shape) in mirrored for start in range(len(steps) + 1)
        )

    return {place for place, leaf in enumerate(leaves) if mirrored and has_moments(leaf)}


def _below_names(path: str) -> list[tuple[str, ...]]:
    """What follows each name on a path."""
    steps = _STEP.findall(path)
    return [tuple(steps[place + 1 :]) for place, step in enumerate(steps) if step.startswith(".")]
