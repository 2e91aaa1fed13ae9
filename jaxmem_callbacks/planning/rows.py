"""A step's call enters; which of its arguments are the batch leaves, and the same call with another number of rows.

The batch is told as accumulation tells it, by the words of `transforms.kinds`: arguments called what batches are called, else
all that are neither updated nor state and whose arrays have one leading dimension in common. Never by a guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.programs.steps.leaves import named_arguments, state_arguments
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.transforms.arg_roles import BATCH, OTHER, is_raw_key, kind_of_argument
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.leaves import traced_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The batch of a step.

    Attributes:
        arguments: The step's arguments that hold it.
        count: Its rows.
    """

    arguments: tuple[str, ...]
    count: int


def find_rows(problem: Problem, traced: Traced, said: Sequence[str] = ()) -> Rows:
    """The batch of a step's call.

    Args:
        problem: The step and its arguments.
        traced: The plain step.
        said: Names of the arguments that hold it, as the user wrote them down; empty to tell.

    Raises:
        PlanError: no such argument, or arguments without one leading dimension in common.
    """
    state = state_arguments(traced.leaves, traced.undonated)
    arguments = dict(named_arguments(problem.train_step, problem.args, dict(problem.kwargs)))
    free = {
        name: value
        for name, value in arguments.items()
        if name not in state and framework_of(value) is None and value is not None
    }
    named = [name for name in free if kind_of_argument(name) == BATCH]
    chosen = list(said) or named or [name for name in free if kind_of_argument(name) == OTHER and _sizes(free[name])]
    missing = [name for name in chosen if name not in free]
    sizes = [size for name in chosen if name in free for size in _sizes(free[name])]
    if missing or not sizes or len(set(sizes)) > 1:
        told = "; ".join(f"{name}: {_told(value)}" for name, value in free.items()) or "none"
        msg = (
            f"Which rows the batch of {problem.name} has is not clear. Expected arguments that are not updated and whose arrays "
            f"share one leading dimension; those that are not updated: {told}"
            + (f"; {', '.join(missing)} is none of them" if missing else "")
            + '. Name those that hold the batch: search={"batch": {"argnames": ["images", "labels"]}}.'
        )
        raise PlanError(msg)
    return Rows(arguments=tuple(chosen), count=sizes[0])


def with_rows(problem: Problem, rows: Rows, count: int) -> Problem:
    """The problem with a batch of other size; its arrays become shapes, which lie where they did."""

    def resized(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] != rows.count or not hasattr(leaf, "dtype"):
            return leaf
        place = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(
            (count, *shape[1:]), traced_dtype(leaf), sharding=place if isinstance(place, NamedSharding) else None
        )

    names = [name for name, _ in named_arguments(problem.train_step, problem.args, dict(problem.kwargs))]
    args = tuple(
        jax.tree.map(resized, value) if name in rows.arguments else value
        for name, value in zip(names, problem.args, strict=False)
    )
    kwargs: Mapping[str, Any] = {
        name: jax.tree.map(resized, value) if name in rows.arguments else value
        for name, value in problem.kwargs.items()
    }
    return dataclasses.replace(problem, args=args, kwargs=kwargs, batch_rows=count, plain=None)


def _sizes(value: Any) -> list[int]:
    """Leading dimensions of an argument's arrays; a single random key has none."""
    return [leaf.shape[0] for leaf in jax.tree.leaves(value) if getattr(leaf, "shape", ()) and not is_raw_key(leaf)]


def _told(value: Any) -> str:
    sizes = sorted(set(_sizes(value)))
    return f"leading dimension {' and '.join(map(str, sizes))}" if sizes else "no rows"
