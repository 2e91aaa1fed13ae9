"""Other programs of a training run, such as evaluation, that share the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem_callbacks.planning.compiles import CompileQueue
from jaxmem_callbacks.planning.problem import Held, Problem, Program, Resident, traced_by_name
from jaxmem_callbacks.programs.reading.buffer_assignment import program_memory
from jaxmem_callbacks.programs.steps.leaves import Leaf, state_arguments
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.steps.user_jit import already_jitted
from jaxmem_callbacks.programs.targets.step_on_target import MemoryRefusalError, compile_traced_here, lower_traced_for
from jaxmem_callbacks.records.arguments import name_of
from jaxmem_callbacks.records.plans import BesideProgram
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, STATE
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles

_KEPT = (PARAMETERS, OPTIMIZER, STATE)


def compile_beside(
    problem: Problem,
    traced: tuple[Traced, Traced],
    programs: Sequence[Program],
    resident: Resident,
    queue: CompileQueue,
) -> tuple[BesideProgram, ...]:
    """Each program compiled once for the problem's target, the state placed as the problem places it.

    Args:
        problem: The step, its state placed.
        traced: The step with the arguments as the user gave them, and as the problem places them.
        programs: Functions and their arguments.
        resident: What stays in memory besides.
        queue: Reports and counts what is compiled.

    Raises:
        PlanError: a program fails while it is traced, which is its cause.
        CompileError: a compiler failed.
    """
    given, placed = traced
    # By path, since a call by keyword is made one by position where its state is placed.
    by_path = {leaf.path: leaf for leaf in placed.leaves}
    pairs = [(own.value, by_path.get(own.path, own)) for own in given.leaves]
    every = [Held(value, leaf.shape, leaf.dtype, leaf.bytes_here, _place(leaf)) for value, leaf in pairs]
    updated = state_arguments(given.leaves, given.undonated)
    stays = [
        held for held, leaf in zip(every, given.leaves, strict=True) if leaf.argument in updated or leaf.kind in _KEPT
    ]
    stays += resident.arrays
    passing = [held for held in every if held not in stays]
    compiled: list[BesideProgram] = []
    for function, args in programs:
        name = name_of(function)
        queue.report(f"{name} beside the step")
        with problem.in_mesh():
            with traced_by_name(f"{name}, a program beside the step,", name):
                own = _as_it_is(function).traced(args, {})
            same = _same(own.leaves, stays, passing)
            own = own._replace(
                leaves=[_placed(leaf, held, problem) for leaf, held in zip(own.leaves, same, strict=True)]
            )
            needed = _compiled(problem, own, name, queue)
        taken = {id(held) for held in same if held is not None}
        kept = sum(held.bytes for held in stays if id(held) not in taken) + resident.sizes
        limit = problem.budget.bytes
        fits = None if limit is None else needed is not None and needed + kept <= limit
        compiled.append(BesideProgram(name=name, program_bytes=needed, held_bytes=kept, fits=fits))
    return tuple(compiled)


def _as_it_is(function: Callable[..., Any]) -> JitStep:
    """The program as the user runs it: his own jit with its donation, else one that donates nothing."""
    if isinstance(function, JitStep):
        return function
    return JitStep(function, StepPolicy(donate=None if already_jitted(function) is not None else ()))


def _same(leaves: Sequence[Leaf], stays: Sequence[Held], passing: Sequence[Held]) -> list[Held | None]:
    """For each array of a program what it is of the step: the same object, else a state of its shape that is left."""
    by_identity = {id(held.value): held for held in (*passing, *stays)}
    found = [by_identity.get(id(leaf.value)) for leaf in leaves]
    taken = {id(held) for held in found if held is not None}
    free = [held for held in stays if id(held) not in taken]
    for index, leaf in enumerate(leaves):
        like = next((held for held in free if held.shape == leaf.shape and held.dtype == leaf.dtype), None)
        if found[index] is None and like is not None and leaf.shape:
            found[index] = like
            free.remove(like)
    return found


def _place(leaf: Leaf) -> Any:
    return getattr(leaf.value, "sharding", None)


def _placed(leaf: Leaf, held: Held | None, problem: Problem) -> Leaf:
    """The leaf where the step has it; on a planned mesh what is new there is divided like a batch, where that divides."""
    place = held.sharding if held is not None else None
    if place is None and problem.mesh is not None:
        roles = mesh_roles(problem.mesh)
        divides = bool(leaf.shape) and leaf.shape[0] % roles.size(roles.batch) == 0
        place = NamedSharding(problem.mesh, PartitionSpec((roles.batch or None) if divides else None))
    if not isinstance(place, NamedSharding):
        return leaf
    return replace(leaf, value=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))


def _compiled(problem: Problem, traced: Traced, name: str, queue: CompileQueue) -> int | None:
    queue.results.coresident += 1
    if problem.target is None:
        queue.results.coresident_uncached += 1
        try:
            compiled = compile_traced_here(traced, name)
        except MemoryRefusalError as refusal:
            return refusal.needed_bytes
        return program_memory(compiled, name=name, platform=jax.default_backend(), target="attached").step_bytes
    answer = lower_traced_for(traced, name, problem.target.name)()
    queue.results.coresident_uncached += not answer.cached
    return answer.needed_bytes
