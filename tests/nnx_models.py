"""An NNX model with what real ones have, its loss, its arrays by path, and the checkpoints of a call of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.comparisons import checkpoints

WIDTH, DEPTH, ROWS = 16, 2, 16


class Block(nnx.Module):
    """What real blocks have: statistics, dropout, a flag by position, a word by name, and a method of their own."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, train, *, activation="tanh", scale=None):
        h = self.up(self.norm(x, use_running_average=not train))
        h = getattr(jnp, activation)(h)
        if train:
            h = self.drop(h, deterministic=False)
        y = x + self.down(h)
        return y if scale is None else y * scale

    def project(self, x):
        return self.up(x)


class Net(nnx.Module):
    def __init__(self, rngs, *, by_hand=False):
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.by_hand = by_hand

    def __call__(self, x, *, train=True):
        for block in self.blocks:
            if self.by_hand:
                x = nnx.remat(lambda block, x: block(x, train, activation="sin", scale=jnp.cos(x[0, 0])))(block, x)
            else:
                x = block(x, train, activation="sin", scale=jnp.cos(x[0, 0]))
        return self.head(x)


def data(rows=ROWS):
    return jax.random.normal(jax.random.key(0), (rows, WIDTH))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def arrays(value):
    """Every array of a module or optimizer by path, random keys as their words."""
    flat = nnx.to_flat_state(nnx.state(value))
    plain = {path: leaf[...] for path, leaf in flat}
    is_key = jax.dtypes.prng_key
    return {p: np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, is_key) else v) for p, v in plain.items()}


def traced_checkpoints(model, x, **options):
    graphdef, state = nnx.split(model)
    return checkpoints(lambda state, x: nnx.merge(graphdef, state)(x, **options), state, x)
