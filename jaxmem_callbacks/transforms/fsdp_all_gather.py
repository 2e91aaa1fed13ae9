"""Under ``fsdp``: the gather of a loop step's slice of the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.costs import is_inexact
from jaxmem_callbacks.transforms.loss_profile import CheapValues, LossProfile, cheap_values
from jaxmem_callbacks.transforms.policy import active_policy
from jaxmem_callbacks.transforms.sharding.axes import axis_names, mesh_roles
from jaxmem_callbacks.transforms.sharding.infer import infer_shardings
from jaxmem_callbacks.transforms.tracing import (
    CHECKPOINTS,
    Equations,
    checkpoint_equation,
    checkpoint_template,
    close,
    derive,
    flatten,
    is_variable,
    new_variable,
    open_jaxpr,
    scan_arity,
    unused_dropped,
    variables,
)

Weights = Mapping[Any, PartitionSpec]
Places = dict[Any, NamedSharding]

# What makes results of the batch's size from a weight, and needs the weight for its derivative.
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
# The same elements in another shape or order.
_VIEWS = {"copy", "expand_dims", "reshape", "rev", "squeeze", "transpose"}


def gathering_mesh(policy: StepPolicy) -> Any:
    """The mesh over which the loops of a policy that is `GATHERED` gather weights, or None where they do not.

    The one that is set around the step, else that of the shardings that its state is pinned to. Only where every axis divides the
    batch, or under ``fsdp_tensor`` matrices. On explicit axes the user's own types place the values.
    """
    mesh, active = jax.sharding.get_abstract_mesh(), active_policy()
    if mesh.empty and active is not None and active.mesh is not None:
        mesh = active.mesh
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    roles = mesh_roles(mesh)
    tensor = (roles.tensor,) if policy.sharding == "fsdp_tensor" else ()
    others = [size for axis, size in roles.sizes.items() if axis not in (*roles.batch, *tensor)]
    return None if roles.state is None or roles.sizes[roles.state] == 1 or max(others, default=1) > 1 else mesh


def gathered_places(trees: Sequence[Any], policy: StepPolicy, mesh: Any) -> dict[int, PartitionSpec]:
    """How each array of some trees, by its id, is placed once it is gathered: whole, or split by what is for matrices alone.

    Empty where the mesh has no places for them; `jm.jit_step` reports it.
    """
    leaves, tree = jax.tree.flatten(list(trees))
    if policy.sharding != "fsdp_tensor":
        return {id(leaf): PartitionSpec() for leaf in leaves}
    try:  # of one tree alone as of the whole state, whose parameters decide
        inferred = (
            [infer_shardings(trees[0], mesh, policy)] if len(trees) == 1 else infer_shardings(trees, mesh, policy)
        )
    except PolicyError:
        return {}
    batch = mesh_roles(mesh).batch
    found = zip(leaves, tree.flatten_up_to(inferred), strict=True)
    return {id(leaf): _without(batch, place.spec) for leaf, place in found if place is not None}


def _without(batch: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    left = [tuple(axis for axis in axis_names(axes) if axis not in batch) for axes in spec]
    return PartitionSpec(*(axes or None for axes in left))


def gathering_loop(eqn: Any, weights: Weights, cheap: CheapValues, mesh: Any, *, again: bool = False) -> Any:
    """A `scan` whose body gathers its slices of weights.

    Args:
        eqn: The scan.
        weights: Variables that are differentiated arguments of the loss, and how they are placed once they are gathered.
        cheap: What is a cheap function of arguments, such as weights cast to bf16.
        mesh: Over which they are divided.
        again: Whether each gather gets a checkpoint of its own, because none around it has the backward pass gather again.
    """
    flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
    first = sum(scan_arity(eqn))
    sliced: Places = {}
    for outer, inner in zip(eqn.invars[first:], flat.invars[first:], strict=True):
        stack = _gathered(outer, weights, cheap) if is_variable(outer) and is_inexact(inner) else None
        if stack is not None and inner.aval.shape:
            sliced[inner] = NamedSharding(mesh, PartitionSpec(*stack[1:]))
    if not sliced:
        return eqn
    eqns = _with_gathers_again(flat, sliced) if again else _with_gathers(flat.eqns, sliced)
    body = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=unused_dropped(eqns, flat.outvars))
    return eqn.replace(params={**eqn.params, "jaxpr": close(body)})


def gathering_loops(flat: Equations, weights: Weights, mesh: Any) -> Equations:
    """A function that nobody cuts, its loops gathering their weights; the same object where none does."""
    cheap, _ = cheap_values(flat)
    eqns = tuple(
        gathering_loop(eqn, weights, cheap, mesh, again=True) if eqn.primitive.name == "scan" else eqn
        for eqn in flat.eqns
    )
    changed = any(ours is not theirs for ours, theirs in zip(eqns, flat.eqns, strict=True))
    return replace(flat, eqns=eqns) if changed else flat


@dataclass(frozen=True, slots=True)
class Gathers:
    """How the loops of a function that is cut gather weights.

    Attributes:
        mesh: Over which they are divided.
        weights: Variables that are differentiated arguments, and how they are placed once a loop has gathered them.
    """

    mesh: Any
    weights: Weights

    def in_loops(self, loss: LossProfile) -> Equations:
        """The loss with gathers in its loops; those that get no checkpoint gather again in the backward pass by themselves."""
        eqns = list(loss.flat.eqns)
        for at in (*loss.loops, *loss.whole):
            if eqns[at].primitive.name == "scan":
                eqns[at] = gathering_loop(eqns[at], self.weights, loss.cheap, self.mesh, again=at in loss.whole)
        return replace(loss.flat, eqns=tuple(eqns))


def _gathered(var: Any, weights: Weights, cheap: CheapValues) -> PartitionSpec | None:
    """How a weight, or what is made of weights alone, is placed once it is gathered; None where it is neither, or unknown."""
    if var in weights:
        return weights[var]
    made_of = cheap.origins.get(var, frozenset())
    if not made_of or not all(origin in weights for origin in made_of):
        return None
    _, maker = cheap.makers[var]
    if maker.primitive.name == "convert_element_type":
        return _gathered(maker.invars[0], weights, cheap)
    return None if any(axes for origin in made_of for axes in weights[origin]) else PartitionSpec()


def _with_gathers(eqns: Sequence[Any], sliced: Places) -> list[Any]:
    """The equations with each slice gathered at its first use, after a cast that makes it smaller where there is one."""
    gathered: dict[Any, Any] = {}
    found: list[Any] = []

    def gather(var: Any) -> Any:
        if var not in gathered:
            gathered[var] = new_variable(var)
            found.append(_constraint(var, gathered[var], waiting[var]))
        return gathered[var]

    waiting = dict(sliced)
    for eqn in eqns:
        if _is_narrowing(eqn) and eqn.invars[0] in waiting:
            found.append(eqn)
            waiting[eqn.outvars[0]] = waiting[eqn.invars[0]]
        else:
            invars = [gather(atom) if is_variable(atom) and atom in waiting else atom for atom in eqn.invars]
            found.append(eqn.replace(invars=invars))
    return found


def _with_gathers_again(flat: Equations, sliced: Places) -> list[Any]:
    """The equations with each slice gathered by the products that use it, each under a checkpoint with its gathers.

    The derivative of a product then keeps the slice as it is placed, and gathers it again; so does a checkpoint of the user's.
    What else uses a matrix, such as a table that is looked up, finds it as it is placed. Vectors are gathered once, and kept.
    """
    template = checkpoint_template(None, prevent_cse=False)
    matrices = {var: place for var, place in sliced.items() if len(var.aval.shape) > 1}
    vectors = {var: place for var, place in sliced.items() if var not in matrices}
    makers: dict[Any, list[Any]] = {var: [] for var in matrices}  # a slice or a view of one -> the equations in between
    inside = dict(matrices)  # what a user's checkpoint gathers: a view's placement is known where that is whole
    found: list[Any] = []
    for eqn in _with_gathers(flat.eqns, vectors):
        operands = variables(eqn.invars)
        own = [var for var in operands if var in makers]
        if own and eqn.primitive.name in _PRODUCTS:
            between = {id(one): one for var in own for one in makers[var]}
            inner = _with_gathers([*between.values(), eqn], matrices)
            made = {var for one in inner for var in one.outvars}
            taken = list(dict.fromkeys(var for one in inner for var in variables(one.invars) if var not in made))
            body = derive(flat.template, invars=taken, outvars=eqn.outvars, eqns=inner)
            found.append(checkpoint_equation(template, body, taken, eqn.outvars))
        elif own and eqn.primitive.name in CHECKPOINTS:
            found.append(_with_gathers_inside(eqn, inside))
        else:
            if own and len(operands) == 1 and (eqn.primitive.name in _VIEWS or _is_narrowing(eqn)):
                makers[eqn.outvars[0]] = [*makers[own[0]], eqn]
                if own[0] in inside and (_is_narrowing(eqn) or not any(inside[own[0]].spec)):
                    inside[eqn.outvars[0]] = inside[own[0]]
            found.append(eqn)
    return found


def _with_gathers_inside(eqn: Any, sliced: Places) -> Any:
    """A checkpoint of the user's that gathers the slices that it is given."""
    flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
    pairs = zip(eqn.invars, flat.invars, strict=True)
    inner = {ours: sliced[given] for given, ours in pairs if is_variable(given) and given in sliced}
    body = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=_with_gathers(flat.eqns, inner))
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def _is_narrowing(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or not is_variable(eqn.invars[0]):
        return False
    before, after = (np.dtype(atom.aval.dtype).itemsize for atom in (eqn.invars[0], eqn.outvars[0]))
    return after < before


def _constraint(var: Any, whole: Any, sharding: NamedSharding) -> Any:
    """An equation that makes ``whole`` of ``var``; taken from a trace, so that its parameters are those of the running JAX."""
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
    )
    return open_jaxpr(traced).eqns[0].replace(invars=[var], outvars=[whole])
