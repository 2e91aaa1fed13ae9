"""Policies under JAX's newer checkpoints (`jax_remat3`): the same bytes, operations and gradients as under its first ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import LossRefusedError
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from tests.comparisons import assert_close

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has one implementation of checkpoints"),
]
leaves_a_trace = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="a newer checkpoint of jax 0.10 is no equation of its own in a trace"
)
LAYERS, WIDTH, ROWS = 4, 16, 64
W, X = jnp.full((LAYERS, WIDTH, WIDTH), 0.1), jnp.ones((ROWS, WIDTH)) / 7


@pytest.fixture
def newer():
    """Sets the flag, as a script does before it defines anything."""

    def set_to(value: bool) -> None:
        jax.config.update("jax_remat3", value)

    before = jax.config.jax_remat3
    yield set_to
    set_to(before)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return checkpoint_name(jnp.tanh(jnp.tanh(x @ w) @ w.T), "hidden") + x


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).mean()


def written_out(w: jax.Array, x: jax.Array) -> jax.Array:
    for place in range(LAYERS):
        x = layer(x, w[place])
    return (x**2).mean()


def half_checkpointed(w: jax.Array, x: jax.Array) -> jax.Array:
    """Its author's checkpoints around two layers, defined while the flag is set."""
    own = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
    for place in range(LAYERS):
        x = (own if place < 2 else layer)(x, w[place])
    return (x**2).mean()


def outcome(loss: Any, policy: jm.StepPolicy) -> tuple[Any, int, int]:
    """Loss and gradient, bytes of the compiled step, and operations as traced."""

    def step(w: Any, x: Any) -> Any:
        value, gradient = jm.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), value

    applied = jm.jit_step(step, policy, donate_argnames=())
    return applied(W, X), jm.step_memory(applied, W, X).program.step_bytes, jaxpr_flops(jax.make_jaxpr(applied)(W, X))


POLICIES = [
    jm.StepPolicy(remat="full"),
    jm.StepPolicy(remat="full", keep=0.5),
    jm.StepPolicy(remat="full", levels=2),
    jm.StepPolicy(remat="full", save=("hidden",)),
    jm.StepPolicy(remat="dots"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: f"{each.remat}-{each.keep}-{each.levels}-{each.save}")
@pytest.mark.parametrize("loss", [looped, written_out])
def test_a_policy_gives_the_same_program_under_both(newer, loss, policy):
    newer(False)
    first = outcome(loss, policy)
    newer(True)
    second = outcome(loss, policy)
    assert_close(second[0], first[0])
    assert second[1:] == first[1:]


@leaves_a_trace
@pytest.mark.parametrize(("remat", "own"), [("full", "keep"), ("full", "replace"), ("none", "replace")])
def test_checkpoints_of_the_author_are_seen_and_replaced(newer, remat, own):
    policy = jm.StepPolicy(remat=remat, own_checkpoints=own)
    newer(False)
    first = outcome(half_checkpointed, policy)
    newer(True)
    second = outcome(half_checkpointed, policy)
    assert_close(second[0], first[0])
    assert second[1:] == first[1:]


@leaves_a_trace
def test_a_loss_that_is_all_checkpoints_is_refused_under_both(newer):
    for value in (False, True):
        newer(value)
        own = jax.checkpoint(looped)
        with pytest.raises(LossRefusedError, match="own checkpoints"):
            jm.remat(own, "full")(W, X)


def test_modules_get_their_checkpoints(newer):
    newer(True)
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradients(model: Any, x: Any) -> Any:
        return jm.nnx.value_and_grad(lambda model, x: (jnp.tanh(jnp.tanh(model(x)) @ x.T) ** 2).mean())(model, x)

    plain = gradients(model, X)
    assert_close(jm.apply_policy(gradients, jm.StepPolicy(remat="full"))(model, X), plain)
