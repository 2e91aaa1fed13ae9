"""What is made again in each segment, and what is not: the limits of sinking."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.equations import flatten
from jaxmem_callbacks.transforms.residuals import sink
from tests.losses import INPUTS, WEIGHTS

pytestmark = pytest.mark.core


def sunk_kinds(loss: Any, *args: Any) -> set[str]:
    flat = flatten(jax.make_jaxpr(loss)(*args))
    return {f"{var.aval.dtype}{list(var.aval.shape)}" for var in sink(flat.eqns, flat.invars).makers}


def test_casts_masks_and_folded_keys_are_sunk() -> None:
    def loss(weights: Any, x: Any, key: Any) -> Any:
        mask = jnp.tril(jnp.ones((8, 8), bool))
        for index, w in enumerate(weights):
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), 0.9, x.shape)
            x = jnp.where(mask, x @ x.T, 0.0) @ x @ w.astype(jnp.bfloat16).astype(jnp.float32) * kept
        return x.mean()

    assert {"bfloat16[16, 16]", "bool[8, 8]", "key<fry>[]", "bool[8, 16]"} <= sunk_kinds(
        loss, WEIGHTS, INPUTS, jax.random.key(0)
    )


def test_a_weight_that_all_layers_share_is_cast_once() -> None:
    def loss(w: Any, x: Any) -> Any:
        w = w.astype(jnp.bfloat16)
        x = x.astype(jnp.bfloat16)
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.astype(jnp.float32).mean()

    assert "bfloat16[16, 16]" not in sunk_kinds(loss, WEIGHTS[0], INPUTS)


def test_a_long_chain_is_not_cheap_and_can_be_cut() -> None:
    def loss(x: Any) -> Any:
        for _ in range(60):
            x = jnp.sin(x) * 1.1 + 0.1
        return x.sum()

    flat = flatten(jax.make_jaxpr(loss)(INPUTS))
    assert len(sink(flat.eqns, flat.invars).makers) < len(flat.eqns) / 2
    assert "remat" in str(jax.make_jaxpr(jm.remat(loss))(INPUTS))
