"""Compiled functions by name: operations of JAX and helpers of libraries are no steps, and what the user jitted may be one."""

from __future__ import annotations

import functools
import re
import sys
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback

import jaxmem_callbacks as jm
from jaxmem_callbacks.probes.jax_events import ProgramsProbe, made_by_user
from jaxmem_callbacks.records.presets import MonitorSettings
from tests.processes import until

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


class Calls:
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * 5


NAMELESS: dict[str, Callable[[], Callable[[jax.Array], jax.Array]]] = {
    "a lambda": lambda: jax.jit(lambda x: x * 3),
    "a partial of a lambda": lambda: jax.jit(functools.partial(lambda y, x: x * y, 4.0)),
    "an object": lambda: jax.jit(Calls()),
    "a partial of an object": lambda: jax.jit(functools.partial(Calls())),
}


@pytest.mark.core
@pytest.mark.parametrize("name", NAMELESS)
def test_what_has_no_name_of_its_own_is_told_by_the_line_that_calls_it(name: str):
    probe, other = ProgramsProbe(), jax.jit(lambda x: x - 7)
    probe.start()
    made = NAMELESS[name]()
    for rows in (71, 72):
        made(jnp.ones(rows))
    other(jnp.ones(71))
    probe.stop()
    first, again, apart = [each.program for each in probe.drain(settle_s=0.0)]
    assert first == again
    assert apart != first
    assert re.fullmatch(r"<(?:lambda|unnamed \w+)> \(test_compiled_names\.py:\d+\)", first)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMELESS)
def test_a_recompile_of_what_has_no_name_is_an_event(name: str):
    step = NAMELESS[name]()
    with jm.MemoryMonitor(MonitorSettings(window_s=0.01, scan_s=0.01)) as monitor:
        for number in range(6):
            step(jnp.ones(80 + number // 3))
            monitor(number, {})
            time.sleep(0.02)
        until(lambda: [event for event in monitor.events if event.kind == "recompilation"], seconds=20)
    (event,) = [event for event in monitor.events if event.kind == "recompilation"]
    assert "(test_compiled_names.py:" in event.message
    assert "compiled again (compile 2) at step 3" in event.message


def test_a_lambda_that_a_library_calls_is_no_step(monkeypatch: pytest.MonkeyPatch):
    library = types.ModuleType("optax._parts")
    exec("import jax\njitted = jax.jit(lambda x: x * 9)\ndef call(x):\n    return jitted(x)\n", vars(library))  # noqa: S102 - a library's code
    monkeypatch.setitem(sys.modules, "optax._parts", library)
    probe = ProgramsProbe()
    probe.start()
    library.call(jnp.ones(73))
    probe.stop()
    assert probe.drain(settle_s=0.0) == ()
