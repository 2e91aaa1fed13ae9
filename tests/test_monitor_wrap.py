"""`monitor.wrap(step)`: a loop without hooks calls the monitor, and its step stays what it was."""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat import trace_state
from jaxmem_callbacks.records.presets import MonitorSettings
from tests.watching import SETTINGS, NotingMonitor, assert_written, told

pytestmark = pytest.mark.core

STEPS, WIDTH = 6, 4


def update(state: Any, batch: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda state: ((batch @ state) ** 2).mean())(state)
    return state - 0.1 * grad, {"loss": loss}


def package_loop(step: Callable[..., Any]) -> tuple[np.ndarray, list[float]]:
    """A training as a package has it: it takes no hooks."""
    state, losses = jnp.full((WIDTH, 1), 0.5), []
    for batch in jax.random.normal(jax.random.key(0), (STEPS, 8, WIDTH)):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.asarray(state), losses


@pytest.mark.parametrize("jitted", [jax.jit(update), jax.jit(update, donate_argnums=0), eqx.filter_jit(update), update])
def test_a_loop_without_hooks_trains_as_before_and_its_steps_are_counted(jitted: Any, tmp_path: Path) -> None:
    without, losses = package_loop(jitted)
    with NotingMonitor(tmp_path) as monitor:
        state, watched = package_loop(monitor.wrap(jitted))
    assert np.array_equal(state, without)
    assert watched == losses
    assert losses[0] > losses[-1]
    assert_written(monitor, range(STEPS))


def big_vision_loop(lines: str, **names: Any) -> list[float]:
    """As big_vision's `train.py`: one jitted `update_fn` that donates its state, under the profiler's annotation of each step.

    Args:
        lines: Run below the jit.
        names: What they use.
    """
    optimizer = optax.adam(0.1)

    def update_fn(train_state: Any, rng: jax.Array, batch: Any) -> Any:
        params, opt = train_state["params"], train_state["opt"]
        noise = 1e-3 * jax.random.normal(rng, batch["image"].shape)
        loss, grads = jax.value_and_grad(lambda p: ((batch["image"] + noise) @ p["w"] - batch["labels"]).var())(params)
        updates, opt = optimizer.update(grads, opt, params)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, {"training_loss": loss}

    update_fn = jax.jit(update_fn, donate_argnums=0)
    scope = {"update_fn": update_fn, **names}
    exec(lines, scope)  # noqa: S102 - the page's line
    update_fn = scope["update_fn"]
    params = {"w": jnp.full((WIDTH, 1), 0.5)}
    train_state, losses = {"params": params, "opt": optimizer.init(params)}, []
    images = jax.random.normal(jax.random.key(0), (STEPS, 8, WIDTH))
    rng_loop = jax.random.key(1)
    for step, image in zip(range(1, STEPS + 1), images, strict=True):
        with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
            rng_loop, rng = jax.random.split(rng_loop)
            train_state, measurements = update_fn(train_state, rng, {"image": image, "labels": image[:, :1]})
            losses.append(float(measurements["training_loss"]))
    return losses


def test_the_pages_line_for_a_loop_as_big_visions_is_pasted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text()
    (line,) = re.findall(r"`(update_fn = [^`]*)`", page)
    without = big_vision_loop("")
    with NotingMonitor(tmp_path) as monitor:
        assert big_vision_loop(line, monitor=monitor) == without
    assert without[-1] < without[0]
    assert_written(monitor, range(STEPS))


def test_the_number_may_come_from_the_arguments_as_they_were_before_the_call(tmp_path: Path) -> None:
    """As in MaxText, whose iteration takes a dictionary with the number of the step."""

    def iteration(variables: dict[str, Any], *, config: str) -> str:
        variables["step"] += 100
        return config

    with NotingMonitor(tmp_path) as monitor:
        wrapped = monitor.wrap(iteration, step=lambda variables, config: variables["step"])
        assert [wrapped({"step": step}, config="a") for step in (7, 8, 9)] == ["a"] * 3
    assert monitor.steps == [7, 8, 9]


def test_inside_a_trace_nothing_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with NotingMonitor(tmp_path) as monitor:
        inner = monitor.wrap(jax.jit(jnp.sin))
        outer = jax.jit(lambda x: inner(x) + inner(1.0))  # the second call has no tracer among its arguments
        assert float(outer(0.0)) == pytest.approx(np.sin(1.0))
        assert jax.grad(inner)(0.0) == 1.0
        assert jax.vmap(inner)(jnp.zeros(2)).shape == (2,)
        assert jax.eval_shape(inner, 0.0).shape == ()
        assert monitor.steps == []
        assert float(inner(0.0)) == 0.0
        assert monitor.steps == [0]
    (line,) = told(capfd)
    assert line == (
        "jaxmem: sin was called inside a trace, where no step runs, and is not counted there. Where no step is counted at all, "
        "wrap the jitted function and not the one that is jitted."
    )


def test_without_jaxs_own_answer_the_arguments_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace_state, "_TRACES_NOTHING", None)
    with NotingMonitor(tmp_path) as monitor:
        wrapped = monitor.wrap(jax.jit(lambda state: state["x"] + 1))
        assert jax.jit(lambda x: wrapped({"x": x}))(1.0) == 2.0
        assert monitor.steps == []
        assert wrapped({"x": 1.0}) == 2.0
        assert monitor.steps == [0]


def test_it_stands_for_the_function_that_it_wraps(tmp_path: Path) -> None:
    jitted = jax.jit(update)
    with NotingMonitor(tmp_path) as monitor:
        wrapped: Any = monitor.wrap(jitted)
        given = jnp.ones((WIDTH, 1)), jnp.ones((8, WIDTH))
        assert wrapped.lower(*given).as_text() == jitted.lower(*given).as_text()
        assert wrapped.trace(*given).jaxpr.jaxpr.eqns
        assert (wrapped.__name__, wrapped.__module__) == ("update", __name__)
        assert inspect.signature(wrapped) == inspect.signature(update)
        assert copy.copy(wrapped).lower is not None
        with pytest.raises(AttributeError, match="no_such_thing"):
            wrapped.no_such_thing  # noqa: B018 - it is asked for
        assert monitor.steps == []


def test_in_a_class_it_is_a_method_where_the_function_is_one(tmp_path: Path) -> None:
    with NotingMonitor(tmp_path) as monitor:

        class Other:
            def doubled(self, x: float) -> tuple[Any, float]:
                return self, 2 * x

        class Trainer:
            number = 5

            @monitor.wrap
            def step(self, x: float) -> tuple[Any, float]:
                return self, x

            static = monitor.wrap(staticmethod(lambda x: x))
            of_another = monitor.wrap(Other().doubled)
            partial = monitor.wrap(jax.tree_util.Partial(lambda x: x))
            jitted = monitor.wrap(jax.jit(lambda self, x: x + 1, static_argnums=0))
            numbered = monitor.wrap(lambda self: None, step=lambda self: self.number)

        trainer = Trainer()
        assert trainer.step(1.0) == (trainer, 1.0)
        assert Trainer.step(trainer, 2.0) == (trainer, 2.0)
        assert (trainer.static(3.0), trainer.partial(4.0)) == (3.0, 4.0)
        assert trainer.of_another(3.0)[1] == 6.0
        assert trainer.jitted(5) == 6
        assert trainer.jitted.lower(trainer, 5) is not None, "as of a method that jax.jit made"
        trainer.numbered()
        assert isinstance(trainer.step, types.MethodType)
    assert monitor.steps == [0, 1, 0, 0, 0, 0, 5]


def test_a_step_of_flax_nnx_changes_its_model_in_place(tmp_path: Path) -> None:
    @nnx.jit
    def grow(model: nnx.Linear) -> None:
        model.kernel[...] += 1.0

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    with NotingMonitor(tmp_path) as monitor:
        monitor.wrap(grow)(model)
    assert np.allclose(np.asarray(model.kernel[...]), before + 1)
    assert monitor.steps == [0]


def test_what_the_function_raises_is_the_callers_and_counts_as_no_step(tmp_path: Path) -> None:
    def failing(x: float) -> float:
        msg = f"no {x}"
        raise KeyError(msg)

    with NotingMonitor(tmp_path) as monitor:
        with pytest.raises(KeyError, match="no 3"):
            monitor.wrap(failing)(3)
        assert monitor.steps == []


def test_a_number_that_raises_is_reported_once_and_calls_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[int] = []
    with jm.MemoryMonitor(MonitorSettings(window_s=0.02), writer=lambda step, scalars: steps.append(step)) as monitor:
        wrapped = monitor.wrap(jax.jit(jnp.cos), step=lambda x: {}["step"])
        assert [float(wrapped(0.0)) for _ in range(3)] == [1.0] * 3
        monitor.flush()
    assert steps[-1] == 2
    (line,) = told(capfd)
    assert line == "jaxmem: the step's number of cos is switched off for the rest of the run: KeyError: 'step'"


def test_a_number_on_the_device_is_not_read(capfd: pytest.CaptureFixture[str]) -> None:
    with jm.MemoryMonitor(MonitorSettings(window_s=0.02)) as monitor:
        wrapped = monitor.wrap(jax.jit(lambda step: step + 1), step=lambda step: step)
        assert int(wrapped(jnp.int32(4))) == 5
    (line,) = told(capfd)
    assert "the step was given as a jax.Array, and reading it would wait for the device" in line


def test_after_the_monitor_was_closed_the_step_goes_on() -> None:
    with jm.MemoryMonitor(SETTINGS) as monitor:
        wrapped = monitor.wrap(jax.jit(jnp.cos))
    assert float(wrapped(0.0)) == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (3,),
            r"MemoryMonitor\.wrap: train_step=3 is of type int\. Expected a jitted step, or a function that runs one",
        ),
        ((None,), r"MemoryMonitor\.wrap: train_step=None is None\. Expected a jitted step"),
        ((update, 3), r"MemoryMonitor\.wrap: step=3 is of type int\. Expected a function of the step's arguments that"),
        ((update, True), r"step=True is of type bool\. Expected a function"),
    ],
)
def test_what_cannot_be_called_is_refused(given: Any, message: str) -> None:
    with jm.MemoryMonitor(SETTINGS) as monitor, pytest.raises(TypeError, match=message):
        monitor.wrap(*given)
