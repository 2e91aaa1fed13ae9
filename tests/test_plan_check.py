"""A plan at run time: predicted beside compiled, one event when it is about something else, none when it is right."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.analysis.run_summary import MetricAvailability
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.planning.sharding_candidates import spread
from jaxmem_callbacks.programs.steps.program import flags_now
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.protocol import LoggedTable

pytestmark = pytest.mark.core


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = jm.value_and_grad(lambda p, x: (jnp.tanh(x @ p) ** 2).mean())(params, batch)
    return params - grads, loss


def arguments(rows: int = 8, width: int = 4) -> tuple[Any, Any]:
    return jnp.ones((width, width)), jnp.ones((rows, width))


@pytest.fixture(scope="module")
def plan() -> jm.Plan:
    return jm.plan(train_step, *arguments(), budget="1GiB")


def watched(plan: Any, *args: Any, step: Any = None) -> tuple[jm.MemoryMonitor, jm.CollectingWriter]:
    """Two steps under a monitor that knows the plan."""
    writer = jm.CollectingWriter()
    step = jm.jit_step(train_step) if step is None else step
    with jm.MemoryMonitor(
        jm.load_preset("monitor_only", monitor={"on_error": "raise"}), writer=writer, plan=plan
    ) as monitor:
        params, batch = args
        for index in range(2):
            params, _ = step(params, batch)
            monitor(index)
    return monitor, writer


def test_a_plan_that_is_right_is_shown_beside_what_was_compiled(plan: jm.Plan) -> None:
    monitor, writer = watched(plan, *arguments())
    assert monitor.events == ()
    table = [record for record in writer.records if isinstance(record, LoggedTable)][-1]
    (row,) = [row for row in table.rows if row[0] == "plan of train_step"]
    assert "predicted" in row[1]
    assert row[3] == "+0.0%"


@pytest.mark.parametrize(("peaks", "measured"), [((), ""), ((None,), ""), ((600, 900), ", 900 B measured")])
def test_what_the_allocator_measured_stands_beside_both(
    plan: jm.Plan, peaks: tuple[int | None, ...], measured: str
) -> None:
    known, nothing = (
        MetricAvailability(plan=plan.record),
        dict.fromkeys(("output_bytes", "alias_bytes", "temp_bytes"), 0),
    )
    readings = tuple(
        Reading(
            source="allocator", device=f"gpu:{place}", step=3, time_s=0.0, in_use_bytes=5, peak_bytes_since_start=peak
        )
        for place, peak in enumerate(peaks)
    )
    memory = ProgramMemory(name="train_step", platform="gpu", target="attached", argument_bytes=1000, **nothing)
    compilation = Compilation(program="train_step", time_s=0.0, signature=(), memory=memory)
    compiled = (Compiled(step=3, compilation=compilation),)
    known.learn(Observation(step=3, time_s=0.0, readings=readings, compilations=compiled))
    (row,) = (row for row in known.rows() if row.figure == "plan of train_step")
    predicted = plan.chosen.step_bytes or 0
    assert row.latest == f"{format_bytes(predicted)} predicted, 1000 B compiled{measured}"
    assert (f"{900 / predicted - 1:+.1%} measured" in row.text) is bool(measured)


@pytest.mark.parametrize(
    ("change", "rows", "words"),
    [
        ({}, 5, r"is stale: batch: float32\[8,4\] -> float32\[5,4\]"),
        ({"versions": {"jax": "0.4.0"}}, 8, r"is stale: jax 0.4.0 -> "),
        ({"target": "h100_sxm", "platform": "cuda"}, 8, r"is stale: planned for h100_sxm, running on cpu"),
        ({"device_kind": "NVIDIA A100"}, 8, r"is stale: planned for NVIDIA A100, running on cpu"),
        ({"device_count": 4, "mesh": {"fsdp": 4}}, 8, r"is stale: devices 4 -> 1\."),
        ({"process_flags": {"xla_cpu_x": "1"}}, 8, r"is stale: xla_cpu_x 1 -> unset\."),
    ],
)
def test_a_plan_about_something_else_is_stale_once(plan: jm.Plan, change: Any, rows: int, words: str) -> None:
    record: PlanRecord = dataclasses.replace(plan.record, **change)
    monitor, _ = watched(record, *arguments(rows))
    (event,) = monitor.events
    assert event.kind == "plan_stale"
    assert re.search(words, event.message), event.message
    assert "Plan train_step again" in event.action


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_plan_of_a_step_with_static_arguments_is_right(*, is_jitted: bool) -> None:
    def named_step(params: Any, batch: Any, how: str) -> Any:
        loss, grads = jm.value_and_grad(lambda p, x: (getattr(jnp, how)(x @ p) ** 2).mean())(params, batch)
        return params - grads, loss

    step = jax.jit(named_step, static_argnames="how") if is_jitted else named_step
    plan, made = jm.plan(step, *arguments(), "tanh", budget="1GiB"), jm.jit_step(step)
    monitor, _ = watched(plan, *arguments(), step=lambda params, batch: made(params, batch, "tanh"))
    assert monitor.events == ()


def test_another_loss_of_the_same_shapes_and_another_policy_are_stale_once(plan: jm.Plan) -> None:
    def other(params: Any, batch: Any) -> Any:
        loss, grads = jm.value_and_grad(lambda p, x: (jnp.sin(x @ p) ** 2).mean())(params, batch)
        return params - grads, loss

    other.__name__ = "train_step"
    for step in (jm.jit_step(other), jm.jit_step(train_step, jm.StepPolicy(remat="full"))):
        (event,) = watched(plan, *arguments(), step=step)[0].events
        assert event.kind == "plan_stale"
        assert "is stale: the step has other operations than the planned one under its policy" in event.message


def test_a_sharded_plan_is_right_for_its_step_and_stale_on_another_mesh() -> None:
    wide = arguments(width=256)
    plan = jm.plan(train_step, *wide, budget="1GiB", search={"sharding": "fsdp", "remat": False})
    absent = AbstractMesh((8,), ("fsdp",), (AxisType.Auto,))
    problem = Problem(train_step=train_step, args=wide, kwargs={}, target=None, budget=budget_for("1GiB", None))
    traced = problem.step(problem.base).traced(problem.args, {})
    divided = Compiler(spread(problem, traced, absent, "fsdp", [].append))
    assert divided.plain.operations == plan.chosen.operations, "the same step for devices that are not there"
    for axes, told in (({"fsdp": 8}, ""), ({"data": 8}, "is stale: mesh fsdp=8 -> data=8.")):
        mesh = jm.make_mesh(axes)
        params, batch = wide
        with jax.set_mesh(mesh):
            params = jax.device_put(params, jm.infer_shardings(params, mesh, plan.policy))
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(tuple(axes))))
            monitor, _ = watched(plan, params, batch, step=jm.jit_step(train_step, plan.policy))
        assert [told in event.message for event in monitor.events] == [True] * bool(told), monitor.events


def test_flags_that_change_no_program_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_cpu_x=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_y")
    assert flags_now() == {"xla_cpu_x": "1", "xla_tpu_y": ""}


def test_the_kind_of_a_target_is_what_jax_calls_its_devices() -> None:
    figures = 'gpu_device_info {}\ndevice_description_str: "NVIDIA H200 141GB HBM3e"'
    assert Target(name="h200", platform="cuda", device_count=1, target_config=figures).device_kind.startswith(
        "NVIDIA H200 "
    )
    assert Target(name="v5e:2x2", platform="tpu", device_count=4).device_kind == ""


def test_bytes_that_are_off_are_told_with_both_figures(plan: jm.Plan) -> None:
    (only,) = {plan.chosen}
    wrong = dataclasses.replace(only, step_bytes=only.step_bytes * 2)
    candidates = tuple(wrong if each is only else each for each in plan.candidates)
    monitor, _ = watched(dataclasses.replace(plan.record, candidates=candidates), *arguments())
    (event,) = monitor.events
    assert event.kind == "prediction_off"
    assert event.figures["predicted_bytes"] == 2 * event.figures["compiled_bytes"]
    assert "-50.0%" in event.message


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got dict as plan. Expected a plan of jm.plan"):
        jm.MemoryMonitor(plan={})
