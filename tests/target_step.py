"""What tests compile for hardware that is not there: steps, their abstract arguments, meshes; and whether they can."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import TargetError

GIB = 2**30
LAYERS, BATCH, WIDTH, HIDDEN = 6, 2048, 256, 1024
keeps_remat = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="a CPU's compiler keeps the remat of layers written out since jax 0.12"
)


def needs_compiler(name):
    """Skip, and say so, where the target's compiler is not installed; fail where the machine is meant to have it."""
    try:
        return resolve_target(name)
    except TargetError:
        target = resolve_target(name, require_installed=False)
        package = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}[target.platform]
        message = f"targets: {target.name.partition(':')[0]} not proved ({package} for this JAX is not installed)"
        if os.environ.get("JAXMEM_REQUIRE_TARGETS"):
            pytest.fail(message)
        pytest.skip(message)


def shape(*sizes, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def block(x, p):
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def loss(params, x):
    return (jax.lax.scan(block, x, params)[0] ** 2).mean()


def train_step(params, momentum, x, unused):
    del unused
    value, grads = jax.value_and_grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


PARAMS = {"up": shape(LAYERS, WIDTH, HIDDEN), "down": shape(LAYERS, HIDDEN, WIDTH)}
ARGS = (PARAMS, PARAMS, shape(BATCH, WIDTH), shape(4096, 4096))
PARAM_BYTES = 2 * LAYERS * WIDTH * HIDDEN * 4


def mesh_of(count, *, abstract=False):
    if abstract:
        return AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,))
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def small_step(w, x):
    """A step that compiles in a second."""
    return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)


SMALL_ARGS = (shape(32, 32), shape(64, 32))
