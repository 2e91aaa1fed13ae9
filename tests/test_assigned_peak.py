"""What makes a peak, read from what the compiler hands over with the program, equals what it writes in a second compile's dumps.

And it is recorded where a step is compiled: in the run's file, and on the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.reading.assigned import assigned_peak
from jaxmem_callbacks.programs.reading.buffers import Arguments
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.program import argument_buffers, peak_by_totals
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, program_model
from jaxmem_callbacks.writers.report import story_model
from tests import forked

pytestmark = pytest.mark.core
LAYERS, WIDTH, ROWS = 4, 32, 64
Loss = Callable[[Any, jax.Array], jax.Array]


def block(hidden: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return hidden + jnp.tanh(jax.nn.gelu(hidden @ weights["up"]) @ weights["down"]), None


def scanned(params: Any, batch: jax.Array) -> jax.Array:
    return (jax.lax.scan(block, batch, params)[0] ** 2).mean()


def unrolled(params: Any, batch: jax.Array) -> jax.Array:
    for layer in range(LAYERS):
        batch, _ = block(batch, jax.tree.map(lambda leaf, at=layer: leaf[at], params))
    return (batch**2).mean()


def branching(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jax.lax.cond(
        batch.sum() > 0, lambda x: block(x, jax.tree.map(lambda leaf: leaf[0], params))[0], jnp.sin, batch
    )
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x) @ params["up"][1] @ params["down"][1], hidden).mean()


def step_of(loss: Loss) -> Callable[..., Any]:
    def train_step(state: Any, batch: jax.Array) -> Any:
        value, gradients = jm.value_and_grad(loss)(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
        return {"params": params, "opt_state": moments}, {"loss": value}

    return train_step


def arguments() -> tuple[Any, jax.Array]:
    params = {"up": jnp.ones((LAYERS, WIDTH, 4 * WIDTH)), "down": jnp.ones((LAYERS, 4 * WIDTH, WIDTH))}
    return {"params": params, "opt_state": jax.tree.map(jnp.zeros_like, params)}, jnp.ones((ROWS, WIDTH))


def recorded(step: Any) -> Compilation:
    return next(compilation for each, compilation in registry.steps() if each is step)


@pytest.mark.parametrize("policy", [None, "full_remat"])
@pytest.mark.parametrize("loss", [scanned, unrolled, branching], ids=lambda loss: loss.__name__)
def test_it_is_what_a_second_compile_writes_down(loss, policy):
    step = jm.jit_step(step_of(loss), policy)
    dumped = jm.step_memory(step, *arguments()).peak()
    found = recorded(step)
    assert found.peak is not None
    assert (found.peak.groups, found.peak.moment, found.peak.bytes) == (dumped.groups, dumped.moment, dumped.bytes)
    assert found.peak.buffers == dumped.largest(12).buffers


def test_the_schedule_reaches_its_peak_and_every_block_lies_inside_it():
    step = jm.jit_step(step_of(unrolled))
    step(*arguments())
    found = recorded(step)
    assert found.peak is not None
    assert found.schedule is not None
    schedule, memory = found.schedule, found.memory
    assert memory is not None
    highest = max(count for _, count in schedule.curve)
    assert highest == schedule.held_bytes + memory.temp_bytes - found.peak.bytes_of("gaps")
    assert 0 < schedule.peak_at < schedule.length
    assert min(position for position, count in schedule.curve if count == highest) <= schedule.peak_at
    for each in schedule.blocks:
        assert 0 <= each.first <= each.last <= schedule.length
        assert schedule.held_bytes <= each.base
        assert each.base + each.buffer.bytes <= schedule.held_bytes + memory.temp_bytes


def test_where_the_compiler_hands_over_no_buffers_arguments_and_totals_make_it_up():
    step = jm.jit_step(step_of(scanned))
    memory = jm.step_memory(step, *arguments())
    compiled = step.compile_call(arguments(), {})
    held = argument_buffers(compiled.leaves, compiled.program.uses, compiled.program.undonated)
    summed = peak_by_totals(memory.program, held)
    assert memory.known_peak is not None
    assert summed.bytes == memory.step_bytes
    for group in ("parameters", "optimizer state", "batch"):
        assert summed.bytes_of(group) == memory.known_peak.bytes_of(group) > 0
    assert summed.bytes_of("temporaries") == memory.temp_bytes
    assert "by the step's arguments and the compiler's totals" in str(summed)
    assert "saved activations are one sum for all temporaries: the compiler" in str(summed)
    shown = program_model(memory.program, peak=summed)["peak"]
    assert shown["source"] == "by its arguments and its compiler's totals"
    assert "state['params']['up']" in {each["operation"] for each in shown["buffers"]}


def test_only_a_compile_that_needs_more_than_those_before_has_one():
    step = jm.jit_step(lambda w, x: (w - (x @ w).mean(), (x @ w).sum()))
    weights = jnp.ones((WIDTH, WIDTH))
    for rows in (64, 8, 256):
        weights, _ = step(weights, jnp.ones((rows, WIDTH)))
    newest = registry.of(step)
    by_rows = {dict(each.signature)["x"]: each.peak is not None for each in newest}
    assert by_rows == {"float32[64,32]": True, "float32[8,32]": False, "float32[256,32]": True}


def test_a_program_that_hands_nothing_over_has_none():
    compiled = jax.jit(jnp.sin).lower(jnp.ones(8)).compile()

    class Silent:
        memory_analysis = staticmethod(lambda: None)

    module = parse_module(compiled.as_text())
    assert assigned_peak(Silent(), module, "cpu", Arguments()) is None
    assert assigned_peak(compiled, module, "cpu", Arguments()) is not None


def test_a_run_has_the_peak_of_every_registered_program(tmp_path):
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, on_error="raise")
    step = jm.jit_step(step_of(scanned))
    with jm.MemoryMonitor(settings, logdir=tmp_path) as monitor:
        state, batch = arguments()
        for index in range(3):
            state, metrics = step(state, batch)
            monitor(index, metrics)
    (line,) = [
        line
        for line in (tmp_path / "memory.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "compilation" and json.loads(line)["peak"]
    ]
    assert len(line) < 60_000, "once a program, and no more than a second of readings"
    (story,) = stories_of(tmp_path)
    (program,) = [each for each in story_model(story)["programs"] if each["name"] == "train_step"]
    assert program["peak"]["source"] == "by its compiler's buffer assignment"
    assert {"parameters", "optimizer state", "saved activations"} <= {
        group["name"] for group in program["peak"]["groups"]
    }
    assert program["peak"]["bytes"] == program["bytes"]
    assert any("test_assigned_peak.py" in (each["source"] or "") for each in program["step"]["blocks"])
    assert all(each["bytes"] > 0 for each in program["step"]["blocks"])


def trained_beside_a_copy(folder: str) -> None:
    """A short run that holds a copy of the parameters; prints the bytes of parameters and optimizer state."""
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, on_error="raise")
    step = jm.jit_step(step_of(scanned))
    state, batch = arguments()
    kept = jax.tree.map(jnp.copy, state["params"])
    with jm.MemoryMonitor(settings, logdir=folder) as monitor:
        for index in range(3):
            state, metrics = step(state, batch)
            monitor(index, metrics)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for each in (kept, state["opt_state"])]
    sys.stdout.write(json.dumps(sizes))


def test_live_arrays_of_a_run_are_divided_by_what_they_hold(tmp_path):
    """A parameter and its two moments are alike in shape, dtype and line: the step's arguments show what they are."""
    # In a process of its own, where no larger arrays of other tests are alive.
    code = f"from tests.test_assigned_peak import trained_beside_a_copy as run; run({str(tmp_path)!r})"
    done = forked.run([sys.executable, "-c", code], cwd=forked.ROOT, check=True)
    parameters, optimizer_state = json.loads(done.stdout)
    (story,) = stories_of(tmp_path)
    by_kind: dict[str, int] = {}
    for group in story_model(story)["arrays"]["groups"]:
        by_kind[group["kind"]] = by_kind.get(group["kind"], 0) + group["bytes"][-1]
    assert by_kind["parameters"] == parameters
    assert by_kind["optimizer state"] == optimizer_state
    assert by_kind["other arrays"] >= parameters
