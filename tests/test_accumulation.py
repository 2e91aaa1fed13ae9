"""`StepPolicy(microbatches=n)`: the same numbers as the whole batch, in less memory, with everything else a step has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.accumulation.batch import shared_key
from tests.accumulated_losses import (
    FOUR,
    KEY,
    MASK,
    PLAIN,
    ROWS,
    WEIGHTS,
    WIDTH,
    X,
    by_dict,
    by_keyword,
    copy,
    errors,
    gradients_of,
    masked_loss,
    mean_loss,
    plain_step,
    unnamed,
    weighted_loss,
    with_penalty,
)
from tests.comparisons import assert_close, checkpoints
from tests.steps import compiles_of

pytestmark = pytest.mark.core


def by_shape(params, x, scale):
    """Weights in which no row has a part, and which add up all the same: of shapes, of an argument, in few bits."""
    found = errors(params, x)
    rows = jnp.bfloat16(x.shape[0])
    aux = {"shapes": jm.weighted((found > 0).sum(), x.size), "bits": jm.weighted(found.sum().astype(rows.dtype), rows)}
    return jm.weighted(found.sum(), scale * x.shape[0]), {**aux, "fixed": jm.weighted(jnp.int32(3), 4)}


@jax.jit
def weighted_with_aux(*args):
    (value, aux), gradients = jm.value_and_grad(by_shape, has_aux=True)(*args)
    return value, (aux["shapes"], aux["fixed"], aux["bits"].astype(jnp.float32).round(1)), gradients


CALLS = {
    "mean": (mean_loss, (WEIGHTS, X), {}),
    "weighted": (weighted_loss, (WEIGHTS, X, MASK), {}),
    "whole numbers as weights": (weighted_loss, (WEIGHTS, X, MASK.astype(jnp.int32)), {}),
    "dictionary with a scalar": (by_dict, (WEIGHTS, {"x": X, "scale": jnp.float32(2)}), {}),
    "keyword": (by_keyword, (WEIGHTS,), {"x": X}),
    "gradient inside": (with_penalty, (WEIGHTS, X), {}),
    "no names": (unnamed, (WEIGHTS, X, X), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_numbers_are_those_of_the_whole_batch(name):
    loss, args, kwargs = CALLS[name]
    assert_close(gradients_of(loss, *args, **kwargs), gradients_of(loss, *args, policy=PLAIN, **kwargs))


def test_a_weight_made_of_shapes_is_one_that_adds_up():
    args = (WEIGHTS, X, jnp.float32(2))
    assert_close(jm.jit_step(weighted_with_aux, FOUR)(*args), weighted_with_aux(*args))

    @jax.jit
    def in_a_loop(args):  # where a comparison is impossible
        return jax.lax.scan(lambda _, scale: (None, weighted_with_aux(*args[:2], scale)[2]), None, jnp.ones(2))[1]

    assert_close(jm.jit_step(in_a_loop, FOUR)(args), in_a_loop(args))


@pytest.mark.parametrize(
    "policy", [PLAIN, FOUR, jm.StepPolicy(microbatches=4, remat="full")], ids=["plain", "four", "remat"]
)
def test_weak_types_are_those_of_jax(policy):
    """A parameter from a Python number: a strong gradient would make it another type, and the step compile twice."""
    params = {"weak": jnp.asarray(1.5), "strong": jnp.float32(2)}

    def tanhs(params, x):
        return jnp.tanh(jnp.tanh(params["weak"] * x) * params["strong"])

    def weak(params, x):
        return params["weak"] ** 2, (params["weak"] * 2.0, tanhs(params, x).mean())

    def strong(params, x):
        value, (_, aux) = weak(params, x)
        return value * (params["strong"] * x**2).mean(), aux

    def by_weight(params, x):
        return jm.weighted(tanhs(params, x).sum(), x.size), params["weak"] * 1.0

    def step(function, losses):
        return jax.jit(lambda params, x: [function(loss, has_aux=True)(params, x) for loss in losses])

    found = jm.jit_step(step(jm.value_and_grad, [weak, strong, by_weight]), policy)(params, X)
    expected = step(jax.value_and_grad, [weak, strong, lambda *args: (by_weight(*args)[0].total, by_weight(*args)[1])])
    types = [[(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)] for tree in (found, expected(params, X))]
    assert types[0] == types[1]
    assert {is_weak for _, is_weak in types[0]} == {True, False}


def test_a_pure_function_checks_where_its_gradient_is_taken():
    """`jm.apply_policy` without a jit, NumPy's arrays as they come from a loader: compared once, then remembered."""
    step = jm.apply_policy(lambda x: jm.value_and_grad(mean_loss)(WEIGHTS, x), FOUR)
    with compiles_of("differences") as checks:
        ours = step(np.asarray(X))
        step(np.asarray(X))
    assert len(checks) == 1
    assert_close(ours, gradients_of(mean_loss, WEIGHTS, X, policy=PLAIN))


@settings(deadline=None, max_examples=6)
@given(
    count=st.integers(2, 6),
    each=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    remat=st.sampled_from(["none", "full"]),
)
def test_weighted_losses_are_exact_for_every_size(count, each, seed, remat):
    policy = jm.StepPolicy(microbatches=count, remat=remat)
    with jax.enable_x64(
        True
    ):  # a single row whose error is almost 0 has a gradient of float32's rounding, policy or not
        keys = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(keys[0], (count * each, WIDTH))
        mask = jax.random.uniform(keys[1], (count * each,)) * jax.random.bernoulli(keys[2], 0.7, (count * each,))
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), WEIGHTS)
        ours = gradients_of(weighted_loss, weights, x, mask, policy=policy)
        plain = gradients_of(weighted_loss, weights, x, mask, policy=PLAIN)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(ours))
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_weighted_without_a_policy_is_the_quotient():
    both = jax.jit(lambda *args: (jm.value_and_grad(weighted_loss)(*args), jax.value_and_grad(masked_loss)(*args)))
    assert_close(*both(WEIGHTS, X, MASK))

    def with_aux(params, x):
        return jm.weighted(errors(params, x).sum(), x.shape[0]), {"rate": jm.weighted(jnp.int32(3), 4), "name": "run"}

    gradients, aux = jm.grad(with_aux, has_aux=True)(WEIGHTS, X)
    assert_close(gradients, jax.grad(lambda params: errors(params, X).mean())(WEIGHTS))
    assert aux == {"rate": 0.75, "name": "run"}
    nothing = jm.value_and_grad(weighted_loss)(WEIGHTS, X, 0 * MASK)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(nothing))


def test_aux_is_joined_exactly():
    def loss(params, x, y):
        found = errors(params, x)
        aux = {"mean": found.mean(), "rows": found, "argmax": x.argmax(-1), "rate": jm.weighted((y > 0).sum(), y.size)}
        return found.mean(), {**aux, "name": "run", "no": None, "fixed": 0.5}

    static = {}

    def both(policy):
        @jax.jit
        def step(params, x, y):
            (value, aux), gradients = jm.value_and_grad(loss, has_aux=True)(params, x, y)
            static.update({name: aux.pop(name) for name in ("name", "no", "fixed")})
            return value, aux, gradients

        return jm.jit_step(step, policy)(WEIGHTS, X, MASK)

    ours, plain = both(FOUR), both(PLAIN)
    assert static == {"name": "run", "no": None, "fixed": 0.5}
    assert {name: leaf.dtype for name, leaf in ours[1].items()} == {name: leaf.dtype for name, leaf in plain[1].items()}
    assert_close(ours, plain)


@pytest.mark.parametrize(
    "key", [KEY, jax.random.PRNGKey(0), jax.random.split(KEY, ROWS)], ids=["typed", "old", "by row"]
)
def test_each_microbatch_draws_noise_of_its_own(key):
    """Whatever the key's form: one entry a row comes back, and no two rows share their draw."""

    def loss(params, x, key):
        by_row = key.shape == (x.shape[0],)
        drawn = jax.vmap(jax.random.uniform)(key) if by_row else jax.random.uniform(key, (x.shape[0],))
        return jm.weighted((errors(params, x) * drawn).sum(), x.shape[0]), drawn

    batch = ("x", "key") if key.shape == (ROWS,) else ("x",)
    both = jm.value_and_grad(loss, has_aux=True, batch_argnames=batch)
    (_, drawn), _ = jm.jit_step(jax.jit(lambda x, key: both(WEIGHTS, x, key)), FOUR)(X, key)
    assert len(np.unique(np.asarray(drawn))) == ROWS


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_noise_for_comparisons_belongs_to_rows(shape):
    """Rows 1, 5, 9, ... of 20 draw what they draw in the whole, by any way from the key to the numbers."""
    whole = shared_key(KEY, first=0, stride=1, rows=20)
    part = shared_key(KEY, first=1, stride=4, rows=5)

    def drawn(key, rows):
        key, other = jax.random.split(jax.random.fold_in(key, 7))
        several = jax.random.split(other, rows)
        return (
            jax.random.normal(key, (rows, *shape)),
            jax.random.bernoulli(key, 0.3, (rows, *shape)),
            jax.random.randint(other, (rows, *shape), 0, 99),
            jax.vmap(lambda one: jax.random.uniform(one, shape))(several),
        )

    drawn = jax.jit(drawn, static_argnums=1)
    for ours, theirs in zip(drawn(part, 5), drawn(whole, 20), strict=True):
        np.testing.assert_array_equal(ours, theirs[1::4])
        assert len(np.unique(np.asarray(theirs, np.float64))) > 1
    np.testing.assert_array_equal(jax.random.uniform(part, (7,)), jax.random.uniform(whole, (7,)))  # noise of no row


def test_a_stochastic_mean_is_admitted_by_the_noise_of_its_rows():
    def loss(params, x, dropout_key):
        for layer, key in enumerate(jax.random.split(dropout_key)):
            x = jnp.tanh(x @ params["a"]) * jax.random.bernoulli(jax.random.fold_in(key, layer), 0.8, x.shape)
        return (x**2).mean()

    value, gradients = gradients_of(loss, WEIGHTS, X, KEY)
    assert np.isfinite(value)
    assert float(jnp.abs(gradients["a"]).max()) > 0


def test_half_precision_gradients_are_summed_in_float32():
    def loss(w, x):
        return (w * x).mean()

    value, gradient = gradients_of(
        loss, jnp.bfloat16(1), jnp.ones((512,), jnp.bfloat16), policy=jm.StepPolicy(microbatches=512)
    )
    assert gradient.dtype == value.dtype == jnp.bfloat16
    assert float(gradient) == 1.0  # in bfloat16 a sum of ones stops at 256


def test_remat_applies_inside_each_microbatch():
    policy = jm.StepPolicy(microbatches=4, remat="full")
    assert_close(jm.jit_step(plain_step, policy)(copy(WEIGHTS), X), jax.jit(plain_step)(WEIGHTS, X))
    loops = [e for e in jax.make_jaxpr(step_of_weighted(policy))(WEIGHTS, X).eqns if e.primitive.name == "scan"]
    assert len(loops) == 1
    assert checkpoints(step_of_weighted(policy), WEIGHTS, X)
    assert not checkpoints(step_of_weighted(FOUR), WEIGHTS, X)


def step_of_weighted(policy):
    return jm.apply_policy(lambda params, x: jm.grad(weighted_loss)(params, x, x[:, 0] ** 2), policy)


def test_compiled_bytes_fall_with_the_microbatch():
    layers = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w) + x
        return (x**2).mean()

    def step(weights, x):
        return jm.grad(loss)(weights, x)

    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    needed = {
        n: jm.step_memory(jm.jit_step(step, jm.StepPolicy(microbatches=n)), layers, x).temp_bytes for n in (1, 4, 16)
    }
    assert needed[4] < 0.35 * needed[1], needed
    assert needed[16] < 0.35 * needed[4], needed


def test_a_step_is_checked_once_a_signature_and_keeps_its_donation():
    step = jm.jit_step(plain_step, FOUR)
    state = copy(WEIGHTS)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WEIGHTS, X))
    assert jm.step_memory(step, *abstract).alias_bytes > 0
    assert step.unchecked
    with compiles_of("jaxmem_accumulation_check") as checks:
        before = state
        for _ in range(3):
            state, value = step(state, X)
        assert before["a"].is_deleted()
        assert (len(checks), step.unchecked) == (1, False)
        step(state, X[:16])
    assert len(checks) == 2
    expected = copy(WEIGHTS)
    for _ in range(3):
        expected, plain_value = jax.jit(plain_step)(expected, X)
    assert_close(value, plain_value)


def test_weighted_losses_need_no_check():
    step = jm.jit_step(step_gradients_weighted, FOUR)
    with compiles_of("jaxmem_accumulation_check") as checks:
        assert_close(step(WEIGHTS, X, MASK)[0], weighted_value())
    assert (checks, step.unchecked) == ([], False)


def step_gradients_weighted(params, x, mask):
    value, gradients = jm.value_and_grad(weighted_loss)(params, x, mask)
    return value, gradients["a"].sum()


def weighted_value():
    return jax.jit(masked_loss)(WEIGHTS, X, MASK)


@pytest.mark.parametrize("jitted", [jax.jit, lambda f: f], ids=["own jit", "plain"])
def test_a_second_signature_is_checked_before_it_runs(jitted):
    def by_form(params, x):
        if x.ndim == X.ndim:
            return mean_loss(params, x)
        return masked_loss(params, x[:, 0], jnp.exp(x[:, 0, 0]))

    step = jm.jit_step(jitted(lambda params, x: jm.value_and_grad(by_form)(params, x)[0]), FOUR)
    expected = jax.jit(mean_loss)(WEIGHTS, X)
    assert_close(step(WEIGHTS, X), expected)
    with pytest.raises(
        ValueError, match=r"would change the numbers of by_form: its accumulated gradient differs by \d"
    ):
        step(WEIGHTS, X[:, None])
    assert_close(step(WEIGHTS, X), expected)


def test_lowering_with_real_arrays_checks_and_with_shapes_says_unchecked():
    step = jm.jit_step(lambda params, x, mask: jm.value_and_grad(masked_loss)(params, x, mask)[0], FOUR)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WEIGHTS, X, MASK))
    step.lower(*shapes)
    assert step.unchecked
    with pytest.raises(ValueError, match="would change the numbers of masked_loss"):
        step.lower(WEIGHTS, X, MASK)
    mean = jm.jit_step(plain_step, FOUR)
    mean.lower(WEIGHTS, X)
    assert not mean.unchecked


def test_the_check_makes_no_transfer_that_a_guard_of_the_users_forbids():
    step = jm.jit_step(plain_step, FOUR, donate_argnames=())
    with jax.transfer_guard("disallow"):
        found = step(WEIGHTS, X)
    assert_close(found, plain_step(WEIGHTS, X))


@pytest.mark.parametrize(
    "policy",
    [FOUR, jm.StepPolicy(remat="full"), jm.StepPolicy(remat="full", keep=0.5)],
    ids=["microbatches", "full", "kept"],
)
def test_no_tracer_outlives_its_trace(policy):
    with jax.checking_leaks():
        found = jm.jit_step(plain_step, policy, donate_argnames=())(WEIGHTS, X)
    assert_close(found, plain_step(WEIGHTS, X))


def test_two_gradients_and_an_inner_jit_are_checked_each():
    def step(params, x):
        value, gradients = jax.jit(jm.value_and_grad(mean_loss))(params, x)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return value, jm.value_and_grad(by_keyword)(moved, x=x)[0]

    assert_close(jm.jit_step(step, FOUR)(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))
