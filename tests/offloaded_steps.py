"""Losses with loops whose values can wait in host memory, one without, and a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem_callbacks as jm

LAYERS, ROWS, WIDTH = 8, 256, 16
CARRY = ROWS * WIDTH * 4


def layer(x: Any, w: Any) -> tuple[Any, Any]:
    hidden = jnp.tanh(x @ w[0])
    mean = hidden.mean()
    for _ in range(3):
        hidden = jnp.tanh(hidden @ w[1])
    return x + hidden @ w[2], mean


def looped(weights: Any, x: Any) -> Any:
    count = jnp.zeros((), jnp.int32)  # carried too, and not worth a transfer

    def step(carry: Any, w: Any) -> tuple[Any, Any]:
        x, mean = layer(carry[0], w)
        return (x, carry[1] + 1), mean

    (x, count), means = jax.lax.scan(step, (x, count), weights)
    return (x**2).mean() + means.sum() * count


def recurrent(weights: Any, x: Any) -> Any:
    """Carries outweigh what a step keeps of itself: several steps share a checkpoint."""
    return (jax.lax.scan(lambda c, w: (c + jnp.sin(c[0, 0] * w[0, 0] @ w[1, 0]), None), x, weights)[0] ** 2).mean()


def unrolled(weights: Any, x: Any) -> Any:
    for index in range(LAYERS):
        x, _ = layer(x, weights[index])
    return (x**2).mean()


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw((LAYERS, 3, WIDTH, WIDTH)) / 4, "float32"), jnp.asarray(draw((ROWS, WIDTH)), "float32")


def train_step(weights: Any, x: Any) -> tuple[Any, Any]:
    loss, gradients = jm.value_and_grad(looped)(weights, x)
    return weights - gradients, loss
