"""A plan at run time: predicted beside compiled, one event when it is about something else, none when it is right."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.writers.protocol import Table

pytestmark = pytest.mark.core


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = jm.value_and_grad(lambda p, x: (jnp.tanh(x @ p) ** 2).mean())(params, batch)
    return params - grads, loss


def arguments(rows: int = 8) -> tuple[Any, Any]:
    return jnp.ones((4, 4)), jnp.ones((rows, 4))


@pytest.fixture(scope="module")
def plan() -> jm.Plan:
    return jm.plan(train_step, *arguments(), budget="1GiB")


def watched(plan: Any, *args: Any) -> tuple[jm.MemoryMonitor, jm.CollectingWriter]:
    """Two steps under a monitor that knows the plan."""
    writer = jm.CollectingWriter()
    step = jm.jit_step(train_step)
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
    table = [record for record in writer.records if isinstance(record, Table)][-1]
    (row,) = [row for row in table.rows if row[0] == "plan of train_step"]
    assert "predicted" in row[1]
    assert row[3] == "+0.0%"


@pytest.mark.parametrize(
    ("change", "rows", "words"),
    [
        ({}, 5, r"is stale: batch: float32\[8,4\] -> float32\[5,4\]"),
        ({"versions": {"jax": "0.4.0"}}, 8, r"is stale: jax 0.4.0 -> "),
        ({"target": "h100_sxm", "platform": "cuda"}, 8, r"is stale: planned for h100_sxm, running on cpu"),
    ],
)
def test_a_plan_about_something_else_is_stale_once(plan: jm.Plan, change: Any, rows: int, words: str) -> None:
    record: PlanRecord = dataclasses.replace(plan.record, **change)
    monitor, _ = watched(record, *arguments(rows))
    (event,) = monitor.events
    assert event.kind == "plan_stale"
    assert re.search(words, event.message), event.message
    assert "Plan again: jm.plan(train_step" in event.action


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
    with pytest.raises(TypeError, match=r"got dict as plan. Expected what jm.plan\(train_step"):
        jm.MemoryMonitor(plan={})
