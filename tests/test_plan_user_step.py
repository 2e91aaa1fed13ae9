"""`jm.plan` of a step as users write it: it is planned as it is, and keeps its numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm
from tests.searched_steps import (
    DEPTH,
    ROWS,
    WIDTH,
    forward,
    obeys,
    parameters,
    rows_of,
    same,
)


def frozen_or_trained(params: Any) -> Any:
    return {name: "train" if name == "lora" else "freeze" for name in params}


LORA = optax.multi_transform({"train": optax.sgd(1e-2, momentum=0.9), "freeze": optax.set_to_zero()}, frozen_or_trained)
CONFIG = {"rate": 0.1, "decay": 0.99}


def users_step(state: Any, batch: Any, key: Any) -> Any:
    """As users write it: a closure over optimizer and config, LoRA on frozen weights, dropout, metrics, an average."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        weights = {
            "up": params["up"] + params["lora"]["a"] @ params["lora"]["b"],
            "down": params["down"],
        }
        hidden = forward(weights, batch["x"])
        kept = jax.random.bernoulli(key, 1 - CONFIG["rate"], hidden.shape)
        error = ((jnp.where(kept, hidden, 0) - batch["y"]) ** 2).mean()
        return error, {"error": error, "largest": jnp.abs(hidden).max()}

    (_, metrics), grads = jm.value_and_grad(loss, has_aux=True)(state["params"], batch, key)
    updates, opt_state = LORA.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda e, p: CONFIG["decay"] * e + (1 - CONFIG["decay"]) * p, state["ema"], params)
    return {"params": params, "opt_state": opt_state, "ema": ema}, metrics


@pytest.mark.core
def test_a_step_as_users_write_it_is_planned_and_keeps_its_numbers() -> None:
    lora = {"a": jnp.ones((DEPTH, WIDTH, 2)) / 8, "b": jnp.ones((DEPTH, 2, 4 * WIDTH)) / 8}
    params = {**parameters(), "lora": lora}
    state = {"params": params, "opt_state": LORA.init(params), "ema": params}
    batch = {"x": rows_of(ROWS), "y": rows_of(ROWS) / 2}
    arguments = state, batch, jax.random.key(3)
    shapes = jax.eval_shape(lambda *values: values, *arguments)
    plan = jm.plan(users_step, *shapes, budget="1200KiB", search={"remat": True})
    obeys(plan)
    assert plan.policy.remat == "full"
    assert plan.chosen.fits
    wanted = jax.jit(users_step)(*arguments)
    # A copy for each argument: the average begins as the parameters themselves, and one buffer is donated once.
    got = jm.jit_step(users_step, plan.policy)(jax.tree.map(jnp.copy, state), batch, jax.random.key(3))
    same(got, wanted)
    same(got[0]["params"]["up"], params["up"])
