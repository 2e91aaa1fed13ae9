"""A Linen model with what real ones have, what it starts from, and its loss."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

WIDTH, DEPTH, ROWS = 16, 2, 16


class Block(nn.Module):
    """What real blocks have: statistics, dropout, a flag by position, a word and an array by name."""

    @nn.compact
    def __call__(self, x, train, *, activation="tanh", scale=None):
        h = nn.BatchNorm(use_running_average=not train)(x)
        h = getattr(jnp, activation)(nn.Dense(4 * WIDTH, name="up")(h))
        if train:
            h = nn.Dropout(0.1, deterministic=False)(h)
        y = x + nn.Dense(WIDTH, name="down")(h)
        return y if scale is None else y * scale


class Net(nn.Module):
    block: Any = Block

    @nn.compact
    def __call__(self, x, *, train=True):
        for index in range(DEPTH):
            x = self.block(name=f"block_{index}")(x, train, activation="sin", scale=jnp.cos(x[0, 0]))
        return nn.Dense(1, name="head")(x)


def data(rows=ROWS):
    return jax.random.normal(jax.random.key(0), (rows, WIDTH))


def started(model, x):
    return model.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)


def loss_of(apply):
    def loss_fn(params, stats, x, key):
        out, new = apply(
            {"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return (out**2).mean(), new["batch_stats"]

    return loss_fn
