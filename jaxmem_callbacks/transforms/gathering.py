"""Under ``fsdp`` a loop gathers its step's slice of the weights whole, and again where the step is computed again.

Enters: a loop over layers and which of a loss's variables are weights. Leaves: the loop with sharding constraints in its body,
behind casts to fewer bytes. Without them XLA is free to divide activations by features instead, which for a transformer on
eight H100 moved six times as many bytes and needed half as much memory again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem_callbacks._compat.jaxprs import close, derive, open_jaxpr, scan_arity
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.equations import flatten, is_variable, new_variable
from jaxmem_callbacks.transforms.residuals import Sunk, is_inexact
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles


def gathering_mesh(policy: StepPolicy) -> Any:
    """The mesh over which a policy's loops gather weights, or None where they do not.

    Only where every axis that divides anything divides the batch: a slice of the weights is then whole on each device. On
    explicit axes the user's own types say where values lie.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if policy.sharding != "fsdp" or mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    roles = mesh_roles(mesh)
    others = [size for axis, size in roles.sizes.items() if axis not in roles.batch]
    return None if roles.state is None or roles.sizes[roles.state] == 1 or max(others, default=1) > 1 else mesh


def gathering_loop(eqn: Any, weights: Collection[Any], sunk: Sunk, mesh: Any) -> Any:
    """A `scan` whose body gathers its slices of weights.

    Args:
        eqn: The scan.
        weights: Variables that are differentiated arguments of the loss.
        sunk: What is a cheap function of arguments, such as weights cast to bf16.
        mesh: Over which they are divided.
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
    eqns = _with_gathers(flat.eqns, sliced, NamedSharding(mesh, PartitionSpec()))
    body = derive(flat.template, invars=flat.invars, outvars=flat.outvars, eqns=eqns)
    return eqn.replace(params={**eqn.params, "jaxpr": close(body)})


def _is_weight(var: Any, weights: Collection[Any], sunk: Sunk) -> bool:
    made_of = sunk.origins.get(var, frozenset())
    return bool(made_of) and all(origin in weights for origin in made_of)


def _with_gathers(eqns: list[Any], sliced: set[Any], whole: NamedSharding) -> list[Any]:
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
