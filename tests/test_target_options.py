"""Compiler options of the user's own jit reach the compiler of an absent target, and one that it does not know is an error."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat.jit_settings import compiler_options_of
from jaxmem_callbacks.programs.targets.compile import compile_for_target, refuse_unknown_option
from tests.pasting import pasted, run

SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 256, 256), (512, 256))]
# Temporaries of this step on an H100 differ by it.
OPTION = {"xla_gpu_enable_triton_gemm": True}
BOGUS = {"xla_gpu_temp_buffer_use_seperate_color": True}


def train_step(params, batch):
    def loss(params):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)[0] ** 2)

    value, gradients = jm.value_and_grad(loss)(params)
    return params - 0.1 * gradients, value


def jitted(options):
    return jax.jit(train_step, compiler_options=options)


@pytest.mark.core
def test_they_are_read_of_each_jit():
    of_jax, of_equinox = jitted(OPTION), eqx.filter_jit(train_step, compiler_options=OPTION)
    for step in (of_jax, of_equinox, functools.partial(of_jax)):
        assert jm.jit_step(step).compiler_options == OPTION
    for step in (train_step, jax.jit(train_step), eqx.filter_jit(train_step)):
        assert jm.jit_step(step).compiler_options == {}
    assert compiler_options_of(object()) == {}


@pytest.mark.targets
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_they_count_as_if_set_by_hand(jit):
    by_hand = compile_for_target(train_step, SHAPES, target="h100_sxm", compiler_options=OPTION).memory
    plain = compile_for_target(train_step, SHAPES, target="h100_sxm").memory
    memory = jm.step_memory(jm.jit_step(jit(train_step, compiler_options=OPTION)), *SHAPES, target="h100_sxm").program
    assert by_hand.step_bytes != plain.step_bytes
    assert (memory.step_bytes, memory.temp_bytes) == (by_hand.step_bytes, by_hand.temp_bytes)


@pytest.mark.targets
def test_one_that_there_is_not_is_named_with_the_nearest():
    expected = "'xla_gpu_temp_buffer_use_seperate_color'. Did you mean `xla_gpu_temp_buffer_use_separate_color`"
    for jit in (jax.jit, eqx.filter_jit):
        step = jm.jit_step(jit(train_step, compiler_options=BOGUS))
        with pytest.raises(jm.CompileError, match=expected):
            jm.step_memory(step, *SHAPES, target="h100_sxm")
    with pytest.raises(jm.CompileError, match=expected):
        jm.plan(jm.jit_step(jitted(BOGUS)), *SHAPES, target="h100_sxm")
    with pytest.raises(jm.CompileError, match="train_step for the attached cpu: its compiler has no option"):
        jm.plan(jm.jit_step(jitted(BOGUS)), *SHAPES)


@pytest.mark.targets
def test_a_plan_of_the_attached_devices_obeys_them():
    option = {"xla_cpu_enable_concurrency_optimized_scheduler": True}
    plan = jm.plan(jm.jit_step(jitted(option)), *SHAPES)
    truth = jm.step_memory(jm.jit_step(jitted(option)), *SHAPES).step_bytes
    plain = next(each for each in plan.record.candidates if each.policy.remat == "none")
    assert plain.step_bytes == truth


def other_model(weights, batch):
    return weights - 0.1 * jax.grad(lambda weights: jnp.mean(jnp.tanh(batch @ weights) ** 2))(weights)


@pytest.mark.core
@pytest.mark.parametrize(
    "jit", [jax.jit, eqx.filter_jit, lambda step, **options: jm.jit_step(jax.jit(step, **options))]
)
def test_one_that_there_is_not_is_an_error_of_the_attached_devices_too(jit):
    step = jit(other_model, compiler_options={"xla_cpu_enable_fast_mth": True})
    expected = "has no option 'xla_cpu_enable_fast_mth'. Did you mean `xla_cpu_enable_fast_math`"
    with pytest.raises(jm.CompileError, match=f"other_model for the attached cpu: its compiler {expected}"):
        jm.step_memory(step, jnp.ones((8, 8)), jnp.ones((16, 8)))


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("xla_gpu_no_such_thing", ""),
        ("xla_gpu_enable_everything", ""),
        ("xla_tpu_memory", ""),
        ("xla_gpu_enable_triton_gem", " Did you mean `xla_gpu_enable_triton_gemm`?"),
        ("xla_tpu_scoped_vmem_limit", " Did you mean `xla_tpu_scoped_vmem_limit_kib`?"),
    ],
)
def test_only_a_name_that_is_near_is_suggested(name, meant):
    with pytest.raises(jm.CompileError) as refused:
        refuse_unknown_option("train_step", f"INVALID_ARGUMENT: No such compile option: '{name}'")
    assert f"has no option {name!r}.{meant} It comes from" in str(refused.value)


@pytest.mark.core
def test_what_a_step_raises_by_itself_while_it_is_traced_stays_its_own():
    def refusing(weights, batch):
        if weights.shape[0] != batch.shape[1]:
            msg = "weights of another width"
            raise ValueError(msg)
        return other_model(weights, batch)

    with pytest.raises(ValueError, match="weights of another width"):
        jm.step_memory(jax.jit(refusing), jnp.ones((8, 8)), jnp.ones((16, 4)))


def lone(count):
    return jax.device_put(jnp.ones((8, 8)), jax.devices()[count])


def on_a_mesh(count):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
    return jax.device_put(jnp.ones((16, 8)), jax.NamedSharding(mesh, jax.P("data")))


@pytest.mark.core
@pytest.mark.parametrize(
    ("weights", "batch"),
    [
        (lambda: lone(0), lambda: on_a_mesh(4)),
        (lambda: lone(5), lambda: on_a_mesh(2)),
        (lambda: lone(1), lambda: on_a_mesh(8)),
    ],
)
def test_arguments_on_different_devices_are_placed_together(weights, batch):
    step, names = jax.jit(other_model), {"weights": weights(), "batch": batch()}
    with pytest.raises(
        jm.CompileError, match="expected all arguments on the same devices, got argument weights"
    ) as refused:
        jm.step_memory(step, *names.values())
    after = run(pasted("devices.apart", refused.value), jax=jax, **names)
    memory = jm.step_memory(step, after["weights"], after["batch"])
    assert memory.argument_bytes == 8 * 8 * 4 + batch().nbytes // len(batch().sharding.device_set)


@pytest.mark.core
@pytest.mark.parametrize(
    ("weights", "batch"),
    [(lambda: lone(0), lambda: lone(1)), (lambda: {"w": lone(0)}, lambda: on_a_mesh(4))],
    ids=["no mesh", "a part of an argument"],
)
def test_where_no_line_would_do_it_is_a_question(weights, batch):
    step = jax.jit(lambda weights, batch: jax.tree.map(lambda w: other_model(w, batch), weights))
    with pytest.raises(jm.CompileError, match=r"Can they be placed on one mesh, by jax.device_put, before the call\?"):
        jm.step_memory(step, weights(), batch())
