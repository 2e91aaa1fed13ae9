"""Plans that may put the optimizer's state into host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm

ADAM = optax.adam(1e-3)
WIDTH, LAYERS = 1024, 24
STATE = 2 * LAYERS * WIDTH * WIDTH * 4
SEARCH = {"state_offload": True, "remat": False}


def train_step(params, opt_state, x):
    def loss_of(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    loss, grads = jm.value_and_grad(loss_of)(params, x)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def arguments(width=WIDTH):
    params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(LAYERS)}
    return params, jax.eval_shape(ADAM.init, params), jax.ShapeDtypeStruct((8, width), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100_sxm", "v5e"])
def test_the_state_is_moved_where_nothing_else_fits(target):
    plan = jm.plan(train_step, *arguments(), target=target, budget="200MiB", search=SEARCH)
    assert plan.record.candidates[plan.record.chosen].fits
    assert plan.policy.state_offload == "optimizer"
    plain = next(each for each in plan.record.candidates if each.policy.state_offload is None)
    moved = plan.record.candidates[plan.record.chosen]
    assert plain.step_bytes - moved.step_bytes >= 0.9 * STATE
    assert moved.modelled_s > plain.modelled_s
    assert "nothing else fits" in plan.record.reason
    assert any("compiled. The compiled schedule has" in note for note in plan.record.notes)


@pytest.mark.slow
def test_the_state_stays_where_the_plain_step_fits():
    plan = jm.plan(train_step, *arguments(), target="h100_sxm", budget="10GiB", search=SEARCH)
    assert plan.policy.state_offload is None


@pytest.mark.slow
def test_a_plan_in_which_nothing_fits_proposes_it():
    plan = jm.plan(train_step, *arguments(), target="h100_sxm", budget="200MiB", search={"remat": False})
    assert not plan.record.candidates[plan.record.chosen].fits
    assert "--search state_offload" in plan.record.searches
    text = " ".join(str(plan).split())
    assert "--search state_offload (search= of jm.plan)" in text
    assert "No policy makes that fit" not in text


@pytest.mark.core
def test_what_does_not_save_is_dropped_with_both_figures():
    plan = jm.plan(train_step, *arguments(64), budget="1MiB", search=SEARCH)
    assert all(each.policy.state_offload is None for each in plan.record.candidates)
    assert any("does not make the step smaller" in note for note in plan.record.notes)


def test_a_step_whose_state_is_on_the_host_already_is_refused():
    step = jm.jit_step(train_step, jm.StepPolicy(state_offload="optimizer"))
    with pytest.raises(jm.PlanError, match="state_offload='optimizer' already"):
        jm.plan(step, *arguments(64), budget="1MiB")


@pytest.mark.slow
def test_a_divided_state_is_moved_by_each_device():
    search = {**SEARCH, "sharding": ["fsdp"]}
    plan = jm.plan(train_step, *arguments(), target="h100_sxm:4", mesh={"fsdp": 4}, budget="1MiB", search=search)
    plain = next(each for each in plan.record.candidates if each.policy.state_offload is None)
    moved = [each for each in plan.record.candidates if each.policy.state_offload is not None]
    assert [each.policy.sharding for each in moved] == ["fsdp"]
    assert plain.argument_bytes - moved[0].argument_bytes == STATE // 4
