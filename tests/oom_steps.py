"""A training step whose temporaries are more than a process may have here, so that it really runs out of memory, at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm

LAYERS, WIDTH, ROWS = 24, 64, 2**14  # a batch of 4 MiB, among the largest arrays of any process of tests
# Of each row, made inside the step: 24 layers of 2**21 rows of 256 bytes, twice, are 24 GiB.
COPIES = 2**7
OPTIMIZER = optax.adam(1e-3)


def loss_fn(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w) + x, None

    x = jnp.repeat(batch["x"], COPIES, axis=0)
    return (jax.lax.scan(layer, x, params["w"])[0] ** 2).mean()


def train_step(state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def new_state():
    params = {"w": jnp.full((LAYERS, WIDTH, WIDTH), 0.01)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def new_batch():
    return {"x": jnp.ones((ROWS, WIDTH))}
