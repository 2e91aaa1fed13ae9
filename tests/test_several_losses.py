"""A step that differentiates several losses: each obeys what the policy can do for it, and some loss obeys each part of it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import jaxmem_callbacks as jm
from tests.comparisons import assert_close, checkpoints

pytestmark = pytest.mark.core

FULL = jm.StepPolicy(remat="full")
WEIGHTS = {f"w{i}": jax.random.normal(jax.random.key(i), (64, 64)) * 0.3 for i in range(4)}
TABLE = jax.random.normal(jax.random.key(5), (64, 512)) * 0.3
X = jax.random.normal(jax.random.key(9), (256, 64))
LABELS = jax.random.randint(jax.random.key(8), (256,), 0, 512)


def mlp(weights: Any, x: Any) -> Any:
    for name in sorted(weights):
        x = checkpoint_name(jnp.tanh(x @ weights[name]), "layer")
    return jnp.mean(x**2)


def head(table: Any, x: Any, labels: Any) -> Any:
    logits = x @ table
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def step(value_and_grad: Any) -> Any:
    """As SAC has it: a model, a table, and a temperature in whose loss nothing is kept."""

    def train(weights: Any, table: Any, x: Any, labels: Any) -> Any:
        model = value_and_grad(mlp)(weights, x)
        words = value_and_grad(head)(table, x, labels)
        return model, words, value_and_grad(lambda temperature: temperature)(jnp.float32(0.2))

    return train


ARGS = (WEIGHTS, TABLE, X, LABELS)


@pytest.mark.parametrize(
    ("policy", "notes"),
    [
        pytest.param({"remat": "full"}, ["<lambda> stays without checkpoints"], id="nothing kept"),
        pytest.param(
            {"remat": "full", "save": ("layer",)},
            [
                "head stays without checkpoints: The loss has no value named 'layer'",
                "<lambda> stays without checkpoints",
            ],
            id="a name",
        ),
        pytest.param(
            {"remat": "full", "segments": 2}, ["<lambda> stays without checkpoints"], id="a number of segments"
        ),
        pytest.param({"chunks": 4}, ["<lambda> stays without chunks at 'head'"], id="chunks"),
        pytest.param(
            {"remat": "full", "chunks": 4},
            [
                "head stays without checkpoints",
                "<lambda> stays without chunks at 'head'",
                "<lambda> stays without checkpoints",
            ],
            id="chunks and checkpoints",
        ),
    ],
)
def test_each_loss_obeys_what_can_be_done_for_it(policy: Any, notes: list[str]) -> None:
    made = jm.jit_step(step(jm.value_and_grad), jm.StepPolicy(**policy), donate_argnames=())
    assert_close(made(*ARGS), jax.jit(step(jax.value_and_grad))(*ARGS))
    assert [f"The gradient of {note}" for note in notes] == [
        note[: len("The gradient of ") + len(start)] for note, start in zip(made.notes, notes, strict=True)
    ]
    under = jm.apply_policy(step(jm.value_and_grad), jm.StepPolicy(**policy))
    assert checkpoints(under, *ARGS)


@pytest.mark.parametrize("gradients", ["own", "all"])
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"remat": "full", "save": ("layers",)}, "no value named 'layers'"),
        ({"remat": "full", "segments": 2000}, "segments=2000"),
        ({"remat": "full", "chunks": {"nowhere": 2}}, "nowhere"),
    ],
)
def test_a_part_that_no_loss_obeys_is_an_error(policy: Any, words: str, gradients: Any) -> None:
    with pytest.raises(jm.PolicyError, match=words):
        jm.jit_step(step(jm.value_and_grad), jm.StepPolicy(**policy), gradients=gradients)(*ARGS)


def test_an_effect_is_an_error_at_once_whatever_else_obeys() -> None:
    met = []

    def reporting(weights: Any, x: Any) -> Any:
        io_callback(met.append, None, x.sum(), ordered=True)
        return mlp(weights, x)

    def train(weights: Any, x: Any) -> Any:
        return jm.value_and_grad(mlp)(weights, x), jm.value_and_grad(reporting)(weights, x)

    with pytest.raises(jm.LossRefusedError, match="io_callback"):
        jm.apply_policy(train, jm.StepPolicy(remat="full"))(WEIGHTS, X)
    assert not met


def test_a_plan_of_it_tries_policies() -> None:
    plan = jm.plan(step(jm.value_and_grad), *ARGS)
    assert {candidate.policy.remat for candidate in plan.candidates} == {"none", "full"}
    assert any(note.startswith("The gradient of <lambda> stays without checkpoints") for note in plan.record.notes)


@pytest.mark.parametrize("gradients", ["own", "all"])
def test_microbatches_and_the_gradients_of_frameworks_follow_the_same_rule(gradients: Any) -> None:
    """In microbatches, and where Flax NNX or Equinox take the gradient."""

    def bias(model: Any, x: Any) -> Any:
        return jnp.sum(model.b) + 0.0 * jnp.mean(x)

    def deep(model: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ model.a) @ model.a) ** 2) + jnp.sum(model.b)

    def train(value_and_grad: Any) -> Any:
        return lambda model, x: (value_and_grad(deep)(model, x), value_and_grad(bias)(model, x))

    class Nnx(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Param(WEIGHTS["w0"]), nnx.Param(jnp.ones(3))

    class Eqx(eqx.Module):
        a: Any
        b: Any

    ours, theirs = (jm.nnx.value_and_grad, jm.eqx.value_and_grad), (nnx.value_and_grad, eqx.filter_value_and_grad)
    models = Nnx(), Eqx(WEIGHTS["w0"], jnp.ones(3))
    for model, own, plain in zip(models, ours, theirs, strict=True):
        made = jm.apply_policy(train(own if gradients == "own" else plain), FULL, gradients=gradients)
        assert_close(jax.tree.leaves(made(model, X)), jax.tree.leaves(train(plain)(model, X)))
    parts = jm.StepPolicy(remat="full", microbatches=2)

    def corner(weights: Any, x: Any) -> Any:  # noqa: ARG001 - a batch that it does not need
        return weights["w0"][0, 0]

    def both(weights: Any, x: Any) -> Any:
        return jm.value_and_grad(mlp)(weights, x), jm.value_and_grad(corner)(weights, x)

    losses = jm.jit_step(both, parts, donate_argnames=(), gradients=gradients)
    (value, _), (first, gradient) = losses(WEIGHTS, X)
    assert_close((value, first), (mlp(WEIGHTS, X), corner(WEIGHTS, X)))
    assert_close(gradient, jax.grad(corner)(WEIGHTS, X))
    assert [note[: len("The gradient of corner stays without")] for note in losses.notes] == [
        "The gradient of corner stays without"
    ]
