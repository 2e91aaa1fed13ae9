"""A training step on plain arrays, the compiles inside a block, and the records that a step left."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import optax

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps import registry

OPTIMIZER = optax.adam(1e-2)


@contextmanager
def compiles_of(name: str) -> Generator[list[str]]:
    """What the backend compiled for the function of this name inside the block, one entry each."""
    compiled: list[str] = []

    def listen(event, _duration, **details):
        if event == "/jax/core/compile/backend_compile_duration" and details.get("fun_name") == f"jit({name})":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def new_records(cursor: int):
    return registry.since(cursor)[0]


def loss_fn(params, batch):
    return ((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - 1.0) ** 2).mean()


def plain_data(rows=8):
    params = {"w": jnp.linspace(0.0, 1.0, 64).reshape(8, 8), "v": jnp.ones((8, 1))}
    return params, OPTIMIZER.init(params), {"x": jnp.linspace(0.0, 1.0, rows * 8).reshape(rows, 8)}


def make_plain(name="train_step", gradients=jm.value_and_grad):
    """A step of plain dictionaries under this name, and a list that grows by one with each trace."""
    traces = []

    def train_step(params, opt_state, batch):
        traces.append(1)
        loss, grads = gradients(loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step.__name__ = name
    return train_step, traces


# A script of a few lines, around a step of this library.
SCRIPT = """
import jax.numpy as jnp
import jaxmem_callbacks as jm

def train_step(params, batch):
    loss, grads = jm.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
    return {"w": params["w"] - grads["w"]}, loss

jm.jit_step(train_step)({"w": jnp.ones((33, 17))}, jnp.ones((5, 33)))
"""
