"""`search={"chunks": True}`: the head of a loss, or what a `vmap` maps, in the fewest chunks that fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.plan import search_of
from jaxmem_callbacks.planning.chunk_candidates import MOST_CHUNKS, _next_number
from tests.pasting import pasted

pytestmark = [pytest.mark.core, pytest.mark.slow]

WORDS, WIDTH, LENGTH = 8192, 32, 256
W = {"emb": jnp.full((WORDS, WIDTH), 0.1), "mix": jnp.full((WIDTH, WIDTH), 0.1)}
TOKENS = jnp.arange(LENGTH)[None] % WORDS


def language_model(w: Any, tokens: Any) -> Any:
    """One step; its head is most of what it holds."""

    def loss(w: Any, tokens: Any) -> Any:
        x = w["emb"][tokens]
        x = x + jnp.tanh(jnp.cumsum(x @ w["mix"], 1) * 0.01)
        logp = jax.nn.log_softmax(x @ w["emb"].T)
        return -jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1).mean()

    value, gradients = jm.value_and_grad(loss)(w, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value


SAMPLES = jnp.linspace(0, 1, 512)[:, None] * jnp.ones((1, 64))


def ensemble(w: Any, xs: Any) -> Any:
    """A `vmap` over samples, each integrated over time."""

    def loss(w: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            end, path = jax.lax.scan(lambda s, _: (jnp.tanh(s @ w), s.sum()), x, None, length=40)
            return (end**2).sum() + path.mean()

        return jax.vmap(one)(xs).mean()

    value, gradient = jm.value_and_grad(loss)(w, xs)
    return w - 0.1 * gradient, value


def bytes_of(step: Any, policy: jm.StepPolicy, *args: Any) -> int:
    return jm.step_memory(jm.jit_step(step, policy), *args).program.step_bytes


def test_a_head_that_does_not_fit_is_computed_in_the_fewest_chunks_that_do() -> None:
    full, chunked = (
        bytes_of(language_model, policy, W, TOKENS) for policy in (jm.StepPolicy(remat="full"), jm.StepPolicy(chunks=8))
    )
    assert chunked < 0.7 * full
    plan = jm.plan(language_model, W, TOKENS, budget=f"{int(1.02 * chunked)}B", search={"chunks": True}, progress=False)
    assert plan.chosen.fits
    assert 2 <= plan.policy.chunks <= 10
    assert sum(bool(each.policy.chunked) for each in plan.candidates) <= MOST_CHUNKS
    state, value = jm.jit_step(language_model, plan.policy, donate_argnames=())(W, TOKENS)
    other, expected = jax.jit(language_model)(W, TOKENS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(state["emb"], other["emb"], rtol=1e-5, atol=1e-7)


def test_a_vmap_that_does_not_fit_is_computed_in_chunks() -> None:
    w = jnp.eye(64) * 0.5
    chunked = bytes_of(ensemble, jm.StepPolicy(chunks={"vmap": 4}), w, SAMPLES)
    plan = jm.plan(
        ensemble, w, SAMPLES, budget=f"{int(1.02 * chunked)}B", search={"chunks": True, "remat": False}, progress=False
    )
    assert plan.chosen.fits
    assert [count for _, count in plan.policy.chunked] <= [6]
    assert len(plan.candidates) <= 1 + MOST_CHUNKS


def test_chunks_that_are_proposed_can_be_had_and_fit() -> None:
    chunked = bytes_of(language_model, jm.StepPolicy(chunks=16), W, TOKENS)
    given = {"budget": f"{int(1.1 * chunked)}B", "progress": False}
    plan = jm.plan(language_model, W, TOKENS, **given)
    assert not plan.chosen.fits
    option = pasted("plan.search", plan).removeprefix("--search ")
    assert option == "chunks"
    assert jm.plan(language_model, W, TOKENS, search=search_of([option]), **given).chosen.fits


def test_what_is_no_map_is_noted() -> None:
    def step(w: Any, x: Any) -> Any:
        value, gradient = jm.value_and_grad(lambda w, x: jax.nn.softmax(jnp.cumsum(x @ w), None).max())(w, x)
        return w - gradient, value

    args = jnp.ones((256, 256)), jnp.ones((1024, 256))
    plan = jm.plan(step, *args, budget="1MiB", search={"chunks": True, "remat": False}, progress=False)
    assert not any(each.policy.chunked for each in plan.candidates)
    (note,) = (note for note in plan.record.notes if "Chunks of the head" in note)
    assert note.startswith("Chunks of the head were not tried: chunks=2: the head of this loss is no map")


@pytest.mark.parametrize(
    ("points", "room", "expected"),
    [
        ({1: 100.0, 16: 20.0}, 50.0, 3),
        ({1: 100.0, 16: 20.0}, 19.0, 64),
        ({1: 100.0, 16: 99.5}, 19.0, None),
        ({1: 100.0, 4: 40.0, 3: 60.0}, 50.0, None),
        ({1: float("inf"), 16: 20.0}, 50.0, 4),
    ],
)
def test_the_number_to_compile_next(points: Any, room: float, expected: Any) -> None:
    assert _next_number(points, room) == expected
