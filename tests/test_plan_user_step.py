"""`jm.plan` of a step as users write it: it is planned as it is, and keeps its numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from tests.sample_plans import sentences
from tests.searched_steps import (
    DEPTH,
    OPTIMIZER,
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


NESTEROV = optax.sgd(1e-1, momentum=0.5, nesterov=True)


def gan_step(generator: Any, discriminator: Any, batch: Any) -> Any:
    """Two losses and two optimizers in one step; each loss goes through both networks or twice through one."""

    def fooling(params: Any, judge: Any, noise: Any) -> Any:
        return -jnp.tanh(forward(judge, forward(params, noise))).mean()

    def telling(params: Any, real: Any, made: Any) -> Any:
        return jnp.tanh(forward(params, made)).mean() - jnp.tanh(forward(params, real)).mean()

    (made, made_state), (judge, judge_state) = generator, discriminator
    fooled, grads = jm.value_and_grad(fooling)(made, judge, batch["noise"])
    updates, made_state = OPTIMIZER.update(grads, made_state, made)
    made = optax.apply_updates(made, updates)
    told, grads = jm.value_and_grad(telling)(judge, batch["real"], forward(made, batch["noise"]))
    updates, judge_state = NESTEROV.update(grads, judge_state, judge)
    return (made, made_state), (optax.apply_updates(judge, updates), judge_state), {"fooled": fooled, "told": told}


@pytest.mark.core
def test_a_step_with_two_losses_and_two_optimizers_is_planned_and_keeps_its_numbers() -> None:
    params = parameters()
    batch = {"noise": rows_of(ROWS), "real": rows_of(ROWS) / 2}
    arguments = (params, OPTIMIZER.init(params)), (jax.tree.map(jnp.negative, params), NESTEROV.init(params)), batch
    plan = jm.plan(gan_step, *jax.eval_shape(lambda *values: values, *arguments))
    sizes = [each.step_bytes or 0 for each in plan.frontier]
    assert len(sizes) >= 3
    assert sizes == sorted(sizes, reverse=True)
    # Were only one of the losses cut, the other would hold its activations: more than half of the peak.
    assert sizes[-1] < 0.4 * sizes[0]
    least = plan.frontier[-1].policy
    assert least.remat == "full"
    got = jm.jit_step(gan_step, least)(*jax.tree.map(jnp.copy, arguments))
    same(got, jax.jit(gan_step)(*arguments))


@pytest.mark.core
def test_what_donating_would_take_under_nnx_jit_can_be_typed_as_it_stands() -> None:
    def nnx_step(model: nnx.Linear, optimizer: nnx.Optimizer[Any], batch: Any) -> Any:
        loss, grads = jm.nnx.value_and_grad(lambda model, batch: (model(batch) ** 2).mean())(model, batch)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    batch = jnp.ones((8, 64))
    told = str(jm.plan(nnx.jit(nnx_step), model, optimizer, batch, search={"remat": False}))
    advice = "Write donate_argnames=('model', 'optimizer') in the nnx.jit of nnx_step."
    assert advice in " ".join(told.split())
    below = jm.plan(nnx.jit(nnx_step), model, optimizer, batch, search={"remat": False, "donate": True}, budget="60KiB")
    assert below.chosen.fits is False
    told = " ".join(str(below).split())
    assert re.search(r"Donating would save .*, compiled, and it fits\. Write donate", told), told
    assert "No search changes your own jit." in told
    before, old = np.asarray(model.kernel[...]).copy(), model.kernel[...]
    nnx.jit(nnx_step, donate_argnames=("model", "optimizer"))(model, optimizer, batch)
    assert old.is_deleted(), "the memory was not given away"
    assert np.abs(np.asarray(model.kernel[...]) - before).max() > 0, "the update was lost"


def test_arguments_that_an_earlier_call_took_are_planned_by_their_shapes() -> None:
    def loss(weights: Any, x: Any) -> Any:
        return (jnp.tanh(x @ weights) ** 2).mean()

    def train_step(weights: Any, x: Any) -> Any:
        value, gradient = jm.value_and_grad(loss)(weights, x)
        return weights - 0.1 * gradient, value

    weights, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    fresh = jm.plan(train_step, weights, x, search={"microbatches": [1, 2]})
    jm.jit_step(train_step)(weights, x)
    assert weights.is_deleted()
    again = jm.plan(train_step, weights, x, search={"microbatches": [1, 2]})
    assert [each.step_bytes for each in again.candidates] == [each.step_bytes for each in fresh.candidates]


def test_what_the_cpus_compiler_undoes_is_told_and_nothing_else() -> None:
    """Outside loops checkpoints are kept on the CPU since jax 0.12; what a step holds of parameters no policy takes anywhere."""

    def written_out(weights: Any, batch: Any) -> Any:
        def loss(weights: Any, h: Any) -> Any:
            for layer in weights:
                h = h + jnp.tanh(jnp.tanh(h @ layer) @ layer) @ layer
            return jnp.square(h).mean()

        return jax.tree.map(lambda w, g: w - g, weights, jm.grad(loss)(weights, batch))

    arguments = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6, jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    plan = jm.plan(written_out, *arguments, progress=False)
    (plain,) = [each for each in plan.candidates if each.policy.remat == "none"]
    again = [each for each in plan.candidates if each is not plain]
    assert any(each.extra_flops for each in again)
    said = [note for note in plan.record.notes if "before jax 0.12" in note]
    if jax.__version_info__ >= (0, 12):
        assert min(each.step_bytes for each in again) < plain.step_bytes
        assert not said
    else:
        assert min(each.temp_bytes for each in again) > 0.9 * plain.temp_bytes
        assert len(said) == 1


def test_frozen_weights_count_with_what_a_step_holds_whatever_they_are_called() -> None:
    """Stacked for a scan they have a leading dimension in common, as a batch has; noise by row is no weight."""

    def tuned(adapter: Any, llm: Any, noise: Any, batch: Any) -> Any:
        def loss(adapter: Any) -> Any:
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["up"] @ w["down"]), None), batch + noise, llm)[0]
            return jnp.square(h @ adapter).mean()

        return adapter - jm.grad(loss)(adapter)

    shapes = {"up": (4, 32, 64), "down": (4, 64, 32)}
    llm = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    adapter, noise, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 4), (16, 32), (16, 32)))
    plan = jm.plan(tuned, adapter, llm, noise, batch, budget="10KiB", progress=False)
    assert plan.record.least_bytes == 4 * (32 * 4 + 4 * 2 * 32 * 64)
    assert "No policy makes that fit" in sentences(plan)


def test_of_an_unclear_batch_nothing_is_called_state() -> None:
    def step(weights: Any, graph: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.square(jnp.tanh(graph["nodes"][graph["senders"]] @ weights)).mean()

        return weights - jm.grad(loss)(weights)

    graph = {
        "nodes": jax.ShapeDtypeStruct((4096, 16), jnp.float32),
        "senders": jax.ShapeDtypeStruct((8192,), jnp.int32),
    }
    plan = jm.plan(step, jax.ShapeDtypeStruct((16, 16), jnp.float32), graph, budget="64KiB", progress=False)
    assert plan.record.least_bytes == 4 * 16 * 16
    assert "a smaller batch" in sentences(plan)
