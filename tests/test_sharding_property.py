"""Properties of every inferred sharding, over shapes, meshes and policies: it divides, uses each axis once, and never costs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.sharding.mesh import abstract_mesh

pytestmark = pytest.mark.core

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 64, 96, 100, 128, 1000, 1024, 4096, 50257])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
NAMES = st.sampled_from(["a", "b", "blocks", "kernel", "bias", "opt_state"])
TREES = st.recursive(
    SHAPES.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)),
    lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=8,
)
AXES = st.dictionaries(st.sampled_from(["data", "fsdp", "tensor"]), st.sampled_from([1, 2, 3, 4, 8, 64]), min_size=1)
POLICIES = st.sampled_from(["replicate", "zero1", "fsdp", "fsdp_tensor"])


def parts(spec: Any) -> list[str]:
    return [axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)]


@settings(deadline=None, max_examples=150)
@given(params=TREES, axes=AXES, sharding=POLICIES)
def test_every_spec_divides_uses_each_axis_once_and_never_costs(params, axes, sharding):
    mesh = abstract_mesh(axes, math.prod(axes.values()))
    state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
    try:
        found = jm.infer_shardings(state, mesh, jm.StepPolicy(sharding=sharding))
    except PolicyError as error:
        assert " needs an axis for " in str(error)  # noqa: PT017 - only a mesh without the axis is refused
        assert sharding == "fsdp_tensor" or not {"data", "fsdp"} & set(axes)
        return
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for leaf, placed in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        used = parts(placed.spec)
        assert len(used) == len(set(used)) <= 2
        assert len(placed.spec) <= len(leaf.shape)
        shard = placed.shard_shape(leaf.shape)  # raises where it does not divide
        assert math.prod(shard) * math.prod(mesh.shape[axis] for axis in used) == math.prod(leaf.shape)
        assert all(mesh.shape[axis] > 1 for axis in used)
        assert not used or sharding != "replicate"
    if sharding == "zero1" and "opt_state" not in str(jax.tree.structure(params)):
        assert not any(parts(placed.spec) for placed in jax.tree.leaves(found[0]))


@settings(deadline=None, max_examples=100)
@given(
    layers=st.integers(2, 96),
    widths=st.lists(st.sampled_from([5, 8, 16, 33, 96, 128]), min_size=2, max_size=4),
    axes=st.sampled_from(["fsdp=2,tensor=2", "fsdp=8,tensor=4", "fsdp=3,tensor=2"]),
    sharding=st.sampled_from(["zero1", "fsdp", "fsdp_tensor"]),
)
def test_no_stack_is_split_between_its_layers(layers, widths, axes, sharding):
    """Whatever divides: a stack's leading dimension stays whole, in parameters and in both moments."""
    blocks = {
        f"dense_{i}": {
            "kernel": jax.ShapeDtypeStruct((layers, one, other), jnp.float32),
            "bias": jax.ShapeDtypeStruct((layers, other), jnp.float32),
        }
        for i, (one, other) in enumerate(itertools.pairwise(widths))
    }
    if any(layers >= one * other for one, other in itertools.pairwise(widths)):
        return  # no model has more layers than a matrix has elements
    params = {"embed": jax.ShapeDtypeStruct((1000, widths[0]), jnp.float32), "blocks": blocks}
    state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
    mesh = abstract_mesh(axes, math.prod(int(part.split("=")[1]) for part in axes.split(",")))
    found = jm.infer_shardings(state, mesh, jm.StepPolicy(sharding=sharding))
    for path, placed in jax.tree.leaves_with_path(found):
        if "blocks" in jax.tree_util.keystr(path):
            assert not placed.spec or placed.spec[0] is None, jax.tree_util.keystr(path)
