"""What is made again in each segment, and what is not: the limits of sinking."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.equations import flatten
from jaxmem_callbacks.transforms.residuals import sink
from tests.comparisons import checkpoints
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


def shared_weight(w: Any, x: Any) -> Any:
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x.astype(jnp.float32).mean()


def tied_embedding(table: Any, x: Any) -> Any:
    """The table is looked up first and multiplied with last, in another dtype than its own."""
    table = table.astype(jnp.bfloat16)
    x = table[jnp.arange(len(x))] + x.astype(jnp.bfloat16)
    for _ in range(4):
        x = jnp.tanh(x @ jnp.ones((16, 16), jnp.bfloat16) / 8)
    return jax.nn.logsumexp((x @ table.T).astype(jnp.float32), -1).mean()


@pytest.mark.parametrize("loss", [shared_weight, tied_embedding])
def test_what_several_segments_differentiate_is_made_once(loss: Any) -> None:
    inside = [str(eqn) for eqn in checkpoints(jm.remat(loss, segments=3), WEIGHTS[0], INPUTS)]
    assert len(inside) == 2
    assert not any("bf16[16,16] = convert_element_type" in text for text in inside), "it comes from outside"


def test_gradients_of_one_value_are_added_as_in_the_loss_as_it_is_written() -> None:
    plain, ours = (
        jax.grad(each)(WEIGHTS[0], INPUTS) for each in (tied_embedding, jm.remat(tied_embedding, segments=3))
    )
    # Behind the cast, as gradients of several values, they would be added in float32: up to 0.3 % off.
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_a_stack_of_which_each_segment_uses_a_part_is_cast_in_each() -> None:
    def loss(stack: Any, x: Any) -> Any:
        low = stack.astype(jnp.bfloat16)
        for index in range(4):
            x = jnp.tanh(x @ low[index])
        return x.astype(jnp.float32).mean()

    stack, x = jnp.stack([WEIGHTS[0]] * 4), INPUTS.astype(jnp.bfloat16)
    inside = checkpoints(jm.remat(loss, segments=3), stack, x)
    taken = [atom.aval.dtype for eqn in inside for atom in eqn.invars if atom.aval.shape == stack.shape]
    assert taken == [jnp.float32, jnp.float32], "the argument itself"


def test_what_is_larger_than_its_arguments_is_made_in_each_segment() -> None:
    def loss(w: Any, bias: Any, x: Any) -> Any:
        bias = jnp.broadcast_to(bias * 2.0, (64, 8, 16))
        for _ in range(4):
            x = jnp.tanh(x @ w + bias)
        return x.mean()

    inside = checkpoints(jm.remat(loss, segments=3), WEIGHTS[0], INPUTS[0], jnp.ones((64, 8, 16)))
    assert all("f32[64,8,16] = broadcast_in_dim" in str(eqn) for eqn in inside)


def test_a_long_chain_is_not_cheap_and_can_be_cut() -> None:
    def loss(x: Any) -> Any:
        for _ in range(60):
            x = jnp.sin(x) * 1.1 + 0.1
        return x.sum()

    flat = flatten(jax.make_jaxpr(loss)(INPUTS))
    assert len(sink(flat.eqns, flat.invars).makers) < len(flat.eqns) / 2
    assert "remat" in str(jax.make_jaxpr(jm.remat(loss))(INPUTS))
