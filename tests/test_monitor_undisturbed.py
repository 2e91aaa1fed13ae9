"""Promise 2: the monitor adds no sync, no transfer, no compile and no retrace, and holds metric scalars for two steps at most."""

from __future__ import annotations

import gc
import signal
import statistics
import time
import weakref
from collections.abc import Iterator

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.callbacks.background import Faults
from jaxmem_callbacks.callbacks.sampler import Sampler
from jaxmem_callbacks.probes.device_memory import AllocatorProbe
from jaxmem_callbacks.records.presets import MonitorSettings
from tests.stamping import stamp

EAGER = MonitorSettings(window_s=0.01, scan_s=0.01, on_error="raise")
SLOW_S = 0.2


@jax.jit
def slow_step(state: jax.Array, rounds: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    state = jax.lax.fori_loop(0, rounds, lambda _, value: jnp.tanh(value @ value) * 0.5, state)
    return state, {"loss": state.sum()}


@pytest.fixture(scope="module")
def rounds() -> jax.Array:
    """As many rounds as take about 200 ms here."""
    state, few = jnp.full((256, 256), 0.01), jnp.int32(20)
    jax.block_until_ready(slow_step(state, few))
    began = time.perf_counter()
    jax.block_until_ready(slow_step(state, few))
    return jnp.int32(max(20, int(20 * SLOW_S / (time.perf_counter() - began))))


def test_a_slow_device_step_is_not_waited_for(rounds: jax.Array):
    """The hook returns while the step that it was told of still runs; a sync in it, or a value read, would take 200 ms."""
    state, hooks, in_flight = jnp.full((256, 256), 0.01), [], 0
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(EAGER, writer=double) as monitor:
        for step in range(6):
            state, metrics = slow_step(state, rounds)
            began = time.perf_counter()
            monitor(step, metrics)
            monitor.sample(step)
            hooks.append(time.perf_counter() - began)
            in_flight += not metrics["loss"].is_ready()
            jax.block_until_ready(metrics)
            time.sleep(0.03)
    assert in_flight >= 5
    assert statistics.median(hooks) < SLOW_S / 20
    assert len(double.of(Metrics)) >= 3, "and yet they were read"


def test_looks_do_not_wait_for_metrics_that_are_not_ready(rounds: jax.Array):
    sampler = Sampler(
        EAGER,
        probes=(AllocatorProbe(),),
        faults=Faults("raise"),
        look_s=0.1,
    )
    _, metrics = slow_step(jnp.full((256, 256), 0.01), rounds)
    stamp(sampler, 0, metrics)
    early = sampler.collect()
    assert not metrics["loss"].is_ready(), "the step still runs, so nothing waited for it"
    assert early.metrics == []
    jax.block_until_ready(metrics)
    (late,) = sampler.collect().metrics
    assert late.values == {"loss": float(metrics["loss"])}


@pytest.fixture(scope="module")
def compiles() -> Iterator[list[str]]:
    """Names of everything that JAX compiles from here on."""
    names: list[str] = []

    def hear(event: str, duration: float, **details: str | int) -> None:
        del duration
        if "backend_compile" in event:
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield names
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.core
def test_it_transfers_nothing_compiles_nothing_and_retraces_nothing(compiles: list[str]):
    """No compile means no device program, so no collective either. Looks run meanwhile on the monitor's own thread."""
    traces = 0

    def body(state: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        nonlocal traces
        traces += 1
        return state + 1, {"loss": state.sum(), "count": state[0].astype(jnp.int32)}

    step = jax.jit(body)
    double = jm.CollectingWriter()
    state, metrics = step(jnp.zeros(8))
    jax.block_until_ready(metrics)
    compiles.clear()
    with jax.transfer_guard("disallow"), jm.MemoryMonitor(EAGER, writer=double) as monitor:
        for index in range(30):
            state, metrics = step(state)
            monitor(index, metrics)
            monitor.sample(index)
            time.sleep(0.003)
        monitor.flush()
    assert (compiles, traces) == ([], 1)
    assert double.of(Metrics), "metrics were read on the monitor's thread, under a guard of the training thread"


def test_metrics_are_held_for_two_steps_and_nothing_larger_ever():
    """By the hook and the monitor's thread. A probe that looks at live arrays holds all of them for that moment."""
    held, large = [], []
    with jm.MemoryMonitor(MonitorSettings(window_s=3600, scan_s=3600), probes=[]) as monitor:
        for index in range(6):
            metrics = {"loss": jnp.float32(index) + 0, "state": jnp.zeros((4, 4)) + index}
            held.append(weakref.ref(metrics["loss"]))
            large.append(weakref.ref(metrics["state"]))
            monitor(index, metrics)
            del metrics
            gc.collect()
            assert [each() for each in large] == [None] * len(large)
            assert [each() for each in held[:-2]] == [None] * len(held[:-2])
        for index in range(6, 9):
            monitor(index)
        gc.collect()
        assert [each() for each in held] == [None] * 6


class Later:
    """A metric of a step that the device comes to a quarter of a second after its dispatch."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.value, self.ready_s = value, time.monotonic() + 0.25

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return time.monotonic() >= self.ready_s

    def __float__(self) -> float:
        assert self.is_ready(), "reading it would have waited"
        return self.value


def test_metrics_of_a_loop_that_is_dispatched_far_ahead_are_read_and_waited_for_by_nobody():
    double, held = jm.CollectingWriter(), []
    with jm.MemoryMonitor(MonitorSettings(window_s=0.01, on_error="raise"), writer=double) as monitor:
        for step in range(150):
            loss = Later(float(step))
            held.append(weakref.ref(loss))
            monitor(step, {"loss": loss})
            del loss
            # The last two and the one that is waited for; while the monitor's thread looks, those that it looks at.
            assert sum(each() is not None for each in held) <= 6
            time.sleep(0.01)
        seen = list(double.of(Metrics))
        assert len(seen) >= 3
    assert all(each.values == {"loss": float(each.step)} for each in seen)
    assert [each.step for each in seen] == sorted({each.step for each in seen})


def test_the_same_training_with_and_without_ends_bit_equal(tmp_path):
    def train(hook) -> bytes:
        state = jnp.full((32, 32), 0.01)
        for index in range(40):
            state, metrics = slow_step(state, jnp.int32(2))
            hook(index, metrics)
        return np.asarray(state).tobytes()

    plain = train(lambda *_: None)
    with jm.MemoryMonitor(EAGER, logdir=tmp_path) as monitor:
        assert train(monitor) == plain


def test_donated_state_stays_donated():
    step = jax.jit(lambda state: state + 1, donate_argnums=0)
    state = jnp.zeros(1024)
    with jm.MemoryMonitor(EAGER) as monitor:
        for index in range(5):
            before, state = state, step(state)
            monitor(index)
            monitor.flush()
            assert before.is_deleted()


def test_no_signal_handler_is_touched():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with jm.MemoryMonitor(EAGER) as monitor:
        monitor(0)
        assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.core
def test_the_hook_costs_microseconds():
    """The measured figure is in results/hook_cost.json; this only catches a hook that became a hundred times dearer."""
    loss, costs = jnp.float32(1.0) + 0, []
    with jm.MemoryMonitor() as monitor:
        for index in range(300):
            began = time.perf_counter()
            monitor(index, {"loss": loss})
            costs.append(time.perf_counter() - began)
            time.sleep(0.001)
    assert statistics.median(costs) < 200e-6
