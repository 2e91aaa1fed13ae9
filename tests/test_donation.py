"""Donation: inferred by one rule, proved after compile array by array, lost ones named with the reason before anything runs."""

from __future__ import annotations

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.donation import infer_donation
from jaxmem_callbacks.records.errors import DonationError, DonationWarning
from jaxmem_callbacks.records.programs import Compilation
from tests.pasting import pasted, value

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


TREE = {"w": shape(4, 4), "b": shape(4)}
LOSS = shape()


@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "results", "donated"),
    [
        ([("state", TREE), ("batch", TREE)], (TREE, LOSS), ("state",)),
        ([("state", TREE), ("batch", TREE)], (TREE, TREE), ("state",)),
        ([("state", TREE)], TREE, ("state",)),
        ([("batch", {"x": shape(3)}), ("state", TREE)], (TREE, LOSS), ("state",)),
        ([("params", TREE), ("opt", (TREE, TREE)), ("x", shape(4))], ((TREE, (TREE, TREE)), LOSS), ("params", "opt")),
        ([("params", TREE), ("ema", TREE), ("x", shape(4))], (TREE, TREE, LOSS), ("params", "ema")),
        ([("params", TREE), ("ema", TREE), ("x", shape(4))], (TREE, LOSS), ("params",)),
        ([("ref_params", TREE), ("params", TREE), ("x", shape(4))], (TREE, LOSS), ("params",)),
        ([("teacher", TREE), ("student", TREE)], {"student": TREE, "loss": LOSS}, ("student",)),
        ([("w", shape(4, 4)), ("x", shape(8, 4))], (shape(4, 4), LOSS), ("w",)),
        ([("w", shape(8, 4)), ("x", shape(8, 4))], (shape(8, 4), shape(8, 4)), ("w",)),
        ([("w", shape(4)), ("noise", shape(8, 4))], (shape(4), shape(8, 4)), ("w", "noise")),
        ([("w", shape(4)), ("x", shape(2)), ("noise", shape(8, 4))], (shape(4), shape(8, 4)), ("w",)),
        ([("w", shape(4)), ("learning_rate", shape())], (shape(4), LOSS), ("w",)),
        ([("state", TREE), ("batch", TREE)], ({"w": shape(4, 4), "b": shape(4, dtype=jnp.bfloat16)}, LOSS), ()),
        ([("state", TREE), ("empty", {})], (LOSS, {}), ()),
        ([("batch", TREE)], (TREE,), ()),
    ],
)
def test_an_argument_is_donated_where_the_step_returns_it_updated(arguments, results, donated):
    assert infer_donation(arguments, results) == donated


@pytest.mark.core
@pytest.mark.parametrize(
    "counter", [0, np.int64(0), np.float64(0), np.arange(3), jax.random.key(0)], ids=lambda each: type(each).__name__
)
def test_what_jax_narrows_of_numpys_does_not_keep_a_state_from_being_donated(counter):
    step = jm.jit_step(lambda state, batch: ({"w": state["w"] + batch, "count": state["count"]}, batch.sum()))
    state, batch = {"w": jnp.ones(64), "count": counter}, jnp.ones(64)
    for _ in range(2):
        weights = state["w"]
        state, _ = step(state, batch)
        assert weights.is_deleted()


@given(st.lists(st.tuples(st.integers(2, 4), st.booleans()), max_size=6), st.permutations(range(6)))
def test_each_result_is_claimed_once_and_no_batch_ever(sizes, order):
    arguments = [
        (("batch_" if is_batch else "state_") + str(i), (shape(size), shape(size)))
        for i, (size, is_batch) in enumerate(sizes)
    ]
    results = tuple((shape(i), shape(i)) for i in order if i in {2, 3, 4})
    donated = infer_donation(arguments, results)
    trees = dict(arguments)
    taken = [trees[name][0].shape for name in donated]
    assert len(taken) == len(set(taken))
    assert not any(name.startswith("batch") for name in donated)
    assert {trees[n][0].shape for n, _ in arguments if n.startswith("state")} & {r[0].shape for r in results} == set(
        taken
    )


def test_a_header_is_read_whatever_its_form():
    line = (
        "HloModule jit_f, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias), {}: (0, {}, must-alias) }, "
        "buffer_donor={ (3, {}) }, entry_computation_layout={(f32[2,3]{1,0:T(8,128)}, s32[], (f32[2]{0}, pred[]), f32[1]{0})"
        "->(f32[3]{0}, f32[])}, x={true}\nbody"
    )
    assert (parse_module(line).aliases, parse_module(line).parameter_count) == ({2: 1, 0: 0}, 4)
    packed = "HloModule t, input_output_alias={ {0}: (0, {7}, may-alias) }, "
    packed += "entry_computation_layout={((f32[2]{0}, s32[]))->f32[]}"
    assert (parse_module(packed).aliases, parse_module(packed).parameter_count) == ({7: 0}, 2)
    assert parse_module("HloModule empty, entry_computation_layout={()->f32[]}").parameter_count == 0
    assert parse_module("").aliases == {}


def mesh_sharding(*spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def other_width(state, batch):
    return {"w": state["w"].astype(jnp.bfloat16), "n": state["n"] + 1}, batch.sum()


def other_sharding(state, batch):
    w = jax.lax.with_sharding_constraint(state["w"] * 2, mesh_sharding())
    return {"w": w, "n": state["n"] + 1}, batch.sum()


def unused(state, batch):  # noqa: ARG001 - that is the case
    return batch.sum()


def reduced(state, batch):
    return state["w"].sum() + state["n"], batch.sum()


@pytest.mark.core
@pytest.mark.parametrize(
    ("train_step", "reason", "remedy"),
    [
        (
            other_width,
            "state['w'] float32[16,8]: it comes as float32 and is returned as bfloat16",
            ".astype('float32')",
        ),
        (
            other_sharding,
            "it comes as P('data',) and is returned as P(",
            "state_shardings=jax.tree.map(lambda x: x.sharding",
        ),
        (unused, "the step never uses it, so JAX drops it from the program", "delete the argument 'state'"),
        (reduced, "no result that is left has its shape and dtype", "Leave 'state' out of what is donated"),
    ],
)
def test_a_donation_asked_for_and_lost_is_an_error_before_anything_runs(train_step, reason, remedy):
    state = {"w": jax.device_put(jnp.ones((16, 8)), mesh_sharding("data")), "n": jnp.int32(0)}
    state["n"] = jax.device_put(state["n"], mesh_sharding())
    batch = jax.device_put(jnp.ones(8), mesh_sharding())
    step = jm.jit_step(train_step, donate_argnames="state")
    for _ in range(2):
        with pytest.raises(DonationError) as caught:
            step(state, batch)
    assert f"Donation of state to {train_step.__name__} is not happening for 1 array(s), 64 B on each device" in str(
        caught.value
    )
    assert reason in str(caught.value)
    assert remedy in str(caught.value)
    assert "state['n']" not in str(caught.value)
    assert not state["w"].is_deleted()


@pytest.mark.core
def test_a_loss_in_a_later_signature_is_found_before_it_runs():
    def train_step(state, batch):
        return state.astype(jnp.float32 if batch.shape[0] == 8 else jnp.bfloat16) + 1, batch.sum()

    step = jm.jit_step(train_step, donate_argnames="state")
    state, _ = step(jnp.ones(16), jnp.ones(8))
    with pytest.raises(DonationError, match="it comes as float32 and is returned as bfloat16"):
        step(state, jnp.ones(5))
    assert not state.is_deleted()
    step(state, jnp.ones(8))
    assert state.is_deleted()


@pytest.mark.core
def test_a_loss_in_the_users_own_jit_is_an_error_at_first_and_a_warning_once_it_ran():
    def train_step(state, batch):
        return state.astype(jnp.float32 if batch.shape[0] == 8 else jnp.bfloat16) + 1, batch.sum()

    own = jax.jit(train_step, donate_argnames="state")
    state = jnp.ones(16)
    with pytest.raises(DonationError, match="Donation of state to train_step is not happening"):
        jm.jit_step(own)(state, jnp.ones(5))
    assert not state.is_deleted()
    step = jm.jit_step(own)
    state, _ = step(state, jnp.ones(8))
    with pytest.warns(DonationWarning, match="it comes as float32 and is returned as bfloat16"):
        step(state, jnp.ones(3))


def test_debug_nans_is_named_as_the_reason():
    def train_step(state, batch):
        return state + batch.sum()

    state = jnp.ones(8)
    with jax.debug_nans(True):
        with pytest.raises(DonationError, match="jax_debug_nans is on, and JAX donates nothing while it is"):
            jm.jit_step(train_step, donate_argnames="state")(state, jnp.ones(3))
        with pytest.warns(DonationWarning, match="jax_debug_nans is on"):
            jm.jit_step(train_step)(state, jnp.ones(3))
    assert not state.is_deleted()


@pytest.mark.core
def test_an_inferred_donation_that_is_lost_warns_once_and_jax_not_at_all():
    def train_step(state, batch):
        w = jax.lax.with_sharding_constraint(state["w"] * 2, mesh_sharding())
        return {"w": w, "v": state["v"] + batch.sum()}, batch.sum()

    state = jax.device_put({"w": jnp.ones((16, 8)), "v": jnp.ones(8)}, mesh_sharding())
    state["w"] = jax.device_put(state["w"], mesh_sharding("data"))
    step = jm.jit_step(train_step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(dict(state), jax.device_put(jnp.ones(8), mesh_sharding()))
        step(
            jax.device_put(jax.tree.map(jnp.ones_like, state), mesh_sharding()),
            jax.device_put(jnp.ones(4), mesh_sharding()),
        )
    assert [w.category for w in caught] == [DonationWarning]
    assert "state['w'] float32[16,8]: it comes as P('data',) and is returned as P(" in str(caught[0].message)


@pytest.mark.core
def test_jaxs_own_warning_never_follows_ours():
    step = jm.jit_step(lambda state, batch: (state.sum(), batch.sum()), donate_argnames="state")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(DonationError):
            step(jnp.ones((3, 3)), jnp.ones(2))
    assert caught == []


@pytest.mark.core
def test_what_is_passed_through_or_counts_is_no_false_alarm():
    def train_step(state, frozen, batch):
        new = {"w": state["w"] + batch.sum(), "table": state["table"], "count": state["count"] + 1}
        return new, frozen, batch.mean()

    state = {"w": jnp.ones((4, 4)), "table": jnp.arange(10), "count": jnp.int32(0)}
    frozen = {"a": jnp.ones(3), "b": jnp.ones(2)}
    step = jm.jit_step(train_step, donate_argnames=("state", "frozen"))
    for _ in range(3):
        state, frozen, _ = step(state, frozen, jnp.ones(2))
    assert int(state["count"]) == 3


@pytest.mark.core
def test_tied_buffers_are_named_before_anything_runs():
    def train_step(params, ema, batch):
        return jax.tree.map(lambda p: p + batch.sum(), params), jax.tree.map(lambda e: e * 0.9, ema), 0.0

    params = {"embed": jnp.ones((4, 4)), "head": jnp.ones(4)}
    step = jm.jit_step(train_step)
    with pytest.raises(DonationError) as caught:
        step(params, params, jnp.ones(2))
    assert "params['embed'] and ema['embed'] of train_step are one and the same buffer (float32[4,4])" in str(
        caught.value
    )
    assert "aliased twice: both are donated" in str(caught.value)
    assert "ema = jax.tree.map(jnp.copy, ema)" in str(caught.value)
    assert not params["embed"].is_deleted()
    step(params, jax.tree.map(jnp.copy, params), jnp.ones(2))
    assert params["embed"].is_deleted()


class Doubling:
    def made(self):
        def train(state, batch):
            return self.update(state, batch)

        return train

    def update(self, params, batch):
        return jax.tree.map(lambda p: 2 * p + batch.sum(), params), 0.0


DONATED = {
    "a function": (lambda: Doubling().update, "params"),
    "a partial": (lambda: functools.partial(Doubling.update, Doubling()), "params"),
    "a function in a method": (lambda: Doubling().made(), "state"),
    "a lambda": (lambda: lambda weights, batch: ({"w": weights["w"] * 2}, batch.sum()), "weights"),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", DONATED)
def test_what_was_donated_and_is_passed_again_is_named(kind):
    make, name = DONATED[kind]
    function, params, batch = make(), {"w": jnp.ones((4, 4))}, jnp.ones(2)
    step = jm.jit_step(function)
    step(params, batch)
    for _ in range(2):  # with a program that ran before, and with a new one
        with pytest.raises((RuntimeError, ValueError), match=r"deleted") as caught:
            step(params, batch)
        note = caught.value.__notes__[-1]
        assert f"{name}: passed to {step.name} after the memory was donated, as by an earlier call of it." in note
        batch = jnp.ones(3)
    params = {"w": jnp.ones((4, 4))}
    if not step.name.isidentifier():
        assert note.endswith("make the step with donate_argnames=()")
    else:
        step = value(pasted("donation.nothing", note), jm=jm, **{step.name: function})
        assert float(step(params, batch)[0]["w"][0, 0]) == float(step(params, batch)[0]["w"][0, 0])


def test_what_the_users_own_jit_donated_is_named():
    step = jm.jit_step(jax.jit(Doubling().update, donate_argnums=0))
    params = {"w": jnp.ones((4, 4))}
    step(params, jnp.ones(2))
    with pytest.raises((RuntimeError, ValueError), match=r"deleted") as caught:
        step(params, jnp.ones(2))
    assert "to keep what is passed, leave it out of what the step's jit donates" in caught.value.__notes__[-1]


@pytest.mark.core
def test_a_buffer_donated_and_read_is_named():
    step = jm.jit_step(lambda state, old: (state * 2 - old["w"].sum(), 0.0), donate_argnames="state")
    w = jax.device_put(jnp.ones((16, 4)), mesh_sharding("data"))
    with pytest.raises(
        DonationError, match=re.escape("state and old['w'] of <lambda> are one and the same buffer")
    ) as caught:
        step(w, {"w": w})
    assert "donated in one place and passed undonated in another" in str(caught.value)


@pytest.mark.core
def test_two_views_of_one_buffer_are_the_same_buffer():
    state = jnp.ones((16, 4))
    view = state.addressable_shards[0].data
    step = jm.jit_step(lambda state, other: (state + other.sum(), 0.0), donate_argnames="state")
    with pytest.raises(DonationError, match="state and other of <lambda> are one and the same buffer"):
        step(state, view)


@pytest.mark.core
def test_nnx_clone_shares_buffers_and_a_tied_variable_does_not():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Param(jnp.ones((4, 4)))
            self.head = self.embed

    def train_step(model, other, batch):
        model.embed.set_value(model.embed.get_value() * batch.sum())
        return other.embed.get_value().sum()

    model = Tied()
    step = jm.jit_step(train_step)
    with pytest.raises(DonationError, match="aliased twice"):
        step(model, nnx.clone(model), jnp.ones(2))
    step(model, Tied(), jnp.ones(2))
    assert float(model.head.get_value()[0, 0]) == 2.0


@pytest.mark.core
def test_optimizer_states_and_masks_are_donated_whole():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-2), {"w": True, "b": False}))

    def train_step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.tree.map(lambda p: p * batch.mean(), params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, 0.0

    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    opt_state = tx.init(params)
    step = jm.jit_step(train_step, donate_argnames=("params", "opt_state"))
    step(params, opt_state, jnp.ones(3))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, opt_state)))


def test_nothing_is_donated_where_nothing_is_asked():
    state = {"a": jnp.ones(3), "b": jnp.ones(3)}
    step = jm.jit_step(lambda state, batch: (jax.tree.map(jnp.negative, state), batch), jm.StepPolicy(donate=()))
    step(state, jnp.ones(2))
    assert not state["a"].is_deleted()


def told_since(cursor: int) -> list[Compilation]:
    return [each for each in registry.since(cursor)[0] if each.program == "viewed_step"]


@pytest.mark.core
def test_a_donation_that_the_runtime_copies_is_told_after_the_first_run():
    def viewed_step(state, x):
        return {"w": state["w"] + x}, x.sum()

    def run(state):
        cursor = registry.since(0)[1]
        jm.jit_step(viewed_step)(state, jnp.ones(()))
        return told_since(cursor)

    state = {"w": jnp.ones((512, 1024))}
    view = np.asarray(state["w"])
    compiled, copied = run(state)
    assert (compiled.lost, compiled.has_run) == ((), False)
    assert copied.has_run
    assert copied.lost == (
        "state['w']: the runtime copied it, since something outside of JAX holds its memory, such as a NumPy view (np.asarray)",
    )
    assert copied.lost_bytes == view.nbytes == 512 * 1024 * 4
    small = {"w": jnp.ones((4, 4))}
    views = [np.asarray(small["w"])]
    assert [each.has_run for each in run(small)] == [False], "a viewed counter is nothing"
    assert [each.has_run for each in run({"w": jnp.ones((512, 1024))})] == [False], "nothing holds it"
    assert views


@pytest.mark.core
def test_what_a_compile_loses_stands_in_its_record():
    def halved_step(state, x):
        return {"w": (state["w"] + x).astype(jnp.bfloat16)}, x.sum()

    cursor = registry.since(0)[1]
    step = jm.jit_step(jax.jit(halved_step, donate_argnames="state"))
    with pytest.raises(DonationError):
        step({"w": jnp.ones((4, 4))}, jnp.ones(()))
    (compiled,) = [each for each in registry.since(cursor)[0] if each.program == "halved_step"]
    assert compiled.lost == ("state['w']: it comes as float32 and is returned as bfloat16",)
    assert compiled.lost_bytes == 64


# a batch that the user's own jit donates


def rows_step(state, rows):
    value, gradients = jm.value_and_grad(lambda w: jnp.square(jnp.tanh(rows @ w)).mean())(state["w"])
    return {"w": state["w"] - gradients, "count": state["count"] + 1}, value


def pair_step(params, momentum, pair):
    value, gradients = jm.value_and_grad(lambda w: jnp.square(pair["in"] @ w - pair["out"]).mean())(params)
    momentum = 0.9 * momentum + gradients
    return params - momentum, momentum, value


def float16_step(w, x):
    gradients = jm.grad(lambda w: jnp.square(x @ w).mean())(w)
    return (w - gradients).astype(jnp.bfloat16), x[:2, 0]


class Trainer:
    @functools.partial(jax.jit, donate_argnums=(1, 2), static_argnums=0)
    def train_step(self, w, example):
        return w - jm.grad(lambda w: jnp.square(example @ w).mean())(w), example.sum()


DONATED_BATCHES = {
    "a function": (jax.jit(rows_step, donate_argnames=("state", "rows")), ({"w": (4, 4), "count": ()}, (8, 4))),
    "a tree of two": (jax.jit(pair_step, donate_argnums=(0, 1, 2)), ((4, 2), (4, 2), {"in": (8, 4), "out": (8, 2)})),
    "a partial": (
        jax.jit(
            functools.partial(lambda scale, w, x: (w - jm.grad(lambda w: scale * (x @ w).sum())(w), 0.0), 0.5),
            donate_argnums=(0, 1),
        ),
        ((4, 4), (8, 4)),
    ),
    "a method": (functools.partial(Trainer.train_step, Trainer()), ((4, 4), (8, 4))),
    "Equinox": (
        eqx.filter_jit(lambda m, x: (m - jm.grad(lambda m: (x @ m).sum())(m), 0.0), donate="all"),
        ((4, 4), (8, 4)),
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", DONATED_BATCHES)
def test_a_batch_that_the_users_jit_donates_is_no_error_and_no_state(kind):
    own, shapes = DONATED_BATCHES[kind]

    def args():
        return jax.tree.map(
            lambda shape: jnp.full(shape, 0.5),
            shapes,
            is_leaf=lambda s: isinstance(s, tuple) and all(isinstance(n, int) for n in s),
        )

    step = jm.jit_step(own, jm.StepPolicy(remat="full"))
    cursor = registry.since(0)[1]
    with pytest.warns(DonationWarning, match=r"Leave '\w+' out of what is donated\."):
        ours = step(*args())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = own(*args())
    assert jax.tree.all(jax.tree.map(jnp.array_equal, ours, plain))
    assert [each.lost for each in registry.since(cursor)[0]] == [()], "no event"
    leaves = step.compile_call(args(), {}).leaves
    assert {leaf.argument for leaf in leaves if leaf.passing} == {leaves[-1].argument}
    shown = {row.name: row.kind for row in jm.step_memory(own, *args()).arguments}
    assert shown[leaves[-1].argument] in ("batch", "other")
    rows = jm.plan(own, *args(), target="cpu", search={"batch": {"at_most": 16}}, budget="1GiB")
    assert rows.chosen.batch_rows == 16


@pytest.mark.core
@pytest.mark.parametrize("names", [("state", "rows"), ("rows",)])
def test_a_batch_that_this_library_is_asked_to_donate_is_an_error(names):
    step = jm.jit_step(rows_step, donate_argnames=names)
    with pytest.raises(DonationError, match="Leave 'rows' out of what is donated"):
        step({"w": jnp.ones((4, 4)), "count": 0}, jnp.ones((8, 4)))


@pytest.mark.core
def test_a_state_that_changes_its_width_is_still_lost_in_the_users_jit():
    step = jm.jit_step(jax.jit(float16_step, donate_argnums=(0, 1)))
    with pytest.raises(DonationError, match="it comes as float32 and is returned as bfloat16"):
        step(jnp.ones((4, 4)), jnp.ones((8, 4)))
