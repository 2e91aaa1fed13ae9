"""A step that `eqx.filter_jit` jitted is planned as its user wrote it: its model with functions and numbers, its own donation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import jaxmem_callbacks as jm
from tests.target_step import needs_compiler

WIDTH, ROWS = 32, 512


class Net(eqx.Module):
    """Functions, a number and a module without arrays beside the weights."""

    layers: list[eqx.nn.Linear]
    activation: Any
    dropout: eqx.nn.Dropout
    scale: float = 2.0

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.dropout(x, key=key) * self.scale


def make() -> tuple[Any, ...]:
    layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in jax.random.split(jax.random.key(0), 6)]
    model = Net(layers, jax.nn.gelu, eqx.nn.Dropout(0.1))
    optimizer = optax.adam(1e-3)
    batch = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return batch, model, optimizer.init(eqx.filter(model, eqx.is_array)), jax.random.key(2), optimizer


def loss(model: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
    return (jax.vmap(model)(batch, jax.random.split(key, len(batch))) ** 2).mean()


def train_step(batch: Any, model: Any, opt_state: Any, key: Any, optimizer: Any) -> Any:
    value, gradients = jm.value_and_grad(loss)(model, batch, key)
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, {"loss": value}


@eqx.filter_jit
def evaluate(model: Any, batch: jax.Array) -> jax.Array:
    return loss(eqx.nn.inference_mode(model), batch, jax.random.key(0))


def bytes_of(step: Any, policy: jm.StepPolicy) -> int:
    return jm.step_memory(jm.jit_step(step, policy), *make()).step_bytes or 0


@pytest.mark.parametrize("donate", ["none", "all-except-first"])
def test_what_is_planned_is_what_the_users_own_jit_compiles(donate: Any, tmp_path: Path) -> None:
    step = eqx.filter_jit(train_step, donate=donate)
    batch, model, *_ = make()
    budget = bytes_of(step, jm.StepPolicy(remat="full"))
    plan = jm.plan(step, *make(), budget=f"{budget}B", beside=[(evaluate, (model, batch))])
    assert plan.policy.remat == "full"
    assert plan.policy.donate is None, "that is the jit's own word"
    # Equinox returns one number more than the step.
    for each in plan.candidates:
        assert bytes_of(step, each.policy) == pytest.approx(each.step_bytes, abs=64)
    paths = [path for path, _ in plan.record.signature]
    assert paths[:3] == ["batch", "model.layers[0].weight", "model.layers[0].bias"]
    (beside,) = plan.chosen.beside
    assert beside.name == "evaluate"
    assert ("Donating would save" in str(plan)) == (donate == "none")
    told = jm.step_memory(step, *make())
    assert {each.name for each in told.arguments} == {"batch", "model", "opt_state", "key"}
    undonated = "model, opt_state: returned updated and not donated"
    assert any(warning.startswith(undonated) for warning in told.warnings) == (donate == "none")
    if donate == "none":
        assert "Let the plan donate: --search donate" in " ".join(plan.record.notes)

    planned, plain = jm.jit_step(step, plan.policy), jm.jit_step(step)
    with jm.MemoryMonitor(logdir=tmp_path, plan=plan) as monitor:
        batch, model, opt_state, key, optimizer = make()
        for number in range(2):
            model, opt_state, metrics = planned(batch, model, opt_state, key, optimizer)
            monitor(number, metrics)
    assert not [event for event in monitor.events if "plan" in event.kind.lower()], "the plan is not stale"
    batch, other, opt_state, key, optimizer = make()
    for _ in range(2):
        other, opt_state, _ = plain(batch, other, opt_state, key, optimizer)
    for ours, theirs in zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (model, other)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_what_is_donated_is_told_of_its_own_argument() -> None:
    """Equinox's program takes what it donates first; shapes that are the same say nothing of which is which."""

    def step(first: Any, second: Any, third: Any) -> Any:
        return second + first, third * 2

    arrays = [np.full(64, fill, np.float32) for fill in (1, 2, 3)]
    jitted = eqx.filter_jit(step, donate="all-except-first")
    for args, kwargs in ((arrays, {}), (arrays[:1], {"third": arrays[2], "second": arrays[1]})):
        told = jm.step_memory(jitted, *map(jax.numpy.asarray, args), **jax.tree.map(jax.numpy.asarray, kwargs))
        assert {each.name: each.donated_bytes for each in told.arguments} == {"first": 0, "second": 256, "third": 256}


def test_microbatches_are_compared_and_planned() -> None:
    whole = eqx.filter_jit(train_step)
    step = functools.partial(whole, optimizer=make()[-1])
    budget = bytes_of(whole, jm.StepPolicy(microbatches=4))
    plan = jm.plan(step, *make()[:-1], budget=f"{budget}B", search={"remat": False, "microbatches": [2, 4]})
    assert plan.policy == jm.StepPolicy(microbatches=4)
    assert plan.record.step == "train_step"
    assert not plan.record.notes or "not checked" not in " ".join(plan.record.notes)


class Trainer(eqx.Module):
    """A step that is a method, as Equinox binds it."""

    model: Net

    @eqx.filter_jit
    def step(self, batch: Any, opt_state: Any, key: Any, optimizer: Any) -> Any:
        return train_step(batch, self.model, opt_state, key, optimizer)


def test_a_step_that_is_a_method() -> None:
    batch, model, *rest = make()
    trainer = Trainer(model)
    plan = jm.plan(trainer.step, batch, *rest)
    assert plan.record.step == "step"
    assert plan.record.signature[0][0] == "self.model.layers[0].weight"
    plain = [each for each in plan.candidates if each.policy.remat == "none"]
    memory = jm.step_memory(jm.jit_step(trainer.step, plan.policy), batch, *rest)
    assert memory.step_bytes == pytest.approx(plain[0].step_bytes, abs=64)
    assert len(jm.jit_step(trainer.step, plan.policy)(batch, *rest)) == 3


def test_a_module_is_an_argument_and_no_constant() -> None:
    module = eqx.nn.MLP(256, 256, 256, 2, key=jax.random.key(0))
    plan = jm.plan(eqx.filter_jit(module), jax.numpy.ones(256), search={"remat": False})
    assert plan.record.step == "MLP"
    assert plan.record.signature[0][0] == "self.layers[0].weight"
    assert plan.chosen.argument_bytes is not None
    assert plan.chosen.argument_bytes > 3 * 256 * 256 * 4
    assert not plan.chosen.constant_bytes


def test_what_donates_is_a_step_of_this_library() -> None:
    """Equinox's jit donates all arguments or all but the first, the batch and what other steps use among them."""
    memory = jm.step_memory(eqx.filter_jit(train_step), *make())
    line = 'Write jm.jit_step(train_step, "donate").'
    assert any("returned updated and not donated" in words and line in words for words in memory.warnings)
    for donate, donated in (("auto", ("model", "opt_state")), (("model",), ("model",))):
        step = jm.jit_step(eqx.filter_jit(train_step), jm.StepPolicy(donate=donate))
        batch, *rest = make()
        step(batch, *rest)
        assert step.donated == donated
        assert not batch.is_deleted()


def test_a_call_that_cannot_be_made_is_told_by_name() -> None:
    step = eqx.filter_jit(train_step)
    with pytest.raises(ValueError, match=r"no keyword 'budgt', and neither has train_step\. Did you mean `budget`"):
        jm.plan(step, *make(), budgt="1GiB")
    with pytest.raises(ValueError, match=r"other arguments than train_step takes: missing a required argument"):
        jm.plan(step, *make()[:-1])


def test_shapes_and_a_step_that_jm_jit_step_wrapped() -> None:
    shapes = eqx.filter_eval_shape(lambda: make()[:-1])
    step = jm.jit_step(eqx.filter_jit(train_step, donate="all-except-first"))
    plan = jm.plan(step, *shapes, make()[-1], budget="1KiB")
    assert plan.policy.remat == "full"
    under_remat = jm.jit_step(eqx.filter_jit(train_step), jm.StepPolicy(remat="full"))
    with pytest.raises(
        ValueError, match=r"is already under remat='full'\. Plan train_step, the function that you wrote"
    ):
        jm.plan(under_remat, *make())


@pytest.mark.targets
def test_an_absent_gpu() -> None:
    needs_compiler("h100_sxm")
    step = eqx.filter_jit(train_step, donate="all-except-first")
    batch, model, opt_state, key, optimizer = make()
    plan = jm.plan(
        step, batch, model, opt_state, optimizer=optimizer, key=key,
        target="h100_sxm:2", search={"sharding": "fsdp", "remat": False},
    )  # fmt: skip
    assert plan.record.mesh == {"fsdp": 2}
    (one,) = plan.candidates
    memory = jm.step_memory(step, *make(), target="h100_sxm")
    rows = {row.name: row for row in memory.arguments}
    assert rows["model"].donated_bytes == rows["model"].bytes > 0
    assert rows["batch"].donated_bytes == 0
    assert one.argument_bytes is not None
    assert memory.program.argument_bytes is not None
    assert 0.45 < one.argument_bytes / memory.program.argument_bytes < 0.6


def test_a_plan_in_which_nothing_fits_sees_the_state_beside_functions_of_the_model() -> None:
    """Whether the state could wait on the host is asked of a model whose leaves are not all arrays."""
    needs_compiler("h100_sxm")
    batch, model, opt_state, key, optimizer = make()
    plan = jm.plan(
        eqx.filter_jit(train_step), batch, model, opt_state, optimizer=optimizer, key=key,
        target="h100_sxm", budget="10KiB", search={"remat": False},
    )  # fmt: skip
    assert not plan.record.candidates[plan.record.chosen].fits
