"""Losses and steps whose gradients are accumulated, whole and weighted, and the policies that the tests compare."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxmem_callbacks as jm

KEY = jax.random.key(0)
WIDTH, ROWS = 8, 32
WEIGHTS = {"a": jax.random.normal(KEY, (WIDTH, WIDTH)) / 3, "b": jax.random.normal(KEY, (WIDTH,))}
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
MASK = jax.random.bernoulli(jax.random.key(3), 0.4, (ROWS,)).astype(jnp.float32)
FOUR, PLAIN = jm.StepPolicy(microbatches=4), jm.StepPolicy()


def errors(params, x):
    return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["a"]) @ params["b"] - 1.0) ** 2


def mean_loss(params, x):
    return errors(params, x).mean() + 1e-3 * (params["b"] ** 2).sum()


def weighted_loss(params, x, mask):
    return jm.weighted((errors(params, x) * mask).sum(), mask.sum())


def masked_loss(params, x, mask):
    return (errors(params, x) * mask).sum() / mask.sum()


def by_dict(params, batch):
    return mean_loss(params, batch["x"] * batch["scale"])


def by_keyword(params, *, x):
    return mean_loss(params, x)


def with_penalty(params, x):
    """A gradient inside the loss, which is a part of each microbatch."""
    return mean_loss(params, x) + (jm.grad(lambda x: errors(params, x).sum())(x) ** 2).mean()


def unnamed(params, one, other):
    return mean_loss(params, one + other)


def gradients_of(loss, *args, policy=FOUR, **kwargs):
    """Value and gradients under the policy, compiled (and checked) as one step."""

    @jax.jit
    def step(args, kwargs):
        return jm.value_and_grad(loss)(*args, **kwargs)

    return jm.jit_step(step, policy)(args, kwargs)


def plain_step(params, x):
    value, gradients = jm.value_and_grad(mean_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def copy(tree):
    return jax.tree.map(jnp.copy, tree)
