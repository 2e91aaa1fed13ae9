"""Compiled functions by name: operations of JAX and helpers of libraries are no steps, and what the user jitted may be one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback

from jaxmem_callbacks.probes.compiled_names import made_by_user
from jaxmem_callbacks.probes.programs import ProgramsProbe

OPERATIONS: dict[str, Callable[[jax.Array], object]] = {
    "while": lambda x: jax.lax.while_loop(lambda v: v.sum() < 1e3, lambda v: v * 2, x),
    "reduce_window_sum": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2,), (1,), "SAME"),
    "io_callback": lambda x: io_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "tree_bias_correction": lambda x: optax.adam(1e-3).update({"a": x}, optax.adam(1e-3).init({"a": x})),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_outside_of_jit_is_no_program_of_the_users(name: str):
    compiled: list[str] = []

    def hear(event: str, _: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(details["fun_name"]))

    probe = ProgramsProbe()
    probe.start()
    jax.monitoring.register_event_duration_secs_listener(hear)
    OPERATIONS[name](jnp.ones(61))
    jax.monitoring.unregister_event_duration_listener(hear)
    probe.stop()
    assert any(name in each for each in compiled), "or the test shows nothing"
    assert probe.drain(settle_s=0.0) == ()


def test_a_jitted_function_of_a_library_is_no_step_and_one_of_an_installed_package_may_be(
    monkeypatch: pytest.MonkeyPatch,
):
    def part_of_a_library(x: jax.Array) -> jax.Array:
        return x + 1

    def step_of_a_package(x: jax.Array) -> jax.Array:
        return x + 1

    for name, function in (("equinox._parts", part_of_a_library), ("my_training.steps", step_of_a_package)):
        module = types.ModuleType(name)
        module.jitted = jax.jit(function)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert not made_by_user("part_of_a_library")
    assert made_by_user("step_of_a_package")


def test_names_that_users_give_to_steps_are_theirs():
    for name in ("train_step", "step", "update", "update_fn", "train", "loss", "loss_fn", "eval_step", "sgd", "init"):
        assert made_by_user(name), name
