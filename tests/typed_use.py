# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""The public API as a user with a strict type checker sees it; `make types` checks this file, and nothing runs it.

Every public name is used (tests/test_house_public.py holds that none is missing). A wrong use carries an ignore with the rule
that finds it: where the checker no longer finds it, the ignore itself is the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.events import MemoryEvent

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class State(NamedTuple):
    """A user's own state."""

    params: jax.Array
    steps: int


def loss_fn(params: jax.Array, batch: Batch) -> jax.Array:
    return jnp.mean(jnp.square(batch["x"] @ params))


def train_step(state: State, batch: Batch, *, rate: float = 0.1) -> tuple[State, Metrics]:
    loss, gradient = jm.value_and_grad(loss_fn)(state.params, batch)
    again: jax.Array = jm.grad(loss_fn)(state.params, batch)
    return State(state.params - rate * (gradient + again), state.steps + 1), {"loss": loss}


def a_steps_signature_is_kept(state: State, batch: Batch) -> None:
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full", microbatches=2), donate_argnames="state")
    assert_type(step(state, batch), tuple[State, Metrics])
    assert_type(step(state, batch, rate=0.2), tuple[State, Metrics])
    step(batch, state)  # pyright: ignore[reportArgumentType]
    step(state)  # pyright: ignore[reportCallIssue]
    step(state, batch, rates=0.2)  # pyright: ignore[reportCallIssue]
    step(state, batch).params  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def plans(state: State, batch: Batch) -> jm.Plan:
    plan = jm.plan(train_step, state, batch, target="h100_sxm", budget="72GiB", search={"remat": ["none", "full"]})
    assert_type(plan.policy, jm.StepPolicy)
    assert_type(plan.chosen.fits, bool | None)
    assert_type(plan.compiles, int)
    assert_type(plan.to_yaml(), str)
    jm.plan(train_step, state, batch, target=8)  # pyright: ignore[reportArgumentType]
    jm.plan(train_step, state, batch, search=["remat"])  # pyright: ignore[reportArgumentType]
    return plan


def bytes_of_a_step(state: State, batch: Batch) -> jm.StepMemory:
    memory = jm.step_memory(train_step, state, batch, target="v5e")
    assert_type(memory.step_bytes, int)
    memory.step_bites  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    return memory


def presets(name: str) -> jm.Preset:
    assert_type(jm.list_presets(), tuple[str, ...])
    jm.load_preset(("donate", "fsdp"))  # pyright: ignore[reportArgumentType]
    jm.StepPolicy("full")  # pyright: ignore[reportCallIssue]
    jm.StepPolicy(remat=True)  # pyright: ignore[reportArgumentType]
    jm.StepPolicy(microbatch=2)  # pyright: ignore[reportCallIssue]
    preset = jm.load_preset("donate", name, monitor={"every_steps": 10})
    preset.policy = jm.StepPolicy()  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(jm.apply_environment(preset).set, Mapping[str, str])
    return preset


def a_monitored_loop(state: State, batches: Iterator[Batch]) -> State:
    step = jm.jit_step(train_step, "full")  # pyright: ignore[reportArgumentType]
    with (
        jm.MemoryMonitor("monitor_only", logdir="runs/a", writer=jm.CollectingWriter()) as monitor,
        jm.oom_guard(monitor),
    ):
        for i, batch in enumerate(jm.prefetch(batches, batches=2, max_bytes="1GiB")):
            state, metrics = step(state, batch)
            monitor(i, metrics)
            monitor("first", "metrics", "logs")  # pyright: ignore[reportCallIssue]
    assert_type(monitor.events, tuple[MemoryEvent, ...])
    jm.MemoryMonitor(directory="runs/a")  # pyright: ignore[reportCallIssue]
    jm.MemoryMonitor(probes=[jm.ScriptedProbe([])])
    jm.MemoryMonitor(probes=[print])  # pyright: ignore[reportArgumentType]
    jm.as_writer(monitor).close()
    return state


@jm.oom_guard(plan_seconds=0)
def guarded(rows: int) -> float:
    return rows * 1.0


def failures(error: BaseException) -> int | None:
    assert_type(guarded(3), float)
    guarded("3")  # pyright: ignore[reportArgumentType]
    facts = jm.parse_oom(error)
    facts.requested_bytes  # pyright: ignore[reportOptionalMemberAccess]
    return facts.requested_bytes if facts else None


def recovery(state: State, batch: Batch) -> State:
    run = jm.Recovery(train_step, jm.load_preset("recover"), batch_at=lambda step: batch)
    run.step(state, batch)  # pyright: ignore[reportArgumentType]
    state, _ = run.step(0, state, batch)
    moved, report = jm.defragment(state)
    assert_type(moved, State)
    assert_type(report.done, bool)
    return moved


def simulated() -> bool:
    timeline = jm.simulate_allocator("train_and_evaluate", "gpu_growth", device_memory="16GiB")
    jm.simulate_allocator("train_and_evaluate", "gpu_growth", defragment=True)  # pyright: ignore[reportArgumentType]
    return timeline.survived


def on_a_mesh(state: State) -> Any:
    mesh = jm.make_mesh({"data": 2, "fsdp": 4})
    assert_type(mesh, Mesh)
    jm.make_mesh(8)  # pyright: ignore[reportArgumentType]
    jm.infer_shardings(state, {"fsdp": 8}, jm.load_preset("fsdp"))  # pyright: ignore[reportArgumentType]
    return jm.infer_shardings(state, mesh, jm.load_preset("fsdp"))


def of_losses(state: State, batch: Batch) -> None:
    def summed(params: jax.Array, batch: Batch) -> Any:
        return jm.weighted(jnp.sum(batch["x"] @ params), batch["x"].size)

    jm.remat(summed, "full", segments=4)(state.params, batch)
    jm.remat(summed, save="h", segment=4)  # pyright: ignore[reportCallIssue]
    jm.weighted(3.0)  # pyright: ignore[reportCallIssue]
    jm.apply_policy(train_step, jm.StepPolicy(remat="dots"))(state, batch)
    jm.apply_policy(train_step)  # pyright: ignore[reportCallIssue]


def of_flax(model: nnx.Module, loss: Callable[[nnx.Module], jax.Array], apply: Callable[..., Any]) -> None:
    jm.nnx.remat(model, "blocks", "full")
    jm.nnx.value_and_grad(loss)(model)
    jm.linen.remat(apply, "Block_.*")
    jm.linen.remat(apply)  # pyright: ignore[reportCallIssue]


def misspelt() -> None:
    jm.value_and_gard  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
