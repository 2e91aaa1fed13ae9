"""Segments are computed by one jaxpr only where they are the same: layers that differ in a number stay apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from tests.comparisons import CHECKPOINTS

pytestmark = pytest.mark.core

KEY = jax.random.key(1)
WEIGHTS = [jax.random.normal(jax.random.fold_in(KEY, i), (16, 16)) / 4 for i in range(6)]
INPUTS = jax.random.normal(KEY, (8, 16))


def exponents(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        x = jnp.tanh((x @ w) ** (index + 2)) + x
    return (x**2).mean()


def slices(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        h = x @ w
        x = jnp.tanh(h + jax.lax.slice(h, (index, 0), (index + 1, 16))) + x
    return (x**2).mean()


def factors(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        x = jnp.tanh((x @ w) * (0.5 + index)) + x
    return (x**2).mean()


def streams(weights: Any, x: Any) -> Any:
    for index, w in enumerate(weights):
        kept = jax.random.bernoulli(jax.random.fold_in(KEY, index), 0.5, x.shape)
        x = jnp.tanh((x @ w) * kept) + x
    return (x**2).mean()


@pytest.mark.parametrize("loss", [pytest.param(exponents, marks=pytest.mark.optimised), slices, factors, streams])
def test_layers_that_differ_in_a_number_stay_apart(loss):
    cheaper = jm.remat(loss)
    made = [
        eqn.params["jaxpr"]
        for eqn in jax.make_jaxpr(cheaper)(WEIGHTS, INPUTS).eqns
        if eqn.primitive.name in CHECKPOINTS
    ]
    steps = [tuple(eqn.primitive for eqn in each.eqns) for each in made]
    assert len(set(steps)) < len(steps), "two are so much alike that they could be taken for one"
    ours, theirs = (jax.jit(jax.value_and_grad(f))(WEIGHTS, INPUTS) for f in (cheaper, loss))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
