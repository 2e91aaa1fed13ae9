"""`jm.linen.remat`: the same training to the last statistic, the bytes of remat written by hand, what patterns mean."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PatternError
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs
from tests.comparisons import CHECKPOINTS, assert_close, checkpoints
from tests.linen_models import DEPTH, WIDTH, Block, Net, data, loss_of, started

pytestmark = pytest.mark.core

LAYERS, STACKED_ROWS = 8, 256  # activations must outweigh the parameters for remat to show


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return Block(name="inner")(x, train), None


class Stack(nn.Module):
    by_hand: bool = False

    @nn.compact
    def __call__(self, x, *, train=True):
        layer = nn.remat(Layer, static_argnums=(2,)) if self.by_hand else Layer
        axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
        scanned = nn.scan(layer, variable_axes=axes, split_rngs=rngs, length=LAYERS, in_axes=nn.broadcast)
        return scanned(name="layers")(x, train)[0]


@pytest.fixture(scope="module")
def variables():
    return started(Net(), data())


class State(TrainState):
    stats: Any


def five_steps(apply, variables, policy="none"):
    optimizer = optax.sgd(1e-2, momentum=0.9)
    state = State.create(apply_fn=apply, params=variables["params"], tx=optimizer, stats=variables["batch_stats"])

    def train_step(state, x, key):
        loss_fn = loss_of(state.apply_fn)
        (loss, stats), grads = jm.value_and_grad(loss_fn, has_aux=True)(state.params, state.stats, x, key)
        return state.apply_gradients(grads=grads, stats=stats), loss

    step, losses = jm.jit_step(train_step, jm.StepPolicy(remat=policy, donate=())), []
    for index in range(5):
        state, loss = step(state, data(), jax.random.key(index))
        losses.append(loss)
    return {"losses": losses, "params": state.params, "stats": state.stats, "optimizer": state.opt_state}


@pytest.fixture(scope="module")
def plain_run(variables):
    return five_steps(Net().apply, variables)


@pytest.mark.parametrize(
    ("pattern", "step_policy"),
    [(r"block_\d+", "none"), (r"block_\d+", "full"), ({"block_0": "full", nn.Dense: "dots"}, "none")],
)
def test_five_steps_are_those_of_the_plain_model(plain_run, variables, pattern, step_policy):
    """Losses, parameters, optimizer and BatchNorm statistics by path, alone and under a policy of the step."""
    run = five_steps(jm.linen.remat(Net().apply, pattern), variables, step_policy)
    assert_close(run, plain_run)
    moved = plain_run["stats"]["block_0"]["BatchNorm_0"]["mean"]
    assert float(jnp.abs(moved).max()) > 0


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"block_\d+", DEPTH),
        (re.compile("BLOCK_0", re.IGNORECASE), 1),
        (r"block_.*", DEPTH),  # parent and child: the outer only
        (r".*", DEPTH + 1),
        (Block, DEPTH),
        (r"block_\d+/(up|down)", 2 * DEPTH),
        ({r"block_0": "dots", r"block_.*": "full"}, DEPTH),
    ],
)
def test_what_a_pattern_means(variables, pattern, count):
    apply = jm.linen.remat(Net().apply, pattern)
    assert len(checkpoints(lambda v, x: apply(v, x, train=False), variables, data())) == count


def test_as_many_checkpoints_as_by_hand_in_the_gradient(variables):
    def gradient(apply):
        args = (variables["params"], variables["batch_stats"], data(), jax.random.key(0))
        return checkpoints(jax.grad(loss_of(apply), has_aux=True), *args)

    class Hand(nn.Module):
        """Flags and words cannot pass `nn.remat` by hand, so the author fixes them inside."""

        @nn.compact
        def __call__(self, x, train, *, activation, scale):
            assert (train, activation) == (True, "sin")
            return nn.remat(lambda block, x: block(x, True, activation="sin", scale=scale))(Block(name="inner"), x)

    ours = gradient(jm.linen.remat(Net().apply, r"block_\d+"))
    hand_variables = jax.eval_shape(lambda x: started(Net(block=Hand), x), data())
    args = (hand_variables["params"], hand_variables["batch_stats"], data(), jax.random.key(0))
    hand = checkpoints(jax.grad(loss_of(Net(block=Hand).apply), has_aux=True), *args)
    assert len(ours) == len(hand) >= DEPTH


@pytest.mark.parametrize("policy", ["dots", "checkpoint_dots", "dots_saveable"])
def test_policy_names_and_synonyms(variables, policy):
    apply = jm.linen.remat(Net().apply, {r"block_0": policy, r"block_1": "everything_saveable", "head": "full"})
    kept = [eqn.params["policy"] for eqn in checkpoints(lambda v, x: apply(v, x, train=False), variables, data())]
    names = jax.checkpoint_policies
    assert kept == [names.dots_saveable, names.everything_saveable, None]


@pytest.fixture(scope="module")
def stacked():
    """Compiled temp bytes and the results of one gradient: plain, by hand, ours."""
    x = data(STACKED_ROWS)
    variables = started(Stack(), x)
    ours = jm.linen.remat(Stack().apply, r"layers")
    applies = {"plain": Stack().apply, "hand": Stack(by_hand=True).apply, "ours": ours}
    return {name: _compiled(loss_of(apply), variables, x) for name, apply in applies.items()}


def _compiled(loss_fn, variables, x):
    args = (variables["params"], variables["batch_stats"], x, jax.random.key(3))
    compiled = jax.jit(jax.value_and_grad(loss_fn, has_aux=True)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled(*args)


def test_scanned_layers_take_the_bytes_of_remat_by_hand(stacked):
    plain, hand, ours = (stacked[name][0] for name in ("plain", "hand", "ours"))
    assert abs(ours - hand) <= 0.01 * hand
    assert ours < 0.5 * plain


def test_scanned_layers_compute_the_same(stacked):
    assert_close(stacked["ours"][1], stacked["plain"][1])


class Looped(nn.Module):
    """A loop that its author wrote as a decorator of the layer's own method."""

    @functools.partial(nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH)(x)), None


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Looped(name="layers")(x, None)[0]


def test_checkpoint_lands_inside_the_loop():
    variables = Loop().init(jax.random.key(0), data())
    jaxpr = open_jaxpr(jax.make_jaxpr(jm.linen.remat(Loop().apply, Looped))(variables, data()))
    loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    inner = {eqn.primitive.name for body in subjaxprs(loop) for eqn in body.eqns}
    assert inner & CHECKPOINTS
    assert not inner & {"tanh", "dot_general"}


class Tower(nn.Module):
    """Modules made in setup, one shared under two uses, one passed as an argument, one called by another method."""

    def setup(self):
        self.embed = nn.Dense(WIDTH)
        self.stack = nn.Sequential([nn.Dense(WIDTH), jnp.tanh, nn.Dense(WIDTH)])
        self.user = User()

    def __call__(self, x):
        return self.user(self.embed(self.stack(self.embed(x))), self.embed, "twice", nn.Dense(3, parent=None))

    def encode(self, x):
        return self.stack(x)


class User(nn.Module):
    def setup(self):
        self.own = nn.Dense(WIDTH)

    def __call__(self, x, other, word, spare):
        assert (word, spare.features) == ("twice", 3)
        self.sow("intermediates", "seen", x.sum())
        return {"y": other(other(self.own(x))), "word": word, "none": None}

    def tail(self, x):
        return self.own(x)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [(r"embed|stack|user", 4), (r"user", 1), (r"stack/layers_\d", 2), (r"embed", 4), (nn.Sequential, 1)],
)
def test_setup_modules_shared_and_passed_ones(pattern, count):
    x, model = data(), Tower()
    variables = model.init(jax.random.key(0), x)
    apply = jm.linen.remat(model.apply, pattern)
    options = {"mutable": ["intermediates"], "capture_intermediates": True}
    plain, plain_kept = model.apply({"params": variables["params"]}, x, **options)
    got, kept = apply({"params": variables["params"]}, x, **options)
    assert got["word"] == plain["word"] == "twice"
    assert got["none"] is None
    np.testing.assert_allclose(got["y"], plain["y"], rtol=1e-6)
    plain_sums, sums = (
        jax.tree.map(lambda v: v.sum() if hasattr(v, "sum") else v, tree) for tree in (plain_kept, kept)
    )
    assert jax.tree.structure(sums) == jax.tree.structure(plain_sums)
    assert len(checkpoints(lambda v, x: apply(v, x)["y"], {"params": variables["params"]}, x)) == count


def test_other_methods_of_the_model_and_of_modules():
    x, model = data(), Tower()
    variables = model.init(jax.random.key(0), x)
    encode = jm.linen.remat(lambda v, x: model.apply(v, x, method="encode"), r"stack")
    assert len(checkpoints(encode, variables, x)) == 1
    tail = jm.linen.remat(lambda v, x: model.apply(v, x, method=lambda tower, x: tower.user.tail(x)), "user")
    with pytest.raises(PatternError, match=r"'user' would do nothing: `user` is not called itself, only its tail"):
        tail(variables, x)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(WIDTH, name="first")(x) + nn.Dense(WIDTH, name="second")(x)


def test_jitted_parts_are_traced_anew():
    """`nn.jit` keeps its traces: one made without remat must not be reused, and one made with it is met only once."""
    x, model = data(), Jitted()
    variables = model.init(jax.random.key(0), x)
    expected = model.apply(variables, x)
    ours = jm.linen.remat(model.apply, r"first|second")
    for _ in range(2):
        assert checkpoints(model.apply, variables, x) == []
        assert len(checkpoints(ours, variables, x)) == 2
        assert len(checkpoints(jm.linen.remat(model.apply, "first"), variables, x)) == 1
    whole = jax.jit(model.apply)
    jitted = jm.linen.remat(whole, r"first")
    for _ in range(2):
        assert checkpoints(whole, variables, x) == []
        assert len(checkpoints(jitted, variables, x)) == 1
        np.testing.assert_allclose(jitted(variables, x), expected, rtol=1e-6)


def test_around_a_loss_in_a_chain_and_beside_other_interceptors(variables):
    calls = []

    def watch(call, args, kwargs, context):
        calls.append(context.method_name)
        return call(*args, **kwargs)

    loss = jm.linen.remat(jm.linen.remat(loss_of(Net().apply), "block_0"), {"head": "dots"})
    args = (variables["params"], variables["batch_stats"], data(), jax.random.key(0))
    with nn.intercept_methods(watch):
        found = checkpoints(loss, *args)
    assert len(found) == 2
    ours = [name for name in calls if name != "rematerialised"]
    calls.clear()
    with nn.intercept_methods(watch):
        jax.eval_shape(loss_of(Net().apply), *args)
    assert ours == calls
