"""What events advise: each is triggered in a training, the advice is followed, and the event is gone for the right reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.steps.registry import compiles, watch_compiles
from tests.pasting import pasted

pytestmark = pytest.mark.core
SETTINGS = jm.load_preset("monitor_only", monitor={"scan_s": 0.02, "window_s": 0.02, "growth_steps": 50}).monitor


def events_of(loop: Callable[[int], Any], *, steps: int = 6) -> tuple[list[Any], int]:
    """The recompilations that a monitor tells of a training, and how often it compiled after its first step."""
    watch_compiles()
    with jm.MemoryMonitor(SETTINGS) as monitor:
        for index in range(steps):
            loop(index)
            monitor(index)
            if index == 0:
                before = compiles.count
    return [event for event in monitor.events if event.kind == "recompilation"], compiles.count - before


def update(params: Any, x: Any, scale: Any) -> tuple[Any, Any]:
    value, gradients = jm.value_and_grad(lambda p: scale * jnp.mean((x @ p) ** 2))(params)
    return params - 1e-3 * gradients, value


class Run:
    """A run's parameters, and what a loop does with them."""

    def __init__(self) -> None:
        self.params = jnp.ones((8, 4))
        self.losses: list[float] = []

    def do(self, step: Callable[..., Any], *rest: Any) -> None:
        self.params, value = step(self.params, *rest)
        self.losses.append(float(value))


X = np.ones((16, 8), np.float32)


# recompilation.jit_once: how a loop makes its step anew, and the same step made once


def factory(scale: float) -> Any:
    def anew_step(params: Any, x: Any) -> Any:
        return update(params, x, scale)

    return anew_step


def plain_factory(scale: float) -> Any:
    def plain_anew_step(params: Any, x: Any) -> Any:
        return update(params, x, scale)

    return plain_anew_step


class Plain:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def plain_anew_method(self, params: Any, x: Any) -> Any:
        return update(params, x, self.scale)


class Bound:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def anew_method(self, params: Any, x: Any) -> Any:
        return update(params, x, self.scale)


def once_step(params: Any, x: Any, scale: Any) -> Any:
    return update(params, x, scale)


ANEW = {
    "jm.jit_step of a factory's": lambda scale: jm.jit_step(factory(scale)),
    "jm.jit_step of a lambda": lambda scale: jm.jit_step(lambda params, x: update(params, x, scale)),
    "jm.jit_step of a method": lambda scale: jm.jit_step(Bound(scale).anew_method),
    "jm.jit_step of a partial": lambda scale: jm.jit_step(functools.partial(once_step, scale=scale)),
    "jm.jit_step of what jax.jit makes anew": lambda scale: jm.jit_step(jax.jit(factory(scale))),
    "jax.jit of a factory's": lambda scale: jax.jit(plain_factory(scale)),
    "jax.jit of a method": lambda scale: jax.jit(Plain(scale).plain_anew_method),
}


@pytest.mark.parametrize("kind", ANEW)
def test_a_step_made_anew_is_made_once(kind: str) -> None:
    anew, once = Run(), Run()
    events, compiled = events_of(lambda index: anew.do(ANEW[kind](1.0 + index), X))
    assert len(events) == 1, "told once"
    assert compiled >= 5
    assert "Make it once, above the loop" in pasted("recompilation.jit_once", events[0].action)
    step = (jax.jit if kind.startswith("jax.jit") else jm.jit_step)(once_step)
    events, compiled = events_of(lambda index: once.do(step, X, jnp.float32(1.0 + index)))
    assert (events, compiled) == ([], 0), "no event, since nothing is compiled"
    np.testing.assert_allclose(once.losses, anew.losses, rtol=1e-5)


def test_steps_of_one_name_that_are_made_together_are_not_made_anew() -> None:
    def many(index: int) -> None:
        for _ in range(4 if index == 1 else 1):
            jm.jit_step(factory(1.0))(jnp.ones((8, 4)), X)

    events, _ = events_of(many, steps=2)
    assert events == []


# recompilation.learn


def shape_of(index: int) -> Any:
    return X[:8] if index > 3 else X


def learning_step(params: Any, x: Any) -> Any:
    return update(params, x, 1.0)


def learning_partial(scale: float, params: Any, x: Any) -> Any:
    return update(params, x, scale)


class Learning:
    def learning_method(self, params: Any, x: Any, scale: Any) -> Any:
        return update(params, x, scale)


LEARNT = {
    "a function": (jax.jit(learning_step), lambda index: (shape_of(index),), "x"),
    "a partial": (jax.jit(functools.partial(learning_partial, 2.0)), lambda index: (shape_of(index),), "x"),
    "a method": (jax.jit(Learning().learning_method), lambda index: (X, 1.0 if index > 3 else 1), "scale"),
}


@pytest.mark.parametrize("kind", LEARNT)
def test_a_wrapped_step_names_the_argument_that_changed(kind: str) -> None:
    jitted, args, name = LEARNT[kind]
    run = Run()
    (event,), _ = events_of(lambda index: run.do(jitted, *args(index)))
    assert "jm.jit_step, above the loop" in pasted("recompilation.learn", event.action)
    jax.clear_caches()
    wrapped = jm.jit_step(jitted)
    (event,), _ = events_of(lambda index: run.do(wrapped, *args(index)))
    assert f"Changed: {name}: " in event.message
    assert "Is it" not in event.action


# recompilation.constant_shapes: a loop, and the same with constant shapes and dtypes

CHANGED = {
    "a shorter batch, dropped": (lambda index: (X[:3] if index == 5 else X, 1.0), lambda index: (X, 1.0)),
    "a shorter batch, padded": (
        lambda index: (X[:3] if index % 2 else X, 1.0),
        lambda index: (np.pad(X[:3], ((0, 13), (0, 0))) if index % 2 else X, 1.0),
    ),
    "a Python number": (
        lambda index: (X, 2 if index > 3 else 0.5),
        lambda index: (X, jnp.float32(2 if index > 3 else 0.5)),
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_constant_shapes_compile_once(kind: str) -> None:
    args, constant = CHANGED[kind]
    run, step = Run(), jm.jit_step(once_step)
    (event,), compiled = events_of(lambda index: run.do(step, *args(index)))
    assert compiled >= 1
    pasted("recompilation.constant_shapes", event.action)
    step = jm.jit_step(once_step)
    events, compiled = events_of(lambda index: run.do(step, *constant(index)))
    assert (events, compiled) == ([], 0)
