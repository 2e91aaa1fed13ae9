"""One step's arguments and a mesh of devices enter; the same step with its batch divided over them leaves.

Where the state lies is the policy's word (`StepPolicy.sharding`), held by the step itself; the batch is divided over all axes
that are not for matrices, along its first dimension, where that divides.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.planning.candidates import Problem
from jaxmem_callbacks.programs.steps.aliases import leaf_bytes
from jaxmem_callbacks.programs.steps.leaves import named_arguments
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.policies import ShardingRules
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.kinds import BATCH, is_raw_key, kind_of_argument
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh, make_mesh

# Divided over more devices than this, a dimension of a model's matrices gets thinner than what a compiler can work with, and it
# divides activations by features instead of rows. Beyond it copies of the divided state share the batch.
_MOST_PARTS = 64


# Matrices are split over no more devices than one host has.
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
    count = jax.device_count() if problem.target is None else problem.target.device_count
    if isinstance(asked, Mesh):
        return asked if problem.target is None else asked.abstract_mesh
    if isinstance(asked, AbstractMesh):
        return (
            asked if problem.target is not None else make_mesh({str(name): size for name, size in asked.shape.items()})
        )
    axes = default_axes(count, sharding) if asked is None else asked
    return make_mesh(axes) if problem.target is None else abstract_mesh(axes, count)


def carries_shardings(traced: Traced) -> bool:
    """Whether any argument says itself where it lies on several devices."""
    shardings = (getattr(leaf.value, "sharding", None) for leaf in traced.leaves)
    return any(isinstance(each, NamedSharding) and each.num_devices > 1 for each in shardings)


def argument_bytes(problem: Problem) -> int:
    """What the arguments of a divided step take on one device, before any compile."""
    with problem.in_mesh():
        leaves = problem.step(problem.base).traced(problem.args, dict(problem.kwargs)).leaves
    return sum(leaf_bytes(leaf, getattr(leaf.value, "sharding", None)) for leaf in leaves)


def spread(problem: Problem, traced: Traced, mesh: Any, sharding: str | ShardingRules) -> Problem:
    """The problem on a mesh of its devices, its state under a sharding.

    Args:
        problem: For several devices.
        traced: Its plain step.
        mesh: What `mesh_for` gave.
        sharding: As in `StepPolicy`.

    Raises:
        PlanError: no argument could be divided: every device would do all the work.
    """
    problem = _by_position(problem)
    roles = mesh_roles(mesh)
    divided = NamedSharding(mesh, PartitionSpec(roles.batch or None))
    parts = roles.size(roles.batch)
    arguments = named_arguments(problem.train_step, problem.args, dict(problem.kwargs))
    state = {leaf.argument for leaf in traced.leaves if leaf.donated} | set(traced.undonated)
    free = [name for name, _ in arguments if name not in state]
    # Where one is called what batches are called, the others (a table, a random key) are whole on every device.
    batch = [name for name in free if kind_of_argument(name) == BATCH] or free
    done = 0

    def placed(leaf: Any) -> Any:
        nonlocal done
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] % parts or not hasattr(leaf, "dtype") or is_raw_key(leaf):
            return _anywhere(leaf)
        done += 1
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=divided)

    def moved(name: str, value: Any) -> Any:
        if name in batch:
            return jax.tree.map(placed, value)
        framework = framework_of(value)
        if framework is None:
            return jax.tree.map(_anywhere, value)
        arrays, join = framework.apart(value)
        return join(list(map(_anywhere, arrays)))

    args = tuple(moved(name, value) for (name, _), value in zip(arguments, problem.args, strict=False))
    kwargs = {name: moved(name, value) for name, value in problem.kwargs.items()}
    if not done:
        msg = (
            f"None of the arguments that stay as they are ({', '.join(batch) or 'none'}) has a first dimension that {parts} "
            f"devices divide. Give a batch of a multiple of {parts} rows, or arguments with shardings of your own."
        )
        raise PlanError(msg)
    return dataclasses.replace(
        problem,
        args=args,
        kwargs=kwargs,
        mesh=mesh,
        base=dataclasses.replace(problem.base, sharding=sharding),
        device_count=mesh.size,
    )


def _by_position(problem: Problem) -> Problem:
    """The same call with all that may be positional given so: pinned shardings of a jit go by position."""
    try:
        bound = inspect.signature(problem.train_step).bind(*problem.args, **problem.kwargs)
    except (TypeError, ValueError):  # no signature, or a call that does not fit it: the step's own trace has said so
        return problem
    return dataclasses.replace(problem, args=bound.args, kwargs=bound.kwargs)


def _anywhere(leaf: Any) -> Any:
    """A real array of the state as a shape, for the plan to place: where it lies now is one device of this machine."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf
