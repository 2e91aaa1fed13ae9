"""A policy says what it leaves as it was, and refuses names that would do nothing; MaxText's words mean what a loss names."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.step_time import host_bytes
from jaxmem_callbacks.records.errors import PolicyError
from tests.comparisons import assert_close, stored_bytes

pytestmark = pytest.mark.core
WEIGHTS, INPUTS = jnp.full((6, 16, 16), 0.1), jnp.ones((32, 16))


def block(x: Any, w: Any) -> Any:
    x = checkpoint_name(x @ w, "query_proj")
    return jnp.sin(checkpoint_name(jnp.sin(x) @ w, "out_proj"))


def named(weights: Any, x: Any) -> Any:
    return (jax.lax.scan(lambda x, w: (x + block(x, w), None), x, weights)[0] ** 2).mean()


def by_hand(weights: Any, x: Any) -> Any:
    for w in weights:
        x = x + jax.checkpoint(block)(x, w)
    return (x**2).mean()


def reporting(weights: Any, x: Any) -> Any:
    def inner(x: Any, w: Any) -> tuple[Any, None]:
        jax.debug.callback(lambda _: None, x.mean())
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(lambda x, _: (jax.lax.scan(inner, x, weights)[0], None), x, None, length=2)
    return (jax.lax.scan(lambda x, w: (x + block(x, w), None), x, weights)[0] ** 2).mean()


def train_step(weights: Any, x: Any, loss: Any) -> Any:
    return weights - jm.grad(loss)(weights, x)


def warnings_of(loss: Any) -> list[str]:
    step = jm.jit_step(lambda weights, x: train_step(weights, x, loss), jm.StepPolicy(remat="full"))
    return [
        line for line in jm.step_memory(step, WEIGHTS, INPUTS).warnings if "as it is" in line or "left alone" in line
    ]


def test_names_inside_the_users_own_checkpoints_are_refused() -> None:
    words = r"names 'query_proj' only inside checkpoints of its own .* would do nothing. Give them a policy that saves"
    with pytest.raises(PolicyError, match=words):
        jax.grad(jm.remat(by_hand, save=("query_proj",)))(WEIGHTS, INPUTS)
    outside = jm.remat(lambda w, x: by_hand(w, checkpoint_name(jnp.sin(x), "query_proj")), save=("query_proj",))
    jax.make_jaxpr(jax.grad(outside))(WEIGHTS, INPUTS)


def test_names_at_the_uncut_end_cannot_wait_on_the_host() -> None:
    def ending(weights: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda x, w: (x + block(x, w), None), x, weights)[0]
        return (checkpoint_name(jnp.exp(y), "end") ** 2).mean()

    with pytest.raises(PolicyError, match=r"'end' is where nothing is cut .* Leave it out of offload"):
        jax.grad(jm.remat(ending, offload=("end", "query_proj")))(WEIGHTS, INPUTS)


def test_what_stays_as_it_is_is_told() -> None:
    assert warnings_of(named) == []
    told = warnings_of(reporting)
    assert len(told) == 1
    assert told[0].startswith("A `scan` stays as it is and keeps about ")
    assert "report twice" in told[0]
    assert "Move its jax.debug calls" in told[0]
    told = warnings_of(by_hand)
    assert len(told) == 1
    place = r"tests/test_remat_told.py:\d+ around block, 6 times"
    assert re.match(
        rf"The loss has its own checkpoints \({place}\), and they are left alone: the policy acts on", told[0]
    )
    plan = jm.plan(lambda weights, x: train_step(weights, x, reporting), WEIGHTS, INPUTS, budget="1GiB")
    assert any("report twice" in note for note in plan.record.notes)


def test_words_of_maxtext_keep_what_the_loss_names() -> None:
    wanted = jax.value_and_grad(named)(WEIGHTS, INPUTS)
    by_word, by_name = jm.remat(named, "minimal"), jm.remat(named, "save_names", save=("query_proj", "out_proj"))
    assert_close(jax.value_and_grad(by_word)(WEIGHTS, INPUTS), wanted)
    stored = [stored_bytes(loss, WEIGHTS, INPUTS) for loss in (by_word, by_name, jm.remat(named, "save_qkv_proj"))]
    assert stored[0] == stored[1] > stored[2] > stored_bytes(jm.remat(named), WEIGHTS, INPUTS)
    there = jax.make_jaxpr(jax.grad(jm.remat(named, "qkv_proj_offloaded")))(WEIGHTS, INPUTS)
    assert host_bytes(there) == 2 * len(WEIGHTS) * INPUTS.nbytes
    with pytest.raises(
        PolicyError, match=r"remat='minimal' keeps MaxText's tensors query_proj, .* names none of these.*: none\."
    ):
        jax.grad(jm.remat(lambda w, x: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean(), "minimal"))(WEIGHTS, INPUTS)


@pytest.mark.parametrize("policy", [
    jm.StepPolicy(remat="full", offload=("query_proj",)), jm.StepPolicy(remat="qkv_proj_offloaded"),
], ids=["a name", "a word of MaxText's"])  # fmt: skip
def test_one_loss_of_a_step_moves_its_names_to_the_host_and_another_has_none_that_could(policy: jm.StepPolicy) -> None:
    def end(x: Any) -> Any:
        return (jnp.tanh(jnp.tanh(x) @ WEIGHTS[0]) ** 2).mean()

    def step(weights: Any, x: Any) -> Any:
        return jm.grad(named)(weights, x), jm.grad(end)(x)

    under = jm.apply_policy(step, policy)
    assert host_bytes(jax.make_jaxpr(under)(WEIGHTS, INPUTS)) == 2 * len(WEIGHTS) * INPUTS.nbytes
    with pytest.raises(PolicyError, match=r"'query_proj'|MaxText's tensors query_proj"):
        jax.make_jaxpr(jm.apply_policy(lambda _, x: jm.grad(end)(x), policy))(WEIGHTS, INPUTS)
