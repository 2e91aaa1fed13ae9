"""The training step that tests compile for hardware that is not there, its abstract arguments, and meshes for others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

GIB = 2**30
LAYERS, BATCH, WIDTH, HIDDEN = 6, 2048, 256, 1024


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
