"""`jm.nnx.remat`: the same training to the last counter, the bytes of remat written by hand, what patterns mean."""

from __future__ import annotations

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from tests.comparisons import assert_close, checkpoints
from tests.nnx_models import DEPTH, ROWS, WIDTH, Block, Net, arrays, data, loss_fn, traced_checkpoints

pytestmark = pytest.mark.core

LAYERS, STACKED_ROWS = 8, 256  # activations must outweigh the parameters for remat to show


class Stack(nnx.Module):
    """The same blocks as one stacked module under `nnx.scan`."""

    def __init__(self, rngs, *, by_hand=False):
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.split(LAYERS))
        self.by_hand = by_hand

    def __call__(self, x):
        def one(x, block):
            return nnx.remat(lambda block, x: block(x, True))(block, x) if self.by_hand else block(x, True)

        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.fixture
def x():
    return data()


def five_steps(model, x, policy="none"):
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    def train_step(model, optimizer, x):
        loss, grads = jm.nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    step = jm.jit_step(train_step, jm.StepPolicy(remat=policy))
    losses = [step(model, optimizer, x) for _ in range(5)]
    return {"losses": losses, "model": arrays(model), "optimizer": arrays(optimizer)}


@pytest.fixture(scope="module")
def plain_run():
    return five_steps(Net(nnx.Rngs(0)), data())


@pytest.mark.parametrize(
    ("pattern", "policy", "step_policy"),
    [
        (r"blocks/\d+", "full", "none"),
        (r"blocks/\d+", "full", "full"),
        ({r"blocks/0": "full", nnx.Linear: "dots"}, "full", "none"),
    ],
)
def test_five_steps_are_those_of_the_plain_model(plain_run, x, pattern, policy, step_policy):
    """Losses, parameters, optimizer, BatchNorm statistics and dropout counters, alone and under a policy of the step."""
    model = Net(nnx.Rngs(0))
    jm.nnx.remat(model, pattern, policy)
    assert_close(five_steps(model, x, step_policy), plain_run)


def test_dropout_counters_and_statistics_move(plain_run):
    """The comparison above compares something: after five steps each counter stands at five."""
    counts = [value for path, value in plain_run["model"].items() if path[-1] == "count" and "drop" in path]
    assert [int(count) for count in counts] == [5] * DEPTH
    means = [value for path, value in plain_run["model"].items() if path[-1] == "mean" and path[0] == "blocks"]
    assert len(means) == DEPTH
    assert all(np.abs(mean).max() > 0 for mean in means)


def test_model_looks_the_same_and_undo_gives_it_back(x):
    model = Net(nnx.Rngs(0))
    shown, state, kinds = repr(model), arrays(model), [type(module) for _, module in nnx.iter_modules(model)]
    undo = jm.nnx.remat(model, r"blocks/.*")
    assert repr(model) == shown
    assert list(arrays(model)) == list(state)
    assert [type(module).__qualname__ for _, module in nnx.iter_modules(model)] == [kind.__qualname__ for kind in kinds]
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]) is not Block
    assert undo.paths["blocks/0"] == "full"
    assert len(traced_checkpoints(model, x)) == DEPTH
    undo()
    undo()
    assert [type(module) for _, module in nnx.iter_modules(model)] == kinds
    assert traced_checkpoints(model, x) == []


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"blocks/\d+", DEPTH),
        (r"blocks.\d+", DEPTH),
        (re.compile("BLOCKS/0", re.IGNORECASE), 1),
        (r"blocks/.*", DEPTH),  # parent and child: the outer only
        (r".*", DEPTH + 1),
        (Block, DEPTH),
        (r"blocks/\d+/(up|down)", 2 * DEPTH),
        ({r"blocks/0": "dots", r"blocks/.*": "full"}, DEPTH),
    ],
)
def test_what_a_pattern_means(x, pattern, count):
    model = Net(nnx.Rngs(0))
    jm.nnx.remat(model, pattern)
    assert len(traced_checkpoints(model, x)) == count


def test_as_many_checkpoints_as_by_hand_in_the_gradient(x):
    ours, hand = Net(nnx.Rngs(0)), Net(nnx.Rngs(0), by_hand=True)
    jm.nnx.remat(ours, r"blocks/\d+")

    def gradient(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest, x):
            return loss_fn(nnx.merge(graphdef, params, rest, copy=True), x)

        return checkpoints(jax.grad(loss), params, rest, x)

    assert len(gradient(ours)) == len(gradient(hand)) >= DEPTH


@pytest.mark.parametrize("policy", ["dots", "checkpoint_dots", "dots_saveable"])
def test_policy_names_and_synonyms(x, policy):
    model = Net(nnx.Rngs(0))
    undo = jm.nnx.remat(model, {r"blocks/0": policy, r"blocks/1": "everything_saveable", nnx.Linear: "full"})
    kept = [eqn.params["policy"] for eqn in traced_checkpoints(model, x)]
    names = jax.checkpoint_policies
    assert kept == [names.dots_saveable, names.everything_saveable, None]
    assert set(undo.paths.values()) == {"dots_saveable", "everything_saveable", "full"}


@pytest.fixture(scope="module")
def stacked():
    """Compiled temp bytes and the value of one gradient: plain, by hand, ours."""
    x = data(STACKED_ROWS)
    hand, ours, plain = Stack(nnx.Rngs(0), by_hand=True), Stack(nnx.Rngs(0)), Stack(nnx.Rngs(0))
    jm.nnx.remat(ours, r"blocks")
    return {name: _compiled(model, x) for name, model in (("hand", hand), ("ours", ours), ("plain", plain))}


def _compiled(model, x):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        def loss(params):
            merged = nnx.merge(graphdef, params, rest, copy=True)
            return loss_fn(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

        return jax.value_and_grad(loss, has_aux=True)(params)

    compiled = jax.jit(step).lower(params, rest, x).compile()
    (value, new), grads = compiled(params, rest, x)
    return compiled.memory_analysis().temp_size_in_bytes, value, {**arrays_of(new), **arrays_of(grads)}


def arrays_of(state):
    flat = {str(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return {p: np.asarray(v) for p, v in flat.items() if not jnp.issubdtype(v.dtype, jax.dtypes.prng_key)}


def test_scanned_layers_take_the_bytes_of_remat_by_hand(stacked):
    plain, hand, ours = (stacked[name][0] for name in ("plain", "hand", "ours"))
    assert abs(ours - hand) <= 0.01 * hand
    assert ours < 0.5 * plain


def test_scanned_layers_compute_the_same(stacked):
    assert float(stacked["ours"][1]) == pytest.approx(float(stacked["plain"][1]), rel=1e-6)
    assert_close(stacked["ours"][2], stacked["plain"][2])


def test_module_shared_under_two_paths_is_wrapped_once(x):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.second = self.first
            self.whole = nnx.Sequential(self.first, jnp.tanh, nnx.Linear(WIDTH, WIDTH, rngs=rngs))
            self.me = nnx.data({"ring": self})

        def __call__(self, x):
            return self.whole(self.second(self.first(x)))

    expected = Tied(nnx.Rngs(0))(x)
    model = Tied(nnx.Rngs(0))
    with jm.nnx.remat(model, r"second|whole") as undo:
        assert undo.paths == {"first": "full", "whole": "full"}
        assert type(type(model.first)) is type(nnx.Linear)
        assert len(traced_checkpoints(model, x)) == 3  # first, second, and whole without a second one inside
        np.testing.assert_allclose(model(x), expected, rtol=1e-6)
    with jm.nnx.remat(model, r"whole/layers/\d"):
        assert len(traced_checkpoints(model, x)) == 4


def test_other_methods_results_and_arguments_are_untouched(x):
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, words, *, rngs=None, table=None):
            assert isinstance(words, dict)
            assert type(table) is np.ndarray  # a host array stays one, so that its values may choose a branch
            noise = jax.random.normal(rngs.params(), x.shape)
            return {"y": self.linear(x) + noise, "said": words["say"], "none": None}, len(table)

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.odd, self.block = Odd(rngs), Block(rngs)

        def __call__(self, x, rngs):
            (out, count) = self.odd(x, {"say": "hello"}, rngs=rngs, table=np.arange(3))
            return out["y"] + self.block.project(x).mean(), (out["said"], out["none"], count)

    model, rngs = Outer(nnx.Rngs(0)), nnx.Rngs(params=1)
    plain, extra = model(x, rngs)
    jm.nnx.remat(model, r"odd|block")
    again = nnx.Rngs(params=1)
    got, same = model(x, again)
    np.testing.assert_allclose(got, plain, rtol=1e-6)
    assert same == extra == ("hello", None, 3)
    assert int(again.params.count[...]) == 1
    graphdef, state = nnx.split(model)
    assert len(checkpoints(lambda state: nnx.merge(graphdef, state)(x, nnx.Rngs(params=1))[0], state)) == 1


def test_copies_and_pickles():
    """A copy is rematerialised too; a pickle holds the author's class, readable where this library is not."""
    model = Net(nnx.Rngs(0))
    jm.nnx.remat(model, Block)
    for twin in (nnx.clone(model), copy.deepcopy(model), copy.copy(model)):
        assert type(twin.blocks[0]) is type(model.blocks[0])
    assert type(copy.copy(model.blocks[0])) is type(model.blocks[0])
    bare = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    holder = nnx.Sequential(bare)
    jm.nnx.remat(holder, r"layers/0")
    twin = pickle.loads(pickle.dumps(bare))  # noqa: S301 - our own bytes
    assert type(twin) is nnx.Linear
    np.testing.assert_array_equal(twin.kernel[...], bare.kernel[...])


def test_equal_models_share_one_trace(x):
    """Two models of one shape have equal graph definitions, so a jitted step is not traced again."""
    traces = []

    @nnx.jit
    def forward(model, x):
        traces.append(1)
        return model(x)

    for seed in (0, 1):
        model = Net(nnx.Rngs(seed))
        jm.nnx.remat(model, Block)
        forward(model, x)
    assert len(traces) == 1


def test_abstract_model_and_plain_jax(x):
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    jm.nnx.remat(model, r"blocks/\d+")
    graphdef, state = nnx.split(model)
    assert jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x).shape == (ROWS, 1)


def test_tree_mode_sown_values_and_modules_that_are_no_pytrees(x):
    class Odd(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.parts = [nnx.Linear(WIDTH, WIDTH, rngs=rngs)]
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            self.calls = nnx.Variable(jnp.ones(()))  # a variable that is made in the call
            return self.drop(self.parts[0](x))

    plain, odd = Odd(nnx.Rngs(0)), nnx.Sequential(Odd(nnx.Rngs(0)))
    jm.nnx.remat(odd, r"layers/0|.*/parts/0")
    np.testing.assert_allclose(odd(x), plain(x), rtol=1e-6)
    assert list(arrays(odd.layers[0])) == list(arrays(plain))
    with nnx.set_graph_mode(False):
        model = nnx.Sequential(Block(nnx.Rngs(0)))
        expected = Block(nnx.Rngs(0))(x, True)
        jm.nnx.remat(model, Block)
        np.testing.assert_allclose(model.layers[0](x, True), expected, rtol=1e-6)
        assert int(model.layers[0].drop.rngs.count[...]) == 1
