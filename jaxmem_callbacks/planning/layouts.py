"""A step for several devices enters; the same step leaves once for each way to place its state that may fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmem_callbacks.planning.ledger import Ledger
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.space import Space
from jaxmem_callbacks.planning.spread import argument_bytes, carries_shardings, default_axes, mesh_for, spread
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.programs.targets.target import of_so_many
from jaxmem_callbacks.records.errors import PlanError, PolicyError
from jaxmem_callbacks.records.policies import ShardingRules, StepPolicy, policy_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER

# What is tried where several devices are named and nothing is said of the state.
UNASKED = ("replicate", "zero1", "fsdp")


def is_divided(problem: Problem, traced: Traced, space: Space, mesh: Any) -> bool:
    """Whether the plan places the state itself.

    Raises:
        PlanError: arguments on fewer devices than the target has; a mesh or shardings to try where there is one device, or
            where the arguments lie somewhere already.
    """
    count = 1 if problem.target is None else problem.target.device_count
    if space.sharding is not None and problem.target is None:
        count = jax.device_count()  # the attached ones, by the user's wish only
    placed = carries_shardings(traced)
    if problem.target is not None and 1 < problem.device_count < count:
        fitting = of_so_many(problem.target, problem.device_count)
        msg = (
            f"The arguments lie on {problem.device_count} devices, and the target {problem.target.name} has {count}. Name a "
            f"target of {problem.device_count} devices{f', such as {fitting!r}' if fitting else ''}; or give the arguments "
            f"without shardings and type mesh={json.dumps(default_axes(count))}."
        )
        raise PlanError(msg)
    if count > 1 and not placed:
        return True
    if mesh is not None or space.sharding is not None:
        said = f"mesh={mesh!r}" if mesh is not None else f'search["sharding"]={_as_written(space.sharding or ())!r}'
        if placed:
            why = (
                "the arguments carry shardings, which say where they lie. Leave it out, or give arguments without any."
            )
        elif problem.target is None and space.sharding is not None:
            why = "one is attached. Name a target of several, such as target='h100_sxm:8'; or leave it out."
        else:
            why = (
                "the plan is for one device. Name a target of several, such as target='h100_sxm:8', or "
                "search={'sharding': True} for the attached devices; or leave it out."
            )
        msg = f"{said} says how to divide a step among several devices, and {why}"
        raise PlanError(msg)
    return False


def _as_written(asked: Sequence[str | ShardingRules]) -> Any:
    """Shardings to try as people write them: rules as a mapping, one without a list."""
    shown = [each if isinstance(each, str) else dict(each) for each in asked]
    return shown[0] if len(shown) == 1 else shown


def layouts(problem: Problem, traced: Traced, space: Space, mesh: Any, ledger: Ledger) -> Iterator[Problem]:
    """The problem under each sharding; those that split nothing or whose arguments alone are too much are noted.

    Raises:
        PolicyError: a mesh that does not fit the devices; no sharding that splits anything.
    """
    tried = UNASKED if space.sharding is None else space.sharding
    refused: PolicyError | None = None
    given = 0
    for index, sharding in enumerate(tried):
        words = policy_words(StepPolicy(sharding=sharding)).partition(":")[0]
        try:
            divided = spread(problem, traced, mesh_for(problem, mesh, sharding), sharding, ledger.note)
            _require_state_for(sharding, traced)
            arguments = argument_bytes(divided)
        except PolicyError as error:  # it would split nothing, or the mesh has no axis for it
            refused = error
            ledger.note(f"{words} was not tried: {error}")
            continue
        is_last = index == len(tried) - 1 and not given
        limit = problem.budget.bytes
        if space.batch is None and limit is not None and arguments + problem.resident_bytes > limit and not is_last:
            ledger.note(f"{words} was not compiled: its arguments alone are {format_bytes(arguments)} on each device.")
            continue
        given += 1
        yield divided
    if not given and refused is not None:
        raise refused


def _require_state_for(sharding: Any, traced: Traced) -> None:
    """Refuse to divide the optimizer's state where there is none, in these words and not in those of a mesh that does not fit.

    Raises:
        PolicyError: says what to type.
    """
    if sharding == "zero1" and not any(leaf.kind == OPTIMIZER and leaf.shape for leaf in traced.leaves):
        msg = (
            "sharding='zero1' divides the optimizer's state alone, and this step has none beside scalars, as under plain SGD. "
            "Use sharding='fsdp' to divide the parameters."
        )
        raise PolicyError(msg)


def with_donation(problem: Problem, donate: Any) -> Problem:
    """The problem with another word about donation."""
    return dataclasses.replace(problem, base=dataclasses.replace(problem.base, donate=donate))
