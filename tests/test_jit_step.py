"""`jm.jit_step`: one compile shared with the first call, nothing added to the others, every kind of step a user has."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.errors import DonationError, PolicyError
from tests.steps import OPTIMIZER, compiles_of, loss_fn, make_plain, new_records, plain_data


@pytest.mark.core
@pytest.mark.parametrize("remat", ["none", "full"])
def test_first_call_traces_once_and_compiles_once(remat):
    train_step, traces = make_plain(f"once_{remat}")
    step = jm.jit_step(train_step, jm.StepPolicy(remat=remat))
    params, opt_state, batch = plain_data()
    cursor = registry.since(0)[1]
    with compiles_of(f"once_{remat}") as compiled:
        new_params, new_opt_state, _ = step(params, opt_state, batch)
        step(new_params, new_opt_state, batch)
    assert (len(compiled), len(traces)) == (1, 1)
    assert params["w"].is_deleted()
    assert opt_state[0].mu["w"].is_deleted()
    assert not batch["x"].is_deleted()
    (record,) = new_records(cursor)
    assert record.program == f"once_{remat}"
    assert ("batch['x']", "float32[8,8]") in record.signature
    assert record.changed == ()
    assert record.memory.alias_bytes == 3 * (64 + 8) * 4 + 4  # weights, both moments, the count


@pytest.mark.core
def test_results_are_those_of_the_plain_step():
    train_step, _ = make_plain("equal")
    params, opt_state, batch = plain_data()
    wanted = jax.jit(train_step)(params, opt_state, batch)
    wanted = jax.jit(train_step)(*wanted[:2], batch)
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    got = step(*step(params, opt_state, batch)[:2], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)


@pytest.mark.core
def test_new_shape_is_compiled_once_before_it_runs_and_told():
    train_step, traces = make_plain("shapes")
    step = jm.jit_step(train_step)
    params, opt_state, batch = plain_data()
    params, opt_state, _ = step(params, opt_state, batch)
    cursor = registry.since(0)[1]
    short = plain_data(rows=5)[2]
    with compiles_of("shapes") as compiled:
        params, opt_state, _ = step(params, opt_state, short)
        step(params, opt_state, batch)
    assert (len(compiled), len(traces)) == (1, 2)
    (record,) = new_records(cursor)
    assert record.changed == ("batch['x']: float32[8,8] -> float32[5,8]",)


@pytest.mark.core
def test_new_sharding_alone_is_noticed():
    step = jm.jit_step(lambda state, x: state * x.sum(), donate_argnames=())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state, x = jnp.ones(16), jnp.ones(4)
    step(state, x)
    cursor = registry.since(0)[1]
    step(
        jax.device_put(state, sharding),
        jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())),
    )
    (record,) = new_records(cursor)
    assert "state: float32[16] -> float32[16] P('data',)" in record.changed


@pytest.mark.core
def test_switches_strings_and_callables_are_static():
    seen = []

    def train_step(state, batch, activation, *, train=True, mode="sum"):
        seen.append((train, mode))
        return activation(state + getattr(batch, mode)()), train

    step = jm.jit_step(train_step)
    np.testing.assert_array_equal(step(jnp.ones(4), jnp.ones(2), jnp.negative, train=False)[0], np.full(4, -3.0))
    cursor = registry.since(0)[1]
    step(jnp.ones(4), jnp.ones(2), jnp.negative, train=True, mode="mean")
    assert seen == [(False, "sum"), (True, "mean")]
    assert new_records(cursor)[0].changed == ("train: static False -> static True", "mode: new, static 'mean'")


def test_a_value_that_is_no_array_inside_a_tree_is_refused():
    step = jm.jit_step(lambda state: state["w"] + 1)
    with pytest.raises(TypeError, match=re.escape("state['name'] of <lambda> is a str, expected an array or a number")):
        step({"w": jnp.ones(3), "name": "layer"})


def test_a_switch_in_star_args_is_refused():
    step = jm.jit_step(lambda *trees: trees[0])
    with pytest.raises(TypeError, match=re.escape("args[1] of <lambda> is 'sum', which is no array")):
        step(jnp.ones(3), "sum")


@pytest.mark.core
def test_star_args_are_donated_by_place():
    step = jm.jit_step(lambda *trees: (jax.tree.map(lambda x: x + trees[1].sum(), trees[0]), 0.0))
    state = {"a": jnp.ones(3), "b": jnp.ones(2)}
    step(state, jnp.ones(5))
    assert state["a"].is_deleted()


@pytest.mark.core
def test_keyword_arguments_are_donated_too():
    step = jm.jit_step(lambda state, batch: (jax.tree.map(lambda x: x + batch.sum(), state), 0.0))
    state = {"a": jnp.ones(3), "b": jnp.ones(2)}
    step(batch=jnp.ones(5), state=state)
    assert state["a"].is_deleted()


@pytest.mark.core
def test_position_only_arguments_are_donated():
    def train_step(state, batch, /):
        return jax.tree.map(lambda x: x + batch.sum(), state), 0.0

    state = {"a": jnp.ones(3), "b": jnp.ones(2)}
    jm.jit_step(train_step)(state, jnp.ones(5))
    assert state["a"].is_deleted()


@pytest.mark.core
def test_train_state_with_a_python_step_counter():
    params, _, batch = plain_data()
    state = TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)

    def train_step(state, batch):
        loss, grads = jm.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    cursor = registry.since(0)[1]
    with compiles_of("train_step") as compiled:
        state, _ = step(state, batch)
        first = state
        state, _ = step(state, batch)
    assert len(compiled) == 1
    assert int(state.step) == 2
    assert ("state.params['w']", "float32[8,8]") in new_records(cursor)[0].signature
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))


@pytest.mark.core
def test_a_step_inside_another_trace_is_only_traced():
    step = jm.jit_step(lambda state, batch: (jax.tree.map(lambda x: x + batch.sum(), state), 0.0))
    state = {"a": jnp.ones(3), "b": jnp.ones(2)}
    shapes = jax.eval_shape(step, state, jnp.ones(5))
    assert shapes[0]["a"].shape == (3,)
    state, _ = step(state, jnp.ones(5))
    looped, _ = jax.lax.scan(lambda s, x: (step(s, x)[0], None), state, jnp.ones((2, 5)))
    np.testing.assert_array_equal(looped["a"], np.full(3, 16.0))


@pytest.mark.core
def test_ordinary_calls_flatten_nothing_and_read_nothing():
    flattened = []

    @jax.tree_util.register_pytree_node_class
    class Counted:
        def __init__(self, value):
            self.value = value

        def tree_flatten(self):
            flattened.append(1)
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    def train_step(state, batch):
        return Counted(state.value + batch.sum()), 0.0

    step, bare = jm.jit_step(train_step, donate_argnames=()), jax.jit(train_step)
    state, batch = Counted(jnp.ones(4)), jnp.ones(3)
    counts = []
    for call in (step, bare):
        call(state, batch)
        flattened.clear()
        with jax.transfer_guard("disallow"):
            call(state, batch)
        counts.append(len(flattened))
    assert counts[0] == counts[1]


@pytest.mark.core
def test_ordinary_calls_do_not_wait_for_the_device():
    def train_step(state, batch):
        return jax.lax.fori_loop(0, 300, lambda _, w: jnp.tanh(w @ batch), state), 0.0

    step = jm.jit_step(train_step, donate_argnames=())
    state, batch = jnp.ones((512, 512)), jnp.ones((512, 512))
    jax.block_until_ready(step(state, batch))
    with jax.transfer_guard("disallow"):
        result, _ = step(state, batch)
    assert not result.is_ready()


def test_policy_without_effect_is_refused_and_nothing_ran():
    train_step, _ = make_plain("no_effect", gradients=jax.value_and_grad)
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    params, opt_state, batch = plain_data()
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"no_effect never calls jm\.value_and_grad"):
            step(params, opt_state, batch)
    assert not params["w"].is_deleted()


def test_names_that_are_no_arguments_are_refused():
    step = jm.jit_step(lambda state, batch: state + batch, donate_argnames=("stat",))
    message = (
        "donate_argnames has 'stat', which is no argument of <lambda>. Did you mean `state`? Arguments of this call"
    )
    with pytest.raises(DonationError, match=re.escape(message)):
        step(jnp.ones(3), jnp.ones(3))


def sharded(spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


@pytest.mark.core
def test_pinned_state_stays_where_it_is_and_is_never_moved():
    def train_step(state, batch):
        return jax.tree.map(lambda w: w + batch["x"].sum(), state), batch["x"].mean()

    where = {"w": sharded(("data",)), "b": sharded(())}
    state = jax.device_put({"w": jnp.ones((16, 2)), "b": jnp.ones(2)}, where)
    batch = jax.device_put({"x": jnp.ones((8, 2))}, sharded(("data",)))
    step = jm.jit_step(train_step, state_shardings=where)
    before = state
    state, _ = step(state, batch)
    assert before["w"].is_deleted()
    assert state["w"].sharding == where["w"]
    elsewhere = jax.device_put({"w": jnp.ones((16, 2)), "b": jnp.ones(2)}, sharded(()))
    fresh = jm.jit_step(train_step, state_shardings=where)
    for call in (fresh, step):
        with pytest.raises(PolicyError, match=re.escape("state = jax.device_put(state, state_shardings)")):
            call(elsewhere, batch)
    assert not elsewhere["w"].is_deleted()


def test_pinning_something_that_is_no_argument_is_refused():
    step = jm.jit_step(lambda state, batch: (state, batch), state_shardings={"w": sharded(())})
    with pytest.raises(PolicyError, match=r"no argument of <lambda> has it \(arguments: state, batch\)"):
        step(jnp.ones(3), jnp.ones(3))
    step = jm.jit_step(lambda state, batch: (state + batch.sum(), 0.0), state_shardings=sharded(()))
    with pytest.raises(PolicyError, match="state_shardings pins arguments by position, and batch came by keyword"):
        step(jax.device_put(jnp.ones(3), sharded(())), batch=jnp.ones(3))


def test_it_looks_like_the_users_step():
    train_step, _ = make_plain("looks")
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full"))
    assert (step.__name__, step.__wrapped__, step.policy.remat) == ("looks", train_step, "full")
    assert repr(step).startswith("jm.jit_step(looks, StepPolicy(remat='full'")
    assert "looks" in step.lower(*plain_data()).as_text()


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "names", "again"),
    [
        (jm.StepPolicy(donate="auto"), (), None),
        (jm.StepPolicy(donate=("state",)), (), None),
        (jm.StepPolicy(donate="auto"), (), jm.StepPolicy(remat="full", donate="auto")),
        (jm.StepPolicy(), (), jm.StepPolicy(remat="full")),
    ],
)
def test_donation_that_was_named_stays_where_nothing_new_is_asked(policy, names, again):
    """A step that must not donate still does not when it is wrapped once more."""

    def loss(w, x):
        return jnp.tanh(jnp.tanh(w * x) * w).sum()

    step = jm.jit_step(lambda state, x: state - jm.grad(loss)(state, x), policy, donate_argnames=names)
    state = jnp.ones(1024)
    jm.jit_step(step, again)(state, 1.0)
    assert not state.is_deleted()
    jm.jit_step(step, jm.StepPolicy(donate=("state",) if policy.donate != ("state",) else "auto"))(state, 1.0)
    assert state.is_deleted(), "another word of donation is asked anew"
