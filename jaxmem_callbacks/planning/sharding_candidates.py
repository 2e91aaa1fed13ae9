"""Candidate meshes and shardings of a step."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxmem_callbacks.planning.problem import Problem, mesh_sizes
from jaxmem_callbacks.planning.request import Space
from jaxmem_callbacks.programs.steps.leaves import named_arguments, state_arguments
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.programs.targets.target import of_so_many
from jaxmem_callbacks.records.errors import PlanError, PolicyError
from jaxmem_callbacks.records.policies import ShardingRules, StepPolicy, mesh_words, policy_words
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import BATCH, OPTIMIZER, is_raw_key, kind_of_argument
from jaxmem_callbacks.transforms.costs import array_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.sharding.axes import STATE_AXES, axis_names, mesh_roles, require_axes
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh, make_mesh
from jaxmem_callbacks.transforms.tracing import traced_dtype

# Tuned: divided over more devices than this, a dimension of a model's matrices gets thinner than what a compiler can work with,
# and it divides activations by features instead of rows. Beyond it copies of the divided state share the batch.
_MOST_PARTS = 64


# Tuned: matrices are split over no more devices than one host has, of GPUs; that of a TPU has 4 or 8.
_MOST_TENSOR_PARTS = 8


def default_axes(device_count: int, sharding: Any = "fsdp") -> dict[str, int]:
    """Mesh axes for so many devices: one, ``fsdp``, and from 128 devices on copies of it along ``data``.

    A sharding that splits matrices too gets a second axis, ``tensor``, of about the root of the devices and at most 8.
    """
    tensor = 1
    while sharding == "fsdp_tensor" and (2 * tensor) ** 2 <= device_count and 2 * tensor <= _MOST_TENSOR_PARTS:
        if device_count % (2 * tensor):
            break
        tensor *= 2
    left = device_count // tensor
    parts = max(part for part in range(1, min(left, _MOST_PARTS) + 1) if left % part == 0)
    axes = {"fsdp": parts} if parts == left else {"data": left // parts, "fsdp": parts}
    return axes | ({"tensor": tensor} if sharding == "fsdp_tensor" else {})


def mesh_for(problem: Problem, asked: Any, sharding: str | ShardingRules) -> Any:
    """The mesh to plan on: as asked, else `default_axes`; over the attached devices where no target is named.

    Raises:
        PolicyError: axes that do not make up the devices.
    """
    target = problem.target
    if isinstance(asked, Mesh) and target is None:
        return asked  # it names its devices itself
    if isinstance(asked, Mesh | AbstractMesh) and target is not None:
        abstract_mesh(mesh_sizes(asked), target.device_count)  # refuses a mesh of another size
        return asked.abstract_mesh
    count = jax.device_count() if target is None else target.device_count
    axes: Any = mesh_sizes(asked) if isinstance(asked, AbstractMesh) else asked
    axes = default_axes(count, sharding) if axes is None else axes
    return make_mesh(axes) if target is None else abstract_mesh(axes, count)


def working_parts(mesh: Any, sharding: str | ShardingRules) -> int:
    """Into how many parts a mesh divides a step's work under a sharding.

    Raises:
        PolicyError: into one: every device would do all of it.
    """
    roles, to_type = mesh_roles(mesh), f"mesh={json.dumps(default_axes(mesh.size, sharding))}"
    splitting = set(roles.batch)
    if not isinstance(sharding, str):
        splitting |= {name for _, axes in sharding for name in axis_names(axes) if name in roles.sizes}
    elif sharding == "fsdp_tensor":
        require_axes(roles, sharding, to_type)
        splitting |= {roles.tensor} if roles.tensor else set()
    parts = roles.size(tuple(splitting))
    if parts == 1 < mesh.size:
        axes = mesh_words(roles.sizes)
        msg = (
            f"On a mesh of the axes {axes} every device would do all the work under {_words(sharding)}: the batch is divided "
            f"over axes called {', '.join(STATE_AXES)}. Type {to_type}."
        )
        raise PolicyError(msg)
    return parts


def carries_shardings(traced: Traced) -> bool:
    """Whether any argument has a sharding over several devices."""
    shardings = (getattr(leaf.value, "sharding", None) for leaf in traced.leaves)
    return any(isinstance(each, NamedSharding) and each.num_devices > 1 for each in shardings)


def argument_bytes(problem: Problem) -> int:
    """What the arguments of a divided step take on one device, before any compile."""
    with problem.in_mesh():
        leaves = problem.step(problem.base).traced(problem.args, dict(problem.kwargs)).leaves
    return sum(leaf.bytes_here for leaf in leaves)


def spread(
    problem: Problem, traced: Traced, mesh: Any, sharding: str | ShardingRules, note: Callable[[str], None]
) -> Problem:
    """The problem on a mesh of its devices, its state under a sharding.

    Args:
        problem: For several devices.
        traced: Its plain step.
        mesh: What `mesh_for` gave.
        sharding: As in `StepPolicy`.
        note: Told what is left whole, and which axes divide no work.

    Raises:
        PlanError: no batch could be divided: every device would do all the work. A step without any is whole on each.
        PolicyError: the mesh has no axis for that.
    """
    problem = _by_position(problem)
    parts = working_parts(mesh, sharding)
    if parts < mesh.size:
        note(
            f"Under {_words(sharding)} this mesh divides the work into {parts} parts for {mesh.size} devices: each part is done "
            f"{mesh.size // parts} times. The batch is divided over axes called {', '.join(STATE_AXES)}."
        )
    arguments = named_arguments(problem.train_step, problem.args, dict(problem.kwargs))
    state = state_arguments(traced.leaves, traced.undonated)
    free = [name for name, _ in arguments if name not in state]
    # Where one is called what batches are called, the others (a table, a random key) are whole on every device.
    batch = [name for name in free if kind_of_argument(name) == BATCH]
    rows = _Rows(mesh)
    moved = {name: rows.divided(name, value) for name, value in arguments if name in (batch or free)}
    rows.require(called_batch=bool(batch), note=note)
    moved |= {name: _unplaced(value) for name, value in arguments if name not in moved}
    # Each device runs the program of one; or its state comes by keyword, where a jit cannot pin it.
    is_whole = sharding == "replicate" and (not (rows.are_divided or state) or bool(_by_keyword(problem)))
    if is_whole:
        moved = jax.tree.map(rows.whole, moved)
    return dataclasses.replace(
        problem,
        args=tuple(moved[name] for (name, _), _ in zip(arguments, problem.args, strict=False)),
        kwargs={name: moved[name] for name in problem.kwargs},
        mesh=mesh,
        base=dataclasses.replace(problem.base, sharding=None if is_whole else sharding),
        device_count=mesh.size,
        parts=parts if rows.are_divided else 1,
    )


class _Rows:
    """Arrays divided over a mesh along their first dimension, and those that it does not divide."""

    def __init__(self, mesh: Any) -> None:
        roles = mesh_roles(mesh)
        self._place = NamedSharding(mesh, PartitionSpec(roles.batch or None))
        self._parts = roles.size(roles.batch)
        self._done: list[int] = []  # bytes
        self._whole: list[tuple[int, str]] = []  # bytes, and what it is
        self._has_rows = False  # whether one of these has rows of several numbers, as a batch has

    @property
    def are_divided(self) -> bool:
        """Whether any array is divided."""
        return bool(self._done)

    def divided(self, name: str, value: Any) -> Any:
        """An argument with its arrays divided where that is possible."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._placed(name + keystr(path), leaf), value)

    def _placed(self, path: str, leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if not shape or not hasattr(leaf, "dtype") or is_raw_key(leaf):
            return _anywhere(leaf)
        size = array_bytes(shape, traced_dtype(leaf))
        if shape[0] % self._parts:
            self._whole.append((size, f"{path} ({shape[0]} rows)"))
            self._has_rows |= len(shape) > 1 and not is_raw_key(jax.ShapeDtypeStruct(shape[1:], traced_dtype(leaf)))
            return _anywhere(leaf)
        self._done.append(size)
        return jax.ShapeDtypeStruct(shape, traced_dtype(leaf), sharding=self._place)

    def whole(self, leaf: Any) -> Any:
        """An array that is the same on every device, where it is not divided already."""
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and getattr(leaf, "sharding", None) is None
        place = NamedSharding(self._place.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf), sharding=place) if is_array else leaf

    def require(self, *, called_batch: bool, note: Callable[[str], None]) -> None:
        """Refuse a batch that is not divided; note what is whole beside it, or that there is no batch at all.

        A step without a batch makes its data itself, such as from a random key: each device does the same work. A vector is no
        batch unless it is called one, and random keys never are.

        Raises:
            PlanError: nothing is divided, or not the largest array of what is called a batch.
        """
        whole = ", ".join(what for _, what in self._whole)
        most = max((size for size, _ in self._whole), default=0)
        if not self._done and not (self._whole and (called_batch or self._has_rows)):
            note(
                f"No argument is a batch to divide, so each of the {self._parts} devices does all of the work of a step, but for "
                "what the step divides itself. To share the work out, give the batch as an argument, or arguments with "
                "shardings of your own."
            )
        elif not self._done or (called_batch and most > max(self._done)):
            msg = (
                f"{self._parts} devices do not divide the first dimension of {whole}, and would each "
                f"do all of that work. Give a batch of a multiple of {self._parts} rows, or arguments with shardings of your own."
            )
            raise PlanError(msg)
        if whole:
            note(f"Whole on every device, since {self._parts} devices do not divide its first dimension: {whole}.")


def _words(sharding: str | ShardingRules) -> str:
    return f"sharding={sharding!r}" if isinstance(sharding, str) else "these rules"


def _unplaced(value: Any) -> Any:
    """An argument of the state as shapes, for the plan to place."""
    framework = framework_of(value)
    if framework is None:
        return jax.tree.map(_anywhere, value)
    arrays, join = framework.apart(value)
    return join(list(map(_anywhere, arrays)))


def _by_position(problem: Problem) -> Problem:
    """The same call with all that may be positional given so: pinned shardings of a jit go by position."""
    try:
        bound = inspect.signature(problem.train_step).bind(*problem.args, **problem.kwargs)
    except (TypeError, ValueError):  # no signature, or a call that does not fit it: the step's own trace raises
        return problem
    return dataclasses.replace(problem, args=bound.args, kwargs=bound.kwargs)


def _anywhere(leaf: Any) -> Any:
    """A real array of the state as a shape, for the plan to place: where it is now is one device of this machine."""
    return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf)) if isinstance(leaf, jax.Array | np.ndarray) else leaf


# What is tried where several devices are named and no sharding of the state is given.
UNASKED = ("replicate", "zero1", "fsdp")


def is_divided(problem: Problem, traced: Traced, space: Space, mesh: Any) -> bool:
    """Whether the plan places the state itself.

    Raises:
        PlanError: arguments on fewer devices than the target has; a mesh or shardings to try where there is one device, or
            where the arguments are somewhere already.
    """
    count = 1 if problem.target is None else problem.target.device_count
    if space.sharding is not None and problem.target is None:
        count = jax.device_count()  # the attached ones, by the user's wish only
    placed = carries_shardings(traced)
    if problem.target is not None and 1 < problem.device_count < count:
        fitting = of_so_many(problem.target, problem.device_count)
        msg = (
            f"The arguments are on {problem.device_count} devices, and the target {problem.target.name} has {count}. Name a "
            f"target of {problem.device_count} devices{f', such as {fitting!r}' if fitting else ''}; or give the arguments "
            f"without shardings and type mesh={json.dumps(default_axes(count))}."
        )
        raise PlanError(msg)
    if count > 1 and not placed:
        return True
    if mesh is not None or space.sharding is not None:
        given = f"mesh={mesh!r}" if mesh is not None else f'search["sharding"]={_as_written(space.sharding or ())!r}'
        if placed:
            why = (
                "the arguments carry shardings, which say where they are. Leave it out, or give arguments without any."
            )
        elif problem.target is None and space.sharding is not None:
            why = "one is attached. Name a target of several, such as target='h100_sxm:8'; or leave it out."
        else:
            why = (
                "the plan is for one device. Name a target of several, such as target='h100_sxm:8', or "
                "search={'sharding': True} for the attached devices; or leave it out."
            )
        msg = f"{given} says how to divide a step among several devices, and {why}"
        raise PlanError(msg)
    return False


def _as_written(asked: Sequence[str | ShardingRules]) -> Any:
    """Shardings to try as people write them: rules as a mapping, one without a list."""
    shown = [each if isinstance(each, str) else dict(each) for each in asked]
    return shown[0] if len(shown) == 1 else shown


def layouts(
    problem: Problem, traced: Traced, space: Space, mesh: Any, note: Callable[[str], None]
) -> Iterator[Problem]:
    """The problem under each sharding; those that split nothing or whose arguments alone are too much are noted.

    Of a step without a batch and without a state, on which no sharding acts, it is the problem of one device on all of them.

    Raises:
        PolicyError: a mesh that does not fit the devices; no sharding that splits anything.
    """
    tried = UNASKED if space.sharding is None else space.sharding
    refused: PolicyError | None = None
    given = 0
    for index, sharding in enumerate(tried):
        words = policy_words(StepPolicy(sharding=sharding)).partition(":")[0]
        try:
            divided = spread(problem, traced, mesh_for(problem, mesh, sharding), sharding, note)
            _require_state_for(sharding, traced)
            _require_positional(sharding, divided)
            arguments = argument_bytes(divided)
        except PolicyError as error:  # it would split nothing, or the mesh has no axis for it
            refused = error
            note(f"{words} was not tried: {error}")
            continue
        is_last = index == len(tried) - 1 and not given
        limit = problem.budget.bytes
        if space.batch is None and limit is not None and arguments + problem.resident_bytes > limit and not is_last:
            note(f"{words} was not compiled: its arguments alone are {format_bytes(arguments)} on each device.")
            continue
        given += 1
        yield divided
        if divided.base.sharding is None and divided.parts == 1:
            return
    if not given and refused is not None:
        raise refused


def _require_state_for(sharding: Any, traced: Traced) -> None:
    """Refuse to divide the optimizer's state where there is none, in these words and not in those of a mesh that does not fit.

    Raises:
        PolicyError: with what to type.
    """
    if sharding == "zero1" and not any(leaf.kind == OPTIMIZER and leaf.shape for leaf in traced.leaves):
        msg = (
            "sharding='zero1' divides the optimizer's state alone, and this step has none beside scalars, as under plain SGD. "
            "Use sharding='fsdp' to divide the parameters."
        )
        raise PolicyError(msg)


def _require_positional(sharding: Any, divided: Problem) -> None:
    """Refuse to divide the state of a step that takes arrays by keyword alone: a jit pins arguments by position.

    Raises:
        PolicyError: with their names.
    """
    named = _by_keyword(divided)
    if named and divided.base.sharding is not None:
        msg = f"{_words(sharding)} pins arguments by position, and the step takes {', '.join(named)} by keyword alone."
        raise PolicyError(msg)


def _by_keyword(problem: Problem) -> list[str]:
    return [name for name, value in problem.kwargs.items() if any(hasattr(x, "shape") for x in jax.tree.leaves(value))]


def with_donation(problem: Problem, donate: Any) -> Problem:
    """The problem with another word about donation."""
    return dataclasses.replace(problem, base=dataclasses.replace(problem.base, donate=donate))
