"""What an argument holds is told by what the step does with it, whatever it is called."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, STATE, roles_of

W = {"a": jnp.ones((8, 8)), "b": jnp.ones(8)}
X = jnp.ones((4, 8))


def loss(w, x):
    return (jnp.tanh(x @ w["a"] + w["b"]) ** 2).mean()


def kinds(step, *args):
    """The kind of each array and whether it is updated, in order."""
    return [None if role is None else (role.kind, role.updated) for role in roles_of(jax.jit(step).trace(*args).jaxpr)]


def descent(net, x):
    value, g = jax.value_and_grad(loss)(net, x)
    return jax.tree.map(lambda p, d: p - 0.1 * d, net, g), value


def optimised(optimizer):
    def step(q, r, x):
        g = jax.grad(loss)(q, x)
        updates, r = optimizer.update(g, r, q)
        return optax.apply_updates(q, updates), r

    return step, optimizer.init(W)


TRAINED, MOMENT, OTHER_STATE = (PARAMETERS, True), (OPTIMIZER, True), (STATE, True)


@pytest.mark.core
def test_a_differentiated_argument_that_is_returned_updated_is_parameters():
    assert kinds(descent, W, X) == [TRAINED, TRAINED, None]


@pytest.mark.core
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.adam(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2),
    ],
    ids=["adamw", "momentum", "lion", "decayed", "multi_steps"],
)
def test_moments_are_the_optimizers_and_counters_state(optimizer):
    step, state = optimised(optimizer)
    found = kinds(step, W, state, X)
    assert found[:2] == [TRAINED, TRAINED]
    for leaf, role in zip(jax.tree.leaves(state), found[2:-1], strict=True):
        assert role == MOMENT if leaf.ndim else role in (OTHER_STATE, None)
    assert found[-1] is None


@pytest.mark.core
@pytest.mark.parametrize("names", [("params", "opt_state"), ("q", "r")])
def test_a_weight_that_the_loss_does_not_use_is_a_parameter_like_the_others(names):
    """No gradient reaches it, nor its moments: their updates are made of themselves alone."""
    optimizer, weights = optax.adamw(1e-3), {**W, "unused": jnp.ones(3)}

    def step(q, r, x):
        updates, r = optimizer.update(jax.grad(loss)(q, x), r, q)
        return optax.apply_updates(q, updates), r

    named = {"step": step}
    exec(f"def train({names[0]}, {names[1]}, x): return step({names[0]}, {names[1]}, x)", named)  # noqa: S102
    rows = {row.name: row for row in jm.step_memory(named["train"], weights, optimizer.init(weights), X).arguments}
    assert rows[names[0]].kind == PARAMETERS
    assert (rows[names[0]].leaves, rows[names[0]].bytes) == (3, 4 * (64 + 8 + 3))
    assert rows[names[1]].kind == OPTIMIZER
    assert rows[names[1]].leaves in (6, 7), "the counter may be a row of its own"


@pytest.mark.core
def test_statistics_averages_frozen_weights_and_keys_are_none_of_them():
    def step(agent, stats, average, key, data):
        frozen, x = data

        def inner(agent):
            h = x @ frozen
            mean = h.mean(0)
            return loss(agent, h * jax.random.bernoulli(key, 0.9, h.shape)), 0.9 * stats + 0.1 * mean

        g, stats = jax.grad(inner, has_aux=True)(agent)
        agent = jax.tree.map(lambda p, d: p - 0.1 * d, agent, g)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, agent)
        return agent, stats, average, jax.random.split(key)[0]

    found = kinds(step, W, jnp.ones(8), W, jax.random.PRNGKey(0), (jnp.ones((8, 8)), X))
    assert found == [TRAINED, TRAINED, OTHER_STATE, MOMENT, MOMENT, None, None, None]


@pytest.mark.core
def test_many_steps_in_one_loop_are_as_one_step():
    optimizer = optax.adam(1e-3)

    def body(carry, x):
        w, o = carry
        u, o = optimizer.update(jax.grad(loss)(w, x), o, w)
        return (optax.apply_updates(w, u), o), None

    found = kinds(lambda carry, xs: jax.lax.scan(body, carry, xs)[0], (W, optimizer.init(W)), jnp.stack([X] * 3))
    assert found == [TRAINED, TRAINED, OTHER_STATE, *[MOMENT] * 4, None]


@pytest.mark.core
def test_a_gradient_that_is_returned_tells_what_was_differentiated():
    assert kinds(jax.value_and_grad(loss), W, X) == [(PARAMETERS, False), (PARAMETERS, False), None]


@pytest.mark.core
def test_the_gradient_of_an_integer_may_pass_through_an_equation():
    def step(w, count, x):
        g = jax.grad(lambda w, count: loss(w, x) * (count > 0), argnums=(0, 1), allow_int=True)(w, count)
        g, _ = jax.lax.optimization_barrier(g)  # of float0, which no number can be compared with
        return jax.tree.map(lambda p, d: p - 0.1 * d, w, g)

    assert kinds(step, W, 3, X) == [TRAINED, TRAINED, None, None]


@pytest.mark.core
def test_weights_that_are_cast_or_read_layer_by_layer_are_parameters_too():
    def step(p, x):
        cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)

        def deep(c):
            return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype(jnp.bfloat16), c)[0] ** 2).mean()

        g = jax.grad(deep)(cast)
        return p - 0.1 * g.astype(p.dtype)

    assert kinds(step, jnp.ones((3, 8, 8)), X) == [TRAINED, None]


def test_a_learning_rate_is_no_parameter_of_one_number():
    def step(b, lr, x):
        return b - lr * jax.grad(lambda b: ((x + b) ** 2).sum())(b)

    assert kinds(step, 1.0, 0.1, X) == [TRAINED, None, None]


@pytest.mark.core
@pytest.mark.parametrize("name", ["a", "b", "w", "net", "agent", "x", "batch"])
def test_a_plan_counts_state_of_any_name(name):
    def step(*args):
        return descent(*args)

    both = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in (name, "rows")]
    step.__signature__ = inspect.Signature(both)
    plan = jm.plan(step, W, X, budget="500B", progress=False, search={"remat": False})
    assert plan.record.least_bytes == (64 + 8) * 4
    row = next(row for row in jm.step_memory(step, W, X).arguments if row.name == name)
    assert row.kind == PARAMETERS


@pytest.mark.core
def test_a_batch_that_is_donated_is_no_state():
    step = jax.jit(descent, donate_argnames=("net", "x"))
    plan = jm.plan(step, W, X, budget="500B", progress=False, search={"remat": False})
    assert plan.record.least_bytes == (64 + 8) * 4


# --- names of static arguments ---------------------------------------------------------------------------------------


class Config:
    width = 8


def many(w, x, config, smoothing, key, *rest, flag=1.0, **options):
    del config, flag

    def inner(w):
        return loss(w, x) + smoothing + key.sum() + sum(each.sum() for each in (*rest, *options.values()))

    return jax.tree.map(lambda p, d: p - 0.1 * d, w, jax.grad(inner)(w))


class Trainer:
    @functools.partial(jax.jit, static_argnums=(0, 2))
    def step(self, w, rate, x):
        return jax.tree.map(lambda p, d: p - rate * d, w, jax.grad(loss)(w, x))


KEY = jnp.ones(2)
BY_NUMBER = jax.jit(many, static_argnums=(2, 3))
BY_NAME = jax.jit(many, static_argnames=("config", "smoothing"))
WITH_FLAG = jax.jit(many, static_argnums=(2, 3), static_argnames=("flag",))
USUAL = (W, X, "cfg", 0.0, KEY)
CALLS = {
    "by number": (BY_NUMBER, USUAL, {}, "w x key"),
    "by name": (BY_NAME, (W, X), {"config": Config(), "smoothing": 0.0, "key": KEY}, "w x key"),
    "none": (jax.jit(many, static_argnums=(2,)), (W, X, None, 0.0, KEY), {}, "w x smoothing key"),
    "a flag": (WITH_FLAG, (W, X, 1, 2.0, KEY), {"flag": 0.5}, "w x key"),
    "the rest": (BY_NUMBER, (*USUAL, KEY), {"z": KEY}, "w x key args[5] z"),
    "a partial": (functools.partial(BY_NUMBER, W), USUAL[1:], {}, "w x key"),
    "a jitted partial": (jax.jit(functools.partial(many, config="c", smoothing=0.5)), (W, X), {"key": KEY}, "w x key"),
    "never read": (jax.jit(many, static_argnums=(2, 3), keep_unused=True), USUAL, {"flag": 1.0}, "w x key flag"),
    "a method": (Trainer().step, (W, 0.5, X), {}, "w x"),
}


@pytest.mark.core
@pytest.mark.parametrize("call", CALLS)
def test_static_values_never_take_an_arrays_name(call):
    step, args, kwargs, names = CALLS[call]
    memory = jm.step_memory(step, *args, **kwargs)
    assert [row.name for row in memory.arguments] == names.split()
    sizes = {row.name: row.bytes for row in memory.arguments}
    assert sizes["x"] == 4 * 8 * 4
    assert sizes.get("key", 8) == 8
    again = jm.step_memory(jm.jit_step(step), *args, **kwargs)
    assert [row.name for row in again.arguments] == names.split()
