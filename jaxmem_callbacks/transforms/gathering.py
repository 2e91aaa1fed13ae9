"""Under ``fsdp`` a loop gathers its step's slice of the weights whole, and again where the backward pass needs it.

Enters: a loop over layers and which of a loss's variables are weights. Leaves: the loop with sharding constraints in its body,
behind casts to fewer bytes. Without them XLA is free to divide activations by features instead, which for a transformer on
eight H100 moved ten times as many bytes and needed several times the memory. Where a step is not computed again a checkpoint
around each gather and the product that uses it keeps the slice in place of the whole weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem_callbacks._compat.jaxprs import (
    checkpoint_equation,
    checkpoint_template,
    close,
    derive,
    open_jaxpr,
    scan_arity,
)
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.equations import (
    Equations,
    flatten,
    is_variable,
    new_variable,
    unused_dropped,
    variables,
)
from jaxmem_callbacks.transforms.names import CHECKPOINTS
from jaxmem_callbacks.transforms.policy import active_policy
from jaxmem_callbacks.transforms.residuals import Sunk, is_inexact, sink
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles

# What makes results of the batch's size from a weight, and needs the weight for its derivative.
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
# The same elements in another shape or order.
_VIEWS = {"copy", "expand_dims", "reshape", "rev", "squeeze", "transpose"}


def gathering_mesh(policy: StepPolicy) -> Any:
    """The mesh over which a policy's loops gather weights, or None where they do not.

    The one that is set around the step, else that of the shardings that its state is pinned to.
    Only where every axis that divides anything divides the batch: a slice of the weights is then whole on each device. On
    explicit axes the user's own types say where values lie.
    """
    mesh, active = jax.sharding.get_abstract_mesh(), active_policy()
    if mesh.empty and active is not None and active.mesh is not None:
        mesh = active.mesh
    if policy.sharding != "fsdp" or mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    roles = mesh_roles(mesh)
    others = [size for axis, size in roles.sizes.items() if axis not in roles.batch]
    return None if roles.state is None or roles.sizes[roles.state] == 1 or max(others, default=1) > 1 else mesh


def gathering_loop(eqn: Any, weights: Collection[Any], sunk: Sunk, mesh: Any, *, again: bool = False) -> Any:
    """A `scan` whose body gathers its slices of weights.

    Args:
        eqn: The scan.
        weights: Variables that are differentiated arguments of the loss.
        sunk: What is a cheap function of arguments, such as weights cast to bf16.
        mesh: Over which they are divided.
        again: Whether each gather gets a checkpoint of its own, because none around it has the backward pass gather anew.
    """
    flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
    first = sum(scan_arity(eqn))
    sliced = {
        inner
        for outer, inner in zip(eqn.invars[first:], flat.invars[first:], strict=True)
        if is_variable(outer) and is_inexact(inner) and inner.aval.shape and _is_weight(outer, weights, sunk)
    }
    if not sliced:
        return eqn
    whole = NamedSharding(mesh, PartitionSpec())
    eqns = _with_gathers_again(flat.eqns, sliced, flat, whole) if again else _with_gathers(flat.eqns, sliced, whole)
    body = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=unused_dropped(eqns, flat.outvars))
    return eqn.replace(params={**eqn.params, "jaxpr": close(body)})


def gathering_loops(flat: Equations, weights: Collection[Any], mesh: Any) -> bool:
    """Have the loops of a function that nobody cuts gather their weights; whether any does."""
    sunk, before = sink(flat.eqns, flat.invars), flat.eqns
    flat.eqns = [
        gathering_loop(eqn, weights, sunk, mesh, again=True) if eqn.primitive.name == "scan" else eqn for eqn in before
    ]
    return any(ours is not theirs for ours, theirs in zip(flat.eqns, before, strict=True))


def _is_weight(var: Any, weights: Collection[Any], sunk: Sunk) -> bool:
    made_of = sunk.origins.get(var, frozenset())
    return bool(made_of) and all(origin in weights for origin in made_of)


def _with_gathers(eqns: Sequence[Any], sliced: set[Any], whole: NamedSharding) -> list[Any]:
    """The equations with each slice gathered at its first use, after a cast that makes it smaller where there is one."""
    gathered: dict[Any, Any] = {}
    found: list[Any] = []

    def gather(var: Any) -> Any:
        if var not in gathered:
            gathered[var] = new_variable(var)
            found.append(_constraint(var, gathered[var], whole))
        return gathered[var]

    waiting = set(sliced)
    for eqn in eqns:
        if _is_narrowing(eqn) and eqn.invars[0] in waiting:
            found.append(eqn)
            waiting.update(eqn.outvars)
        else:
            invars = [gather(atom) if is_variable(atom) and atom in waiting else atom for atom in eqn.invars]
            found.append(eqn.replace(invars=invars))
    return found


def _with_gathers_again(eqns: Sequence[Any], sliced: set[Any], flat: Equations, whole: NamedSharding) -> list[Any]:
    """The equations with each slice gathered by the products that use it, each under a checkpoint with its gathers.

    The derivative of a product then keeps the slice as it lies, and gathers it once more; so does a checkpoint of the user's.
    What else uses a matrix, such as a table that is looked up, finds it as it lies. Vectors are gathered once, and kept.
    """
    template = checkpoint_template(None, prevent_cse=False)
    matrices = {var for var in sliced if len(var.aval.shape) > 1}
    makers: dict[Any, list[Any]] = {var: [] for var in matrices}  # a slice or a view of one -> the equations in between
    found: list[Any] = []
    for eqn in _with_gathers(eqns, sliced - matrices, whole):
        operands = variables(eqn.invars)
        own = [var for var in operands if var in makers]
        if own and eqn.primitive.name in _PRODUCTS:
            between = {id(one): one for var in own for one in makers[var]}
            inner = _with_gathers([*between.values(), eqn], matrices, whole)
            made = {var for one in inner for var in one.outvars}
            taken = list(dict.fromkeys(var for one in inner for var in variables(one.invars) if var not in made))
            body = derive(flat.template, invars=taken, outvars=eqn.outvars, eqns=inner)
            found.append(checkpoint_equation(template, body, taken, eqn.outvars))
        elif own and eqn.primitive.name in CHECKPOINTS:
            found.append(_with_gathers_inside(eqn, makers, whole))
        else:
            if own and len(operands) == 1 and (eqn.primitive.name in _VIEWS or _is_narrowing(eqn)):
                makers[eqn.outvars[0]] = [*makers[own[0]], eqn]
            found.append(eqn)
    return found


def _with_gathers_inside(eqn: Any, sliced: Collection[Any], whole: NamedSharding) -> Any:
    """A checkpoint of the user's that gathers the slices that it is given."""
    flat = flatten(eqn.params["jaxpr"], hoist_constants=False)
    inner = {
        ours for given, ours in zip(eqn.invars, flat.invars, strict=True) if is_variable(given) and given in sliced
    }
    eqns = _with_gathers(flat.eqns, inner, whole)
    body = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=eqns)
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
