"""`jm.jit_step` of what users have already jitted, with JAX, Flax NNX and Equinox: used as it is, named, and verified."""

from __future__ import annotations

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.errors import DonationError, DonationWarning
from tests.steps import compiles_of, make_plain, new_records, plain_data


@pytest.mark.core
def test_users_own_jit_keeps_its_compiles_donation_and_static_arguments():
    @functools.partial(jax.jit, static_argnames=("train",), donate_argnames=("state",))
    def own(state, batch, train):
        return state + batch.sum() * (2 if train else 1), batch

    step = jm.jit_step(own)
    own(jnp.ones(8), jnp.ones(4), train=True)
    state = jnp.ones(8)
    cursor = registry.since(0)[1]
    with compiles_of("own") as compiled:
        result, _ = step(state, jnp.ones(4), train=True)
    assert compiled == []
    assert state.is_deleted()
    np.testing.assert_array_equal(result, np.full(8, 9.0))
    paths = [path for path, _ in new_records(cursor)[0].signature]
    assert paths == ["state", "batch", "train"], "the word of a static argument too, whose change is a compile"


@pytest.mark.core
def test_users_own_jit_tells_a_later_signature_after_it_ran():
    own = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    step = jm.jit_step(own)
    state = step(jnp.ones(8), jnp.ones(4))
    cursor = registry.since(0)[1]
    state = step(state, jnp.ones(3))
    (record,) = new_records(cursor)
    assert record.changed == ("batch: float32[4] -> float32[3]",)


@pytest.mark.core
def test_users_jit_is_traced_anew_under_a_policy():
    train_step, _ = make_plain("own_jit")
    own = jax.jit(train_step, donate_argnums=(0, 1))
    params, opt_state, batch = plain_data()
    own(*plain_data())
    step = jm.jit_step(own, jm.StepPolicy(remat="full"))
    assert "remat2" in str(step.trace(params, opt_state, batch).jaxpr)
    assert "remat2" not in str(own.trace(params, opt_state, batch).jaxpr)
    step(params, opt_state, batch)
    assert params["w"].is_deleted()


@pytest.mark.core
def test_partial_of_a_jit_is_lowered_with_the_arguments_it_holds():
    own = jax.jit(lambda scale, state, batch: state * scale + batch.sum(), donate_argnames=("state",))
    step = jm.jit_step(functools.partial(own, jnp.float32(2)))
    state = jnp.ones(8)
    cursor = registry.since(0)[1]
    np.testing.assert_array_equal(step(state, jnp.ones(4)), np.full(8, 6.0))
    assert state.is_deleted()
    assert [path for path, _ in new_records(cursor)[0].signature] == ["scale", "state", "batch"]


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))


def nnx_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"]) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def nnx_data():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param), {"x": plain_data()[2]["x"]}


@pytest.fixture(scope="module")
def two_plain_steps():
    model, optimizer, batch = nnx_data()
    step = nnx.jit(nnx_step)
    return [float(step(model, optimizer, batch)) for _ in range(2)], model.norm.mean.get_value()


@pytest.mark.core
@pytest.mark.parametrize(
    "make", [lambda f: f, nnx.jit, functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))]
)
def test_nnx_objects_change_as_without_the_library(make, two_plain_steps):
    wanted, wanted_mean = two_plain_steps
    model, optimizer, batch = nnx_data()
    kernel = model.inner.kernel.get_value()
    step = jm.jit_step(make(nnx_step))
    cursor = registry.since(0)[1]
    with compiles_of("nnx_step") as compiled:
        got = [float(step(model, optimizer, batch)) for _ in range(2)]
    assert len(compiled) == 1
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(model.norm.mean.get_value(), wanted_mean, rtol=1e-6)
    assert kernel.is_deleted() == (make is not nnx.jit)
    assert ("model.inner.kernel", "float32[8,16]") in new_records(cursor)[0].signature


@pytest.mark.core
def test_nnx_cached_partial_runs_as_it_is():
    model, optimizer, batch = nnx_data()
    jitted = nnx.jit(nnx_step, donate_argnames=("model", "optimizer"))
    step = jm.jit_step(nnx.cached_partial(jitted, model, optimizer))
    with compiles_of("nnx_step") as compiled:
        first, second = float(step(batch)), float(step(batch))
    assert second != first
    assert len(compiled) == 1


@pytest.mark.core
def test_nnx_step_under_a_policy_meets_a_shorter_batch(two_plain_steps):
    def policy_step(model, optimizer, batch):
        loss, grads = jm.nnx.value_and_grad(lambda m: ((m(batch["x"]) - 1) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    model, optimizer, batch = nnx_data()
    short = {"x": batch["x"][:5]}
    step = jm.jit_step(policy_step, jm.StepPolicy(remat="full"))
    cursor = registry.since(0)[1]
    with compiles_of("policy_step") as compiled:
        got = [float(step(model, optimizer, b)) for b in (batch, batch, short)]
    np.testing.assert_allclose(got[:2], two_plain_steps[0], rtol=1e-6)
    assert len(compiled) == 2
    assert new_records(cursor)[1].changed == ("batch['x']: float32[8,8] -> float32[5,8]",)


@pytest.mark.core
def test_equinox_leaves_are_named_and_kept_donated():
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit(donate="all-except-first")
    def eqx_step(batch, model, opt_state):
        grads = eqx.filter_grad(lambda m: (jax.vmap(m)(batch) ** 2).mean())(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    step = jm.jit_step(eqx_step)
    cursor = registry.since(0)[1]
    with compiles_of("eqx_step") as compiled:
        new_model, opt_state = step(jnp.ones((3, 4)), model, opt_state)
        step(jnp.ones((3, 4)), new_model, opt_state)
    assert len(compiled) == 1
    assert model.layers[0].weight.is_deleted()
    signature = dict(new_records(cursor)[0].signature)
    assert signature["model.layers[0].weight"] == "float32[8,4]"
    assert signature["batch"] == "float32[3,4]"


def test_settings_that_only_the_users_jit_can_keep_are_refused():
    with pytest.raises(DonationError, match=re.escape("Write donate_argnames=('s',) in the jax.jit of <lambda>, or")):
        jm.jit_step(jax.jit(lambda s: s), donate_argnames="s")
    with pytest.raises(DonationError, match="state_shardings was given for <lambda>, which is already jitted"):
        jm.jit_step(jax.jit(lambda s: s), state_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    step = jm.jit_step(jax.jit(lambda s: s), jm.StepPolicy(donate=("s",)))
    with pytest.raises(DonationError, match="is already jitted and does not donate s"):
        step(jnp.ones(3))
    step = jm.jit_step(jax.jit(lambda s: s * 2), jm.StepPolicy(donate="auto"))
    with pytest.warns(DonationWarning, match="returns s updated without donating"):
        step(jnp.ones(30))
    step(jnp.ones(30))


@pytest.mark.core
@pytest.mark.parametrize("form", ["pair", "words", "arguments", "bare"])
def test_parameters_are_known_by_the_moments_that_an_optimizer_keeps_of_them(form):
    optimizer = optax.adamw(1e-3)
    tree = jnp.ones((8, 8)) if form == "bare" else [{"a": jnp.ones((8, 8)), "b": jnp.ones(8)} for _ in range(2)]
    moments, batch = optimizer.init(tree), jnp.ones((4, 8))

    def updated(p, o, x):
        gradients = jm.grad(lambda p: sum(((x @ leaf) ** 2).mean() for leaf in jax.tree.leaves(p)))(p)
        changes, o = optimizer.update(gradients, o, p)
        return optax.apply_updates(p, changes), o

    def of_pair(state, x):
        return updated(*state, x)

    def of_words(state, x):
        p, o = updated(state["p"], state["o"], x)
        return {"p": p, "o": o, "mean": state["mean"], "gain": state["gain"]}

    step, args = {
        "pair": (of_pair, ((tree, moments), batch)),
        "words": (of_words, ({"p": tree, "o": moments, "mean": jnp.ones(8), "gain": 1.0}, batch)),
        "arguments": (updated, (tree, moments, batch)),
        "bare": (updated, (tree, moments, batch)),
    }[form]
    leaves = jm.jit_step(step).traced(args, {}).leaves
    kinds = {leaf.path: leaf.kind for leaf in leaves}
    count = len(jax.tree.leaves(tree))
    assert list(kinds.values()).count("parameters") == count
    assert list(kinds.values()).count("optimizer state") == 2 * count + 1
    assert kinds["x"] == "batch"
    assert kinds.get("state['mean']", "state") == kinds.get("state['gain']", "state") == "state"


def of_mode(weights, mode=None, batch=None):
    gradients = jm.grad(lambda weights: jnp.mean(jnp.tanh(batch @ weights) ** 2))(weights)
    return weights - (0.1 if mode is None else 0.2) * gradients


@pytest.mark.core
@pytest.mark.parametrize("words", [(None, "train"), ("train", None), (None, None, True), (None, "train", None, "test")])
@pytest.mark.parametrize(
    "make",
    [
        jm.jit_step,
        lambda step: jm.jit_step(jax.jit(step, static_argnames="mode", donate_argnums=0)),
        lambda step: jm.jit_step(nnx.jit(step, static_argnums=1)),
        lambda step: jm.jit_step(eqx.filter_jit(step)),
        lambda step: jm.jit_step(eqx.filter_jit(step), "donate"),
    ],
    ids=["plain", "jax.jit", "nnx.jit", "filter_jit", "filter_jit that donates"],
)
def test_a_static_argument_may_be_none_at_first_and_a_word_later(make, words):
    asked, called, batch = make(of_mode), make(of_mode), jnp.ones((16, 8))
    for word in words:
        memory = jm.step_memory(asked, jnp.ones((8, 8)), word, batch)
        assert [(row.name, row.bytes) for row in memory.arguments] == [("weights", 256), ("batch", 512)]
        expected = of_mode(jnp.ones((8, 8)), word, batch)
        for step in (asked, called):  # one that was asked about between its calls, and one that was not
            np.testing.assert_allclose(step(jnp.ones((8, 8)), word, batch), expected, rtol=1e-6)


@pytest.mark.core
def test_what_a_traced_step_raises_of_types_is_its_own_error():
    step = jm.jit_step(of_mode)
    step(jnp.ones((8, 8)), None, jnp.ones((16, 8)))
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        step(jnp.ones((8, 8)), None, jnp.ones((16, 4)))
