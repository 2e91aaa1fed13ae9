"""A policy's sharding and a call enter; what each updated argument is pinned to leaves.

The mesh is that of ``state_shardings``, else the one set by `jax.set_mesh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxmem_callbacks.programs.steps.call_site import written_arguments
from jaxmem_callbacks.programs.steps.donation import Place
from jaxmem_callbacks.programs.steps.modules import hold_modules
from jaxmem_callbacks.programs.steps.placement import Pin
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles
from jaxmem_callbacks.transforms.sharding.infer import infer_shardings

_FSDP = '{"fsdp": -1}'


def pins_of_policy(
    policy: StepPolicy,
    arguments: Sequence[tuple[str, Any]],
    updated: dict[str, Place | None],
    own: Pin | None,
    step: Any,
) -> list[Pin]:
    """What a policy's ``sharding`` pins: every argument that the step returns updated.

    Args:
        policy: With a sharding.
        arguments: The traced arguments with names.
        updated: Those that come back updated, and where.
        own: What ``state_shardings`` pins already; the user's word for that argument, and its mesh for the others.
        step: The user's function, for messages.

    Raises:
        PolicyError: there is no mesh, nothing is updated, or the policy would shard nothing.
    """
    name = getattr(step, "__name__", "the step")
    state = [(argument, value) for argument, value in arguments if argument in updated]
    if not state:
        msg = (
            f"sharding={policy.sharding!r} would do nothing: {name} returns none of its arguments updated "
            f"({', '.join(argument for argument, _ in arguments)}). Return the new state, or drop sharding from the policy."
        )
        raise PolicyError(msg)
    mesh = _mesh(policy, own, name)
    values = [value for _, value in state]
    # As the user would type it, so that paths in messages are the user's: one argument alone, several as a tuple.
    alone = len(values) == 1
    inferred = infer_shardings(values[0] if alone else tuple(values), mesh, policy)
    shardings = (inferred,) if alone else inferred
    _require_effect(policy, mesh, shardings, own)
    move = _move(policy, state, own, step)
    return [
        Pin(
            argument=argument,
            shardings=wanted,
            place=updated[argument],
            said=f"sharding={policy.sharding!r}",
            move=move,
        )
        for (argument, _), wanted in zip(state, shardings, strict=True)
        if own is None or argument != own.argument
    ]


def _mesh(policy: StepPolicy, own: Pin | None, step: str) -> Any:
    mesh = (mesh_of(own.shardings) if own else None) or ambient_mesh()
    if mesh is None:
        msg = (
            f"sharding={policy.sharding!r} needs a mesh, and none is set where {step} is called. Expected jax.set_mesh above the "
            f"first step, with your own mesh or with one over all devices: {advise('sharding.set_mesh', axes=_FSDP)}"
        )
        raise PolicyError(msg)
    return mesh


def _move(policy: StepPolicy, state: Sequence[tuple[str, Any]], own: Pin | None, step: Any) -> str:
    """The line that lays a state as a policy says, in the names of the user's own call."""
    written = written_arguments(step)
    names = ", ".join(written.get(argument, argument) for argument, _ in state)
    whole = f"({names})" if len(state) > 1 else names
    mesh, words = _mesh_words(own), _policy_words(policy)
    if hold_modules([value for _, value in state], {}):
        return advise("sharding.move_modules", names=names, whole=whole, mesh=mesh, policy=words)
    return advise("sharding.move", names=names, whole=whole, mesh=mesh, policy=words)


def _mesh_words(own: Pin | None) -> str:
    """Where the user has the mesh."""
    is_own = own is not None and mesh_of(own.shardings) is not None
    return advise("sharding.mesh_of_state") if is_own else "jax.sharding.get_mesh()"


def _policy_words(policy: StepPolicy) -> str:
    """A policy's sharding, as `jm.infer_shardings` takes it."""
    if isinstance(policy.sharding, str):
        return f'"{policy.sharding}"'
    return advise("sharding.rules", rules=repr(policy.sharding))


def mesh_of(shardings: Any) -> Any:
    """The mesh of a tree of shardings; None where none of them has one."""
    return next((sharding.mesh for sharding in _shardings(shardings) if not sharding.mesh.empty), None)


def ambient_mesh() -> Any:
    """The mesh set by `jax.set_mesh` (or, for planning, `jax.sharding.use_abstract_mesh`); None where none is."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside somebody's trace only the abstract one is known
        return abstract
    return concrete if concrete.abstract_mesh == abstract else abstract


def _require_effect(policy: StepPolicy, mesh: Any, shardings: Any, own: Pin | None) -> None:
    """Refuse a policy that is to split the state and splits nothing of it.

    Raises:
        PolicyError: says why, and what to type.
    """
    if policy.sharding == "replicate" or mesh.size == 1:
        return
    inferred = any(_is_split(sharding) for sharding in _shardings(shardings))
    if not inferred:
        axis = mesh_roles(mesh).state
        msg = (
            f"sharding={policy.sharding!r} would do nothing on this mesh ({_text(mesh)}): no array of the state that is to be "
            f"split has a dimension that divides by the axis {axis!r} and is large enough. Use sharding='replicate', or a mesh "
            "whose axis divides the model's width."
        )
        raise PolicyError(msg)
    if own is not None and not any(_is_split(sharding) for sharding in _shardings(own.shardings)):
        msg = (
            f"sharding={policy.sharding!r} and state_shardings contradict each other: the policy splits the state, and "
            "state_shardings keeps every array whole. Leave state_shardings out, and the policy says where the state lies; or "
            "drop sharding from the policy."
        )
        raise PolicyError(msg)


def _shardings(tree: Any) -> list[jax.sharding.NamedSharding]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.sharding.NamedSharding)]


def _is_split(sharding: jax.sharding.NamedSharding) -> bool:
    return any(part is not None for part in sharding.spec)


def _text(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
