"""`jm.infer_shardings`: a state, a mesh and a policy enter; the state's tree with one `NamedSharding` an array leaves.

For each array in this order: the author's annotation, logical rules, the shape rule. Optimizer state that mirrors a parameter
takes the parameter's place. Nothing is moved, and nothing is allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem_callbacks.config.named import Name, policy_of
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import MeshAxes, ShardingRules, StepPolicy
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.transforms.sharding.axes import MeshRoles, axis_names, mesh_roles, require_axes, shipped_rules
from jaxmem_callbacks.transforms.sharding.leaves import StateLeaf, Words, state_leaves
from jaxmem_callbacks.transforms.sharding.logical import named_axes, require_met
from jaxmem_callbacks.transforms.sharding.shapes import ShapeRule, model_width, small_bytes
from jaxmem_callbacks.transforms.sharding.stacked import layer_dimensions

_SHARDED = "sharding='fsdp'"


def infer_shardings(state: Any, mesh: Mesh | AbstractMesh, policy: StepPolicy | Preset | Name) -> Any:
    """Where each array of a training state lies under a sharding policy.

        state = jax.device_put(state, jm.infer_shardings(state, mesh, "fsdp"))

    Args:
        state: Arrays, `jax.ShapeDtypeStruct`, a Flax TrainState, NNX modules and optimizers (abstract too), Equinox modules, or
            any tree of these. Give parameters and optimizer state together, as a tuple, so that they are placed alike.
        mesh: From ``jm.make_mesh``, with or without devices.
        policy: Its ``sharding``. ``replicate``: the state is whole along the batch's axes. ``zero1``: parameters so, optimizer
            state split. ``fsdp``: both split, over the axis ``fsdp`` or else ``data``. ``fsdp_tensor``: also over ``tensor``.
            Rules: only what they name is split.

    Returns:
        The same tree with a `NamedSharding` in place of each array, None in place of what is no array.

    Raises:
        PolicyError: a policy without sharding, a mesh without the axes that it needs, an annotation or a rule that does not
            fit its array. Where only shapes decide, an array that does not divide stays whole.
    """
    sharding = _required_sharding(policy_of(policy))
    if not isinstance(mesh, Mesh | AbstractMesh) or mesh.empty:
        expected = advise("mesh.make", axes='{"fsdp": -1}')
        msg = f"infer_shardings got the mesh {mesh!r:.80}. Expected one such as {expected}."
        raise PolicyError(msg)
    leaves, structure = state_leaves(state), jax.tree.structure(state)
    arrays = [leaf for leaf in leaves if leaf is not None]
    specs = iter(_Placing(arrays, mesh_roles(mesh), sharding).specs())
    return jax.tree.unflatten(
        structure, [None if leaf is None else NamedSharding(mesh, next(specs)) for leaf in leaves]
    )


def _required_sharding(policy: StepPolicy) -> str | ShardingRules:
    if policy.sharding is None:
        msg = (
            f"The policy says nothing about sharding. Expected one that does: {advise('preset.load', names=repr('fsdp'))} or "
            f"{advise('train.policy', said=_SHARDED)}."
        )
        raise PolicyError(msg)
    return policy.sharding


@dataclass(frozen=True, slots=True)
class _Decided:
    """Mesh axes of one parameter: where it lies, and where its optimizer state does."""

    own: list[MeshAxes]
    optimizer: list[MeshAxes]


class _Placing:
    """The rules in their order, for the arrays of one state."""

    def __init__(self, leaves: Sequence[StateLeaf], roles: MeshRoles, sharding: str | ShardingRules) -> None:
        self._leaves = leaves
        self._roles = roles
        self._name = sharding if isinstance(sharding, str) else "rules"
        self._given: ShardingRules = () if isinstance(sharding, str) else sharding
        if isinstance(sharding, str):
            require_axes(roles, sharding)
        else:
            require_met(sharding, leaves)
        self._layers = layer_dimensions(leaves)
        self._by_shape = self._shape_rule()

    def _shape_rule(self) -> ShapeRule:
        state = None if self._name == "rules" else self._roles.state
        tensor = self._roles.tensor if self._name == "fsdp_tensor" else None
        pairs = list(zip(self._leaves, self._layers, strict=True))
        return ShapeRule(
            state=None if state is None else (state, self._roles.size(state)),
            tensor=None if tensor is None else (tensor, self._roles.size(tensor)),
            small=small_bytes(pairs),
            width=model_width(pairs),
        )

    def specs(self) -> list[PartitionSpec]:
        """One partition spec an array, in order."""
        found: dict[int, list[MeshAxes]] = {}
        mirrors: dict[Words, list[tuple[StateLeaf, _Decided]]] = defaultdict(list)
        for index, leaf in enumerate(self._leaves):
            if not leaf.is_optimizer:
                decided = self._parameter(leaf, self._layers[index])
                found[index] = decided.own
                for start in range(len(leaf.words)):
                    mirrors[leaf.words[start:]].append((leaf, decided))
        for index, leaf in enumerate(self._leaves):
            if leaf.is_optimizer:
                mirrored = _mirrored(leaf, mirrors)
                alone = self._parameter(leaf, self._layers[index]) if mirrored is None else mirrored
                found[index] = alone.optimizer
        return [_spec(found[index]) for index in range(len(self._leaves))]

    def _parameter(self, leaf: StateLeaf, layers: frozenset[int]) -> _Decided:
        if self._name in {"replicate", "zero1"}:
            said = named_axes(leaf, self._roles, given=(), shipped=()) or [None] * len(leaf.shape)
            own = [self._without_batch(axes) for axes in said]
            if self._name == "replicate":
                return _Decided(own, own)
            return _Decided(own, self._by_shape.axes(leaf, layers, own))
        both = named_axes(
            leaf, self._roles, given=self._given, shipped=shipped_rules(self._roles, self._name)
        ) or self._by_shape.axes(leaf, layers)
        return _Decided(both, both)

    def _without_batch(self, axes: MeshAxes) -> MeshAxes:
        """What is left of an annotation where arrays are whole along the batch's axes."""
        left = tuple(axis for axis in axis_names(axes) if axis not in self._roles.batch)
        return (left if isinstance(axes, tuple) else left[0]) if left else None


def _mirrored(leaf: StateLeaf, parameters: dict[Words, list[tuple[StateLeaf, _Decided]]]) -> _Decided | None:
    """The parameter that ends the optimizer leaf's path and has its shape; the longest common end counts."""
    for start in range(len(leaf.words)):
        for parameter, decided in parameters.get(leaf.words[start:], ()):
            if parameter.shape == leaf.shape:
                return decided
    return None


def _spec(axes: Sequence[MeshAxes]) -> PartitionSpec:
    """Without the trailing dimensions that are whole."""
    end = len(axes)
    while end and axes[end - 1] is None:
        end -= 1
    return PartitionSpec(*axes[:end])
