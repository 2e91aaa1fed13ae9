"""One step's arguments and a mesh of devices enter; the same step with its batch divided over them leaves.

Where the state lies is the policy's word (`StepPolicy.sharding`), held by the step itself; the batch is divided over all axes
that are not for matrices, along its first dimension, where that divides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.planning.candidates import Problem
from jaxmem_callbacks.programs.steps.aliases import leaf_bytes
from jaxmem_callbacks.programs.steps.leaves import named_arguments
from jaxmem_callbacks.programs.steps.step import Traced
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh

SHARDINGS = ("replicate", "zero1", "fsdp")


# Divided over more devices than this, a dimension of a model's matrices gets thinner than what a compiler can work with, and it
# divides activations by features instead of rows. Beyond it copies of the divided state share the batch.
_MOST_PARTS = 64


def default_axes(device_count: int) -> dict[str, int]:
    """Mesh axes for so many devices: one, ``fsdp``, and from 128 devices on copies of it along ``data``."""
    parts = max(part for part in range(1, min(device_count, _MOST_PARTS) + 1) if device_count % part == 0)
    return {"fsdp": parts} if parts == device_count else {"data": device_count // parts, "fsdp": parts}


def carries_shardings(traced: Traced) -> bool:
    """Whether any argument says itself where it lies on several devices."""
    shardings = (getattr(leaf.value, "sharding", None) for leaf in traced.leaves)
    return any(isinstance(each, NamedSharding) and each.num_devices > 1 for each in shardings)


def argument_bytes(problem: Problem) -> int:
    """What the arguments of a divided step take on one device, before any compile."""
    with problem.in_mesh():
        leaves = problem.step(problem.base).traced(problem.args, dict(problem.kwargs)).leaves
    return sum(leaf_bytes(leaf, getattr(leaf.value, "sharding", None)) for leaf in leaves)


def spread(problem: Problem, traced: Traced, axes: Any, sharding: str) -> Problem:
    """The problem on a mesh of its target's devices, its state under a sharding.

    Args:
        problem: For a target of several devices.
        traced: Its plain step.
        axes: Mesh axes as `jm.make_mesh` takes them, or an abstract mesh.
        sharding: One of `SHARDINGS`.

    Raises:
        PlanError: no argument could be divided: every device would do all the work.
        PolicyError: axes that do not make up the target's devices.
    """
    assert problem.target is not None
    count = problem.target.device_count
    mesh = axes if isinstance(axes, AbstractMesh) else abstract_mesh(axes, count)
    roles = mesh_roles(mesh)
    state = {leaf.argument for leaf in traced.leaves if leaf.donated} | set(traced.undonated)
    divided = NamedSharding(mesh, PartitionSpec(roles.batch or None))
    parts = roles.size(roles.batch)
    done = 0

    def placed(leaf: Any) -> Any:
        nonlocal done
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] % parts or not hasattr(leaf, "dtype"):
            return leaf
        done += 1
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=divided)

    names = [name for name, _ in named_arguments(problem.train_step, problem.args, dict(problem.kwargs))]
    args = tuple(
        arg if name in state else jax.tree.map(placed, arg) for name, arg in zip(names, problem.args, strict=False)
    )
    kwargs = {name: arg if name in state else jax.tree.map(placed, arg) for name, arg in problem.kwargs.items()}
    if not done:
        batch = ", ".join(name for name in names if name not in state) or "none"
        msg = (
            f"None of the arguments that stay as they are ({batch}) has a first dimension that {parts} devices divide. Give a "
            f"batch of a multiple of {parts} rows, or arguments with shardings of your own."
        )
        raise PlanError(msg)
    return dataclasses.replace(
        problem, args=args, kwargs=kwargs, mesh=mesh, base=StepPolicy(sharding=sharding), device_count=count
    )
