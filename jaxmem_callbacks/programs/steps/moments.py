"""A call's leaves enter; those that an optimizer's moments mirror leave as parameters, whatever they are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxmem_callbacks.transforms.kinds import OPTIMIZER, OTHER, PARAMETERS, STATE, is_named

if TYPE_CHECKING:
    from jaxmem_callbacks.programs.steps.leaves import Leaf

_STEP = re.compile(r"\[[^\]]*\]|\.\w+")


def parameters_by_moments(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves, those of no kind by class or name as parameters where an optimizer keeps a moment of each.

    Optax keeps trees of the parameters' structure under a name of its own, such as ``state[1][0].mu['w']`` for ``state[0]['w']``:
    below that name path and shape are those of the parameter.
    """
    mirrored = {
        (below, leaf.shape)
        for leaf in leaves
        if leaf.kind == OPTIMIZER and jnp.issubdtype(leaf.dtype, jnp.inexact)
        for below in _below_names(leaf.path)
    }

    def is_parameter(leaf: Leaf) -> bool:
        if leaf.kind not in (OTHER, STATE) or is_named(leaf.path) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return False
        steps = _STEP.findall(leaf.path)
        return any((tuple(steps[start:]), leaf.shape) in mirrored for start in range(len(steps) + 1))

    return [replace(leaf, kind=PARAMETERS) if mirrored and is_parameter(leaf) else leaf for leaf in leaves]


def _below_names(path: str) -> list[tuple[str, ...]]:
    """What follows each name on a path."""
    steps = _STEP.findall(path)
    return [tuple(steps[place + 1 :]) for place, step in enumerate(steps) if step.startswith(".")]
