"""Steps of loops under one checkpoint: chosen for the peak of the whole function, in which every loop's carries are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from tests.comparisons import assert_close

pytestmark = pytest.mark.core

LENGTH, WIDTH, BATCH = 256, 16, 8


def recurrent(weights: jax.Array, x: jax.Array, head: jax.Array | None = None) -> jax.Array:
    """A loop over time for each weight, and perhaps a wide head; x[BATCH, WIDTH]."""
    for weight in weights:

        def step(carry: jax.Array, _: None, weight: jax.Array = weight) -> tuple[jax.Array, None]:
            for _ in range(4):
                carry = jnp.tanh(carry @ weight)
            return carry, None

        x, _ = jax.lax.scan(step, x, None, length=LENGTH)
    return jnp.square(x if head is None else jnp.sin(x @ head)).sum()


def outer_trips(*args: jax.Array) -> list[int]:
    """Lengths of the outer loops of the cut function."""
    eqns = jax.make_jaxpr(jm.remat(recurrent))(*args).eqns
    return [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"]


@pytest.fixture(scope="module")
def weights() -> jax.Array:
    return 0.3 * jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH))


def test_the_more_carries_are_stored_beside_the_fewer_each_loop_stores(weights: jax.Array) -> None:
    x = jnp.ones((BATCH, WIDTH))
    (one,) = outer_trips(weights[:1], x)
    three = outer_trips(weights, x)
    assert min(three) > 1
    assert max(three) < one < LENGTH


def test_where_the_head_makes_the_peak_loops_store_little_and_hold_much(weights: jax.Array) -> None:
    x, head = jnp.ones((BATCH, WIDTH)), jnp.ones((WIDTH, 2**16))
    (beside,), (alone,) = outer_trips(weights[:1], x, head), outer_trips(weights[:1], x)
    assert beside < alone


def test_the_numbers_stay(weights: jax.Array) -> None:
    x = jnp.ones((BATCH, WIDTH))
    ours, theirs = (jax.jit(jax.grad(loss))(weights, x) for loss in (jm.remat(recurrent), recurrent))
    assert_close(ours, theirs)
