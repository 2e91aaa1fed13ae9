# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""The public API as a user with a strict type checker sees it; `make types` checks this file, and nothing runs it.

Every public name is used, and every method of the public classes (tests/test_house_public.py holds that none is missing). A wrong
use carries an ignore with the rule that finds it: where the checker no longer finds it, the ignore itself is the error. Of the
adapters the pytest fixture is here; those for Keras, Kauldron and Tunix extend classes of packages that no environment of the
project's own checks has, and a checker that does not see the base takes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from matplotlib.figure import Figure

import jaxmem_callbacks as jm
from jaxmem_callbacks.integrations.pytest import StepGate
from jaxmem_callbacks.records.peaks import Buffer, Peak
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.recovery.monitor_snapshot import MonitorSnapshot

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
    assert_type(jm.StepPolicy(chunks={"head": 16, "mlp": 4}).chunked, tuple[tuple[str, int], ...])
    jm.StepPolicy(chunks="head")  # pyright: ignore[reportArgumentType]
    step = jm.jit_step(train_step, jm.StepPolicy(remat="full", microbatches=2, chunks=4), donate_argnames="state")
    assert_type(step(state, batch), tuple[State, Metrics])
    assert_type(step(state, batch, rate=0.2), tuple[State, Metrics])
    step(batch, state)  # pyright: ignore[reportArgumentType]
    jm.StepPolicy(state_offload="parameters")  # pyright: ignore[reportArgumentType]
    moved = jm.jit_step(train_step, jm.StepPolicy(state_offload="optimizer"))
    assert_type(jm.place_state(moved, state, batch), tuple[Any, ...])
    jm.place_state("train_step", state)  # pyright: ignore[reportArgumentType]
    step(state)  # pyright: ignore[reportCallIssue]
    step(state, batch, rates=0.2)  # pyright: ignore[reportCallIssue]
    step(state, batch).params  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    jm.jit_step(train_step, "donate+full_remat")
    jm.jit_step(train_step, Path("mine.yaml"))
    jm.jit_step(train_step, 3)  # pyright: ignore[reportArgumentType]


def errors_are_caught_by_their_names(call: Callable[[], None]) -> object:
    refusals: list[type[jm.JaxmemError]] = [
        jm.CompileError,
        jm.CompileTimeoutError,
        jm.ComparisonError,
        jm.DonationError,
        jm.EnvironmentSettingError,
        jm.LossRefusedError,
        jm.PatternError,
        jm.PlanError,
        jm.PolicyError,
        jm.PresetError,
        jm.RecoveryError,
        jm.RunFileError,
        jm.SimulationError,
        jm.TargetError,
    ]
    warned: list[type[UserWarning]] = [jm.DonationWarning, jm.RecoveryWarning]
    try:
        call()
    except jm.DefragmentError as error:
        return error.tree
    except jm.JaxmemError as error:
        assert_type(str(error), str)
    return (refusals, warned)


def plans(state: State, batch: Batch) -> jm.Plan:
    plan = jm.plan(train_step, state, batch, target="h100_sxm", budget="72GiB", search={"remat": ["none", "full"]})
    assert_type(plan.policy, jm.StepPolicy)
    assert_type(plan.chosen.fits, bool | None)
    assert_type(plan.compiles, int)
    assert_type(plan.to_yaml(), str)
    assert_type(plan.to_json(), str)
    assert_type(plan.candidates, tuple[Candidate, ...])
    assert_type(plan.frontier, tuple[Candidate, ...])
    assert_type(plan.to_tensorboard("runs/plan"), Path)
    assert_type(plan.to_html("plan.html"), Path)
    assert_type(plan.figure(), Figure)
    assert_type(jm.load_plan("plan.json"), jm.Plan)
    jm.MemoryMonitor(plan="plan.json").close()
    jm.load_plan(8)  # pyright: ignore[reportArgumentType]
    plan.peak.buffers  # pyright: ignore[reportOptionalMemberAccess]
    jm.plan(train_step, state, batch, target=8)  # pyright: ignore[reportArgumentType]
    jm.plan(train_step, state, batch, search=["remat"])  # pyright: ignore[reportArgumentType]
    return plan


def bytes_of_a_step(state: State, batch: Batch) -> jm.StepMemory:
    memory = jm.step_memory(train_step, state, batch, target="v5e")
    assert_type(memory.step_bytes, int)
    assert_type(
        memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes + memory.constant_bytes,
        int,
    )
    assert_type(memory.donated_bytes, int)
    assert_type(memory.compiler_remat, int)
    assert_type(memory.top_buffers(20), tuple[Buffer, ...])
    assert_type(memory.peak(), Peak)
    assert_type(memory.causes(), tuple[str, ...])
    memory.step_bites  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    return memory


def presets(name: str) -> jm.Preset:
    assert_type(jm.list_presets(), tuple[str, ...])
    jm.load_preset(("donate", "fsdp"))  # pyright: ignore[reportArgumentType]
    jm.StepPolicy("full")  # pyright: ignore[reportCallIssue]
    jm.StepPolicy(remat=True)  # pyright: ignore[reportArgumentType]
    jm.StepPolicy(compiler_options={"platform": "gpu", "jax": "0.12", "xla_gpu_autotune_level": 0})
    jm.StepPolicy(compiler_options="xla_gpu_autotune_level=0")  # pyright: ignore[reportArgumentType]
    jm.StepPolicy(microbatch=2)  # pyright: ignore[reportCallIssue]
    preset = jm.load_preset("donate", name, monitor={"every_steps": 10})
    preset.policy = jm.StepPolicy()  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(jm.apply_environment(preset).set, Mapping[str, str])
    assert_type(preset.policy.offloaded, tuple[str, ...])
    assert_type(preset.policy.options is None, bool)
    assert_type(preset.policy.changes_gradients or preset.policy.rewrites_loss, bool)
    return preset


def a_monitored_loop(state: State, batches: Iterator[Batch]) -> State:
    step = jm.jit_step(train_step, "full")
    with (
        jm.MemoryMonitor("monitor_only", logdir="runs/a", writer=jm.CollectingWriter()) as monitor,
        jm.oom_guard(monitor),
    ):
        for i, batch in enumerate(jm.prefetch(batches, batches=2, max_bytes="1GiB")):
            state, metrics = step(state, batch)
            monitor(i, metrics)
            monitor("first", "metrics", "logs")  # pyright: ignore[reportCallIssue]
            assert_type(monitor.sample(i), dict[str, float])
            monitor.sample()  # pyright: ignore[reportCallIssue]
    monitor.flush()
    assert_type(monitor.events, tuple[MemoryEvent, ...])
    assert_type(monitor.witnessed(), MonitorSnapshot)
    jm.MemoryMonitor(directory="runs/a")  # pyright: ignore[reportCallIssue]
    jm.MemoryMonitor(probes=[jm.ScriptedProbe([])])
    jm.MemoryMonitor(probes=[print])  # pyright: ignore[reportArgumentType]
    jm.as_writer(monitor).close()
    with jm.MemoryMonitor(writer=[jm.CsvWriter("a.csv"), jm.PrometheusWriter("a.prom")], on_event=print) as watched:
        watched(0)
    return state


class Handed(NamedTuple):
    """What a loop hands to its hooks, as Levanter's does."""

    step: int
    loss: float


def a_loop_with_hooks(monitor: jm.MemoryMonitor, events: list[MemoryEvent]) -> None:
    add_hook: list[Callable[[Handed], None]] = [monitor.on_step]
    for hook in add_hook:
        hook(Handed(step=0, loss=1.0))
    monitor.on_step(Handed(step=0, loss=1.0), force=True)
    monitor.on_step(Handed(step=0, loss=1.0), forced=True)  # pyright: ignore[reportCallIssue]
    for event in events:
        monitor.tell(event)
    monitor.tell("an event")  # pyright: ignore[reportArgumentType]


def number_of(state: State, batch: Batch) -> int:
    return state.steps + 0 * len(batch)


def a_loop_without_hooks(monitor: jm.MemoryMonitor, state: State, batch: Batch) -> None:
    assert_type(monitor.wrap(train_step)(state, batch), tuple[State, Metrics])
    assert_type(monitor.wrap(train_step, step=number_of)(state, batch, rate=0.2), tuple[State, Metrics])
    monitor.wrap(train_step)(batch, state)  # pyright: ignore[reportArgumentType]
    monitor.wrap(3)  # pyright: ignore[reportArgumentType]
    monitor.wrap(train_step, step=3)  # pyright: ignore[reportArgumentType]


def what_was_written(writer: jm.CollectingWriter, probe: jm.ScriptedProbe) -> None:
    assert_type(writer.of(MemoryEvent), list[MemoryEvent])
    assert_type(writer.events, list[MemoryEvent])
    writer.of("near_oom")  # pyright: ignore[reportArgumentType]
    for event in writer.events:
        writer.write(event)
    writer.flush()
    probe.read()  # pyright: ignore[reportCallIssue]


def test_memory(assert_step_memory: StepGate, state: State, batch: Batch) -> None:
    assert_type(assert_step_memory(train_step, state, batch, target="v5e", max_regress="1%"), jm.StepMemory)
    assert_step_memory(train_step, state, batch, max_regress=0.01)  # pyright: ignore[reportArgumentType]


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
    first, state = run.restore(state)
    state, _ = run.step(first, state, batch)
    if run.should_save(None):
        assert_type(run.save_before_oom(1, state), Path | None)
    assert_type(run.latest, int | None)
    assert_type(run.report.policy, str)
    assert_type(run.policy, jm.StepPolicy)
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
    jm.remat(summed, "full", segments="blocks")(state.params, batch)
    jm.remat(summed, save="h", segment=4)  # pyright: ignore[reportCallIssue]
    jm.weighted(3.0)  # pyright: ignore[reportCallIssue]
    jm.apply_policy(train_step, jm.StepPolicy(remat="dots"))(state, batch)
    jm.apply_policy(train_step, jm.StepPolicy(remat="dots"), gradients="all")(state, batch)
    jm.apply_policy(train_step)  # pyright: ignore[reportCallIssue]
    jm.apply_policy(train_step, jm.StepPolicy(), gradients="every")  # pyright: ignore[reportArgumentType]
    assert_type(jm.jit_step(train_step, gradients="all")(state, batch)[1], dict[str, jax.Array])
    jm.jit_step(train_step, gradients=True)  # pyright: ignore[reportArgumentType]


def of_flax(model: nnx.Module, loss: Callable[[nnx.Module], jax.Array], apply: Callable[..., Any]) -> None:
    jm.nnx.remat(model, "blocks", "full")
    jm.nnx.value_and_grad(loss)(model)
    jm.linen.remat(apply, "Block_.*")
    jm.linen.remat(apply)  # pyright: ignore[reportCallIssue]


def misspelt() -> None:
    jm.value_and_gard  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@jm.eqx.value_and_grad(has_aux=True)
def decorated_loss(model: State, batch: Batch) -> tuple[jax.Array, Metrics]:
    return jnp.mean(batch["x"] @ model.params), {}


def the_gradients_of_equinox(model: State, batch: Batch) -> None:
    decorated_loss(model, batch)
    jm.eqx.value_and_grad(loss_fn)(model.params, batch)
    jm.eqx.grad(loss_fn)(model.params, batch)
    jm.eqx.grad(loss_fn, has_aux=1)  # pyright: ignore[reportCallIssue, reportArgumentType]
