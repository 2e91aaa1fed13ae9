"""What is made again in each segment, and what is not: the limits of sinking."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.loss_profile import cheap_values
from jaxmem_callbacks.transforms.remat import rematerialised
from jaxmem_callbacks.transforms.tracing import flatten
from tests.comparisons import checkpoints
from tests.losses import INPUTS, WEIGHTS

pytestmark = pytest.mark.core


def sunk_kinds(loss: Any, *args: Any) -> set[str]:
    flat = flatten(jax.make_jaxpr(loss)(*args))
    return {f"{var.aval.dtype}{list(var.aval.shape)}" for var in cheap_values(flat)[0].makers}


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


def test_what_is_computed_of_arguments_is_made_in_each_segment() -> None:
    """Kept, it would be there through the whole forward pass, and what its derivative needs of it too."""

    def loss(w: Any, x: Any) -> Any:
        w = jnp.broadcast_to(w * jnp.exp(w), (16, 16))
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.mean()

    inside = checkpoints(jm.remat(loss, segments=3), WEIGHTS[0], INPUTS)
    assert [str(eqn).count("f32[16,16] = exp") for eqn in inside] == [1, 1]


def test_a_number_that_is_cast_inside_a_jit_is_no_argument() -> None:
    as_float = jax.jit(lambda number: jax.lax.convert_element_type(number, jnp.float32))

    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w) * as_float(2)
        return x.mean()

    plain, ours = (jax.grad(each)(WEIGHTS[0], INPUTS) for each in (loss, jm.remat(loss, segments=3)))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-8)


def test_a_view_of_an_argument_is_not_kept_beside_it() -> None:
    def loss(w: Any, x: Any) -> Any:
        w = w.T
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.mean()

    inside = checkpoints(jm.remat(loss, segments=3), WEIGHTS[0], INPUTS)
    assert all("f32[16,16] = transpose" in str(eqn) for eqn in inside)


def test_a_weight_that_nobody_differentiates_is_cast_in_each_segment() -> None:
    cut = rematerialised(shared_weight, jm.StepPolicy(remat="full", segments=3), lambda args: args[1:])
    inside = checkpoints(cut, WEIGHTS[0], INPUTS)
    assert all("bf16[16,16] = convert_element_type" in str(eqn) for eqn in inside)


def test_weights_that_are_multiplied_in_a_finer_dtype_have_their_gradients_added_there() -> None:
    def loss(w: Any, x: Any) -> Any:
        w = w.astype(jnp.float32)
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    args = WEIGHTS[0].astype(jnp.bfloat16), INPUTS
    plain, ours = (np.asarray(jax.grad(each)(*args), np.float32) for each in (loss, jm.remat(loss, segments=3)))
    assert np.mean(plain != ours) < 0.05, "rounded once: a few are so near the middle that the order of sums decides"


def test_a_long_chain_is_not_cheap_and_can_be_cut() -> None:
    def loss(x: Any) -> Any:
        for _ in range(60):
            x = jnp.sin(x) * 1.1 + 0.1
        return x.sum()

    flat = flatten(jax.make_jaxpr(loss)(INPUTS))
    assert len(cheap_values(flat)[0].makers) < len(flat.eqns) / 2
    assert "remat" in str(jax.make_jaxpr(jm.remat(loss))(INPUTS))
