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
from tests.pasting import pasted, value

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


# recompilation.rows, dtype, static: a loop, and the same as printed


def printed_of(step: Any, args: Callable[[int], tuple[Any, ...]]) -> str:
    run = Run()
    (event,), compiled = events_of(lambda index: run.do(step, *args(index)))
    assert compiled >= 1
    return event.action


def assert_compiled_once(step: Any, args: Callable[[int], tuple[Any, ...]]) -> None:
    run, given = Run(), [args(index) for index in range(6)]  # what is cast is compiled before
    assert events_of(lambda index: run.do(step, *given[index])) == ([], 0)


class Rows:
    def rows_method(self, params: Any, batch: Any) -> Any:
        return update(params, batch["x"], 1.0)


def padded(rows: Any) -> Any:
    return np.pad(rows, ((0, len(X) - len(rows)), (0, 0)))


SHORTER = {
    "dropped": (once_step, lambda index: (X[:3] if index == 5 else X, 1.0), lambda _: (X, 1.0), "x"),
    "padded": (
        functools.partial(once_step, scale=1.0),
        lambda index: (X[:3] if index % 2 else X,),
        lambda index: (padded(X[:3]) if index % 2 else X,),
        "x",
    ),
    "of a method": (
        Rows().rows_method,
        lambda index: ({"x": X[:3] if index == 5 else X},),
        lambda index: ({"x": padded(X[:3]) if index == 5 else X},),
        "batch['x']",
    ),
}


def test_what_grows_is_kept_at_its_larger_shape() -> None:
    printed = printed_of(
        jm.jit_step(functools.partial(once_step, scale=1.0)), lambda index: (X if index > 3 else X[:3],)
    )
    assert pasted("recompilation.rows", printed).startswith("Keep x at float32[16,8]:")


@pytest.mark.parametrize("kind", SHORTER)
def test_arrays_that_keep_their_shapes_compile_once(kind: str) -> None:
    function, args, constant, name = SHORTER[kind]
    line = pasted("recompilation.rows", printed_of(jm.jit_step(function), args))
    assert line.startswith(f"Keep {name} at float32[16,8]:")
    assert_compiled_once(jm.jit_step(function), constant)


class Scaled:
    def scaled_method(self, params: Any, scale: Any) -> Any:
        return update(params, X, scale)


OTHER_DTYPES = {
    "a Python number": (once_step, lambda index: (X, 2 if index > 3 else 0.5), "scale"),
    "an array": (
        functools.partial(once_step, scale=1.0),
        lambda index: (X.astype(jnp.bfloat16) if index > 3 else X,),
        "x",
    ),
    "of a method": (Scaled().scaled_method, lambda index: (1.0 if index > 3 else 1,), "scale"),
}


@pytest.mark.parametrize("kind", OTHER_DTYPES)
def test_an_argument_of_one_dtype_compiles_once(kind: str) -> None:
    function, args, name = OTHER_DTYPES[kind]
    line = pasted("recompilation.dtype", printed_of(jm.jit_step(function), args))

    def cast(index: int) -> tuple[Any, ...]:
        *others, given = args(index)
        return (*others, value(line, jnp=jnp, **{name: given}))

    assert_compiled_once(jm.jit_step(function), cast)


def scheduled(params: Any, x: Any, rate: Any) -> Any:
    return update(params, x, rate)


class Scheduled:
    def scheduled_method(self, params: Any, rate: Any) -> Any:
        return update(params, X, rate)


STATIC = {
    "a function": (scheduled, {"static_argnames": "rate"}, lambda index: (X, 1.0 / (index // 3 + 1))),
    "a method": (Scheduled().scheduled_method, {"static_argnums": 1}, lambda index: (index // 4,)),
    "a partial": (
        functools.partial(once_step, x=X),
        {"static_argnames": ("scale",)},
        lambda index: {"scale": 0.5 * (index > 4)},
    ),
}


@pytest.mark.parametrize("kind", STATIC)
def test_what_is_static_no_more_compiles_once(kind: str) -> None:
    function, options, given = STATIC[kind]

    def doing(step: Any, arrays: Callable[[Any], Any]) -> Callable[[int], None]:
        run, made = Run(), step
        if kind == "a partial":
            return lambda index: run.do(lambda params, scale: made(params, scale=scale), arrays(given(index)["scale"]))
        return lambda index: run.do(made, *(arrays(each) if each is not X else X for each in given(index)))

    (event,), _ = events_of(doing(jm.jit_step(jax.jit(function, **options)), lambda number: number))
    line = pasted("recompilation.static", event.action)
    assert (
        line
        == f"Take {'scale' if kind == 'a partial' else 'rate'} out of the static arguments, and pass it as an array."
    )
    assert events_of(doing(jm.jit_step(jax.jit(function)), jnp.float32)) == ([], 0)


def test_what_changes_otherwise_is_asked_about() -> None:
    step, run = jm.jit_step(jax.jit(lambda params, x, how: update(params, x, 1.0), static_argnames="how")), Run()
    (event,), _ = events_of(lambda index: run.do(step, X, "late" if index > 3 else "early"))
    assert event.action.endswith("Must how change from step to step?")
    step = jm.jit_step(lambda params, batch: update(params, batch["x"], 1.0))
    (event,), _ = events_of(lambda index: run.do(step, {"x": X, "y": X} if index > 3 else {"x": X}))
    assert event.action.startswith("Does the tree of the arguments change")
