"""Two levels of checkpoints: the same numbers, fewer bytes between the passes, for loops and for long chains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms.flops import jaxpr_flops
from tests.comparisons import checkpoints, stored_bytes

pytestmark = pytest.mark.core

WIDTH, ROWS = 32, 512


def wide(h: Any) -> Any:
    """Something that keeps far more than what a layer hands on, so that every layer wants a checkpoint of its own."""
    for _ in range(12):
        h = jnp.sin(h)
    return h


def looped(weights: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        x = x + wide(x @ w)
        return x, x.mean()

    x, means = jax.lax.scan(layer, x, weights)
    return (x**2).mean() + (means * jnp.arange(len(weights))).sum()


def backwards(weights: Any, x: Any) -> Any:
    return (jax.lax.scan(lambda x, w: (x + wide(x @ w), x[0]), x, weights, reverse=True)[1] ** 2).mean()


def chained(weights: Any, x: Any) -> Any:
    skip = x
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return ((x + skip) ** 2).mean()


def arguments(layers: int = 16) -> tuple[Any, Any]:
    weights = jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH)) / 8
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


@pytest.mark.parametrize("loss", [looped, backwards, chained])
def test_the_root_is_stored_and_the_numbers_stay(loss: Any) -> None:
    args = arguments()
    wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    segments = 12 if loss is chained else None
    once, twice = (jm.remat(loss, segments=segments, levels=levels) for levels in (1, 2))
    got = jax.jit(jax.value_and_grad(twice, argnums=(0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    weights = args[0].nbytes
    assert stored_bytes(twice, *args) - weights < 0.75 * (stored_bytes(once, *args) - weights)
    nested = checkpoints(twice, *args)
    assert len(nested) > len(checkpoints(once, *args)) or loss is not chained
    flops = [jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each))(*args)) for each in (loss, once, twice)]
    assert flops == sorted(flops)


def test_a_loop_without_divisors_stays_one_loop() -> None:
    args = arguments(13)
    assert stored_bytes(jm.remat(looped, levels=2), *args) == stored_bytes(jm.remat(looped), *args)


def test_the_compiler_needs_fewer_bytes() -> None:
    args = arguments(64)
    temp = [
        jax.jit(jax.grad(jm.remat(looped, levels=levels))).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for levels in (1, 2)
    ]
    assert temp[1] < 0.6 * temp[0]


@pytest.mark.parametrize("levels", [0, 3, True])
def test_other_numbers_of_levels_are_refused(levels: Any) -> None:
    with pytest.raises(PolicyError, match=r"levels=.*: expected 1 or 2"):
        jm.StepPolicy(remat="full", levels=levels)


def recurrent(weights: Any, x: Any) -> Any:
    """A cell over time: its carry is large beside what one step computes, so a checkpoint around each step stores too much."""

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        gate = jax.nn.sigmoid(x + h @ weights)
        c = gate * c + (1 - gate) * jnp.tanh(x)
        return (gate * jnp.tanh(c), c), h.mean()

    zeros = jnp.zeros((ROWS, WIDTH))
    (h, _), means = jax.lax.scan(cell, (zeros, zeros), jnp.broadcast_to(x, (64, ROWS, WIDTH)))
    return (h**2).mean() + means.sum()


def test_steps_with_large_carries_share_a_checkpoint() -> None:
    weights, x = arguments()
    args = (weights[0], x)
    wanted = jax.jit(jax.value_and_grad(recurrent, argnums=(0, 1)))(*args)
    cheaper = jm.remat(recurrent)
    got = jax.jit(jax.value_and_grad(cheaper, argnums=(0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    carries = 64 * 2 * ROWS * WIDTH * 4
    assert stored_bytes(cheaper, *args) < 0.8 * carries
    # Computed again once, as with a checkpoint around each step, and not twice.
    plain, ours = (jaxpr_flops(jax.make_jaxpr(jax.value_and_grad(each))(*args)) for each in (recurrent, cheaper))
    assert ours < 1.5 * plain
