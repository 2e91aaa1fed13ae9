"""The monitor's trace of allocations: a real training's agrees with what the probe of live arrays saw, undisturbed."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_callbacks as jm
from jaxmem_callbacks.callbacks import sampler as traces_module
from jaxmem_callbacks.probes.allocations import AllocationsProbe
from jaxmem_callbacks.readers.traces import read_trace
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.traces import Alloc, AllocatorSettings, Free, ProgramStart, StepMark, Trace, TraceHead
from jaxmem_callbacks.simulator.replay import check_events, replay
from tests import forked

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parent.parent
STEPS, TRACED = 20, 14
# A training with a donated state, batches of changing length, an evaluation by plain jit, and losses that are kept.
TRAINING = f"""
import json, sys
import jax, jax.numpy as jnp
import jaxmem_callbacks as jm
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.records.presets import MonitorSettings

def loss_fn(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch**2).mean()

def train_step(state, batch):
    loss, grads = jm.value_and_grad(loss_fn)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {{"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}}, loss

state = {{"params": [jnp.eye(64) + i for i in range(4)]}}
state["momentum"] = jax.tree.map(jnp.zeros_like, state["params"])
step, evaluate = jm.jit_step(train_step, jm.load_preset("donate")), jax.jit(loss_fn)
probe, losses, seen, compiles = LiveArraysProbe(), [], {{}}, []
settings = MonitorSettings(trace_steps={TRACED}, on_error="raise")
with jm.MemoryMonitor(settings, logdir=sys.argv[1]) as monitor:
    for i in range({STEPS}):
        batch = jnp.full((32 + 8 * (i % 3), 64), float(i))
        state, loss = step(state, batch)
        if i % 4 == 3:
            losses.append(evaluate(state["params"], batch))
        losses.append(loss)
        with jax.transfer_guard("disallow"), jax.log_compiles(True):
            monitor(i, {{"loss": loss}})
        seen[i] = next(each.live_array_bytes for each in probe.read(i) if getattr(each, "source", "") == "live_arrays")
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The trace of a real training, what the probe of live arrays saw at each step, and what it said on stderr."""
    logdir = tmp_path_factory.mktemp("run")
    variables = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", TRAINING, str(logdir)]
    done = forked.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    seen = {int(step): count for step, count in json.loads(done.stdout.splitlines()[-1]).items()}
    return read_trace(logdir), seen, done.stderr, logdir


def test_a_replay_agrees_with_what_the_probe_saw_at_every_sample(recorded):
    trace, seen, _, _ = recorded
    timeline = replay(trace, AllocatorSettings(device_bytes=2**30))
    assert timeline.survived
    points = timeline.points
    assert [point.step for point in points] == list(range(TRACED))
    assert {point.step: point.live_bytes for point in points} == {step: seen[step] for step in range(TRACED)}
    assert len(set(seen.values())) > 10, "losses are kept and batches change, so that no two steps are alike by chance"


def test_a_trace_has_programs_with_their_temporaries_and_reused_state(recorded):
    trace, _, _, _ = recorded
    runs = [event for event in trace.events if isinstance(event, ProgramStart)]
    assert [run.step for run in runs] == list(range(1, TRACED)), "the first call sees what is there"
    assert {run.program for run in runs} == {"train_step"}
    for run in runs:
        state = [output for output in run.outputs if output.bytes == 64 * 64 * 4]
        assert len(state) == 8
        assert all(output.reuses is not None for output in state)
        assert run.temp_bytes is not None
        assert run.temp_bytes > 32 * 64 * 4
        # The compiler counts a table of pointers among the results, so that other small arrays may pass for results too.
        fresh = [output for output in run.outputs if output.reuses is None]
        assert ("float32[]", 4) in {(output.name, output.bytes) for output in fresh}
        assert sum(output.bytes for output in fresh) <= 4 + 8 * 9
    batches = [event for event in trace.events if isinstance(event, Alloc) and event.name.endswith(",64]")]
    assert {event.name for event in batches} >= {"float32[32,64]", "float32[40,64]", "float32[48,64]"}


def test_the_head_says_what_it_is_of_and_what_it_cannot_see(recorded):
    trace, _, _, logdir = recorded
    assert trace.head.source == "recorded"
    assert trace.head.device == "cpu:0"
    assert trace.head.device_bytes is None
    assert f"The first {TRACED} calls of the monitor" in trace.head.tells[0]
    assert any("order within a step is modelled" in sentence for sentence in trace.head.blind)
    assert dict(trace.head.versions).keys() == {"jax", "jaxlib"}
    (file,) = logdir.glob("allocations.*.jsonl")
    assert trace.head.name in file.name


def test_recording_compiles_transfers_and_says_nothing(recorded):
    """The hook ran under a transfer guard, and with every compile logged."""
    _, _, stderr, _ = recorded
    assert "Compiling" not in stderr
    lines = [line.split(": ")[1].split(" at ")[0] for line in stderr.splitlines() if line.startswith("jaxmem")]
    assert lines == ["Recompilation"] * lines.count("Recompilation") + ["the run ended"] * 2, (
        "its events and its end alone"
    )


def test_nothing_is_recorded_unless_asked_for(tmp_path, capfd):
    with jm.MemoryMonitor(MonitorSettings(on_error="raise"), logdir=tmp_path) as monitor:
        monitor(0)
    assert not list(tmp_path.glob("allocations*"))
    with jm.MemoryMonitor(MonitorSettings(trace_steps=5)) as monitor:
        monitor(0)
    assert "without a logdir there is no file to write a trace to" in capfd.readouterr().err


def test_a_trace_ends_where_it_was_to_end_and_no_later_call_looks_at_allocations(tmp_path, monkeypatch):
    monkeypatch.setattr(traces_module, "MOST_ARRAYS", 10**9)  # whatever other tests keep alive
    with jm.MemoryMonitor(MonitorSettings(trace_steps=3, on_error="warn"), logdir=tmp_path) as monitor:
        for step in range(3):
            assert monitor._due.trace_s == 0.0
            monitor(step)
        assert monitor._due.trace_s == math.inf
        monitor(3)
    marks = [event.step for event in read_trace(tmp_path).events if isinstance(event, StepMark)]
    assert marks == [0, 1, 2]


def test_too_many_arrays_end_it_with_a_word(tmp_path, capfd, monkeypatch):
    kept = [jnp.float32(number) for number in range(5)]
    monkeypatch.setattr(traces_module, "MOST_ARRAYS", len(kept) - 1)
    with jm.MemoryMonitor(MonitorSettings(trace_steps=50), logdir=tmp_path) as monitor:
        monitor(7)
        monitor(8)
    assert "the trace of allocations ends at step 7:" in capfd.readouterr().err
    assert [event.step for event in read_trace(tmp_path).events if isinstance(event, StepMark)] == [7]


def test_a_trace_that_cannot_be_taken_is_told_once_and_the_run_goes_on(tmp_path, capfd):
    class Broken:
        def read(self, step):
            msg = f"no arrays at step {step}"
            raise RuntimeError(msg)

    with jm.MemoryMonitor(MonitorSettings(trace_steps=50), logdir=tmp_path) as monitor:
        monitor._sampler.traces._probe = Broken()
        for step in range(5):
            monitor(step)
        assert monitor._due.trace_s == math.inf
    said = capfd.readouterr().err
    assert said.count("the trace of allocations is switched off for the rest of the run: RuntimeError: no arrays") == 1
    assert not list(tmp_path.glob("allocations*"))


# the probe itself


def whole(*parts):
    return Trace(head=TraceHead(name="parts"), events=tuple(event for part in parts for event in part[0]))


def test_the_probe_holds_no_array_and_sees_what_comes_and_goes():
    gc.collect()  # what other tests left in cycles is not to go while this one looks
    probe = AllocationsProbe()
    first = probe.read(0)
    array = jnp.ones((1000,))
    second = probe.read(1)
    (new,) = (event for event in second[0] if isinstance(event, Alloc))
    assert (new.bytes, new.name, new.step) == (4000, "float32[1000]", 1)
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None
    third = probe.read(2)
    assert [event.id for event in third[0] if isinstance(event, Free)] == [new.id]
    check_events(whole(first, second, third).events, "parts")


def test_an_array_in_the_place_of_another_is_a_new_one():
    """CPython gives an object the address of one that is gone: identity alone would take them for the same."""
    probe = AllocationsProbe()
    arrays = [jax.device_put(np.ones(3, np.float32)) for _ in range(100)]
    probe.read(0)
    places = set(map(id, arrays))
    del arrays
    arrays = [jax.device_put(np.ones(5, np.float32)) for _ in range(100)]
    assert places & set(map(id, arrays)), "it did not happen here"
    new = [event.bytes for event in probe.read(1)[0] if isinstance(event, Alloc)]
    assert new == [20] * 100


def test_only_what_lies_on_the_first_device_counts():
    probe = AllocationsProbe()
    probe.read(0)
    mesh = jax.make_mesh((8,), ("x",))
    split = jax.device_put(jnp.ones((64, 4)), NamedSharding(mesh, P("x")))
    elsewhere = jax.device_put(jnp.ones((100,)), jax.local_devices()[3])
    names = {event.name: event.bytes for event in probe.read(1)[0] if isinstance(event, Alloc)}
    assert names.get("float32[64,4]") == 64 * 4 * 4 // 8
    assert "float32[100]" not in names
    del split, elsewhere


def test_several_runs_between_two_readings_have_their_temporaries_each():
    step = jm.jit_step(_scaled, donate_argnames=["state"])
    state, _ = step({"w": jnp.ones((256, 256))}, 2.0)
    probe = AllocationsProbe()
    probe.read(0)
    for _ in range(3):
        state, _ = step(state, 2.0)
    events, _ = probe.read(1)
    runs = [event for event in events if isinstance(event, ProgramStart)]
    assert [run.program for run in runs] == ["_scaled"] * 3
    assert [len(run.outputs) > 0 for run in runs] == [False, False, True]
    assert any(output.reuses is not None for output in runs[-1].outputs)
    assert not [event for event in events if isinstance(event, Alloc) and event.bytes == 256 * 256 * 4]


def test_a_small_result_does_not_take_the_place_of_a_donated_one():
    """The last loss is gone when the next one comes, and is of its size; but only the state's memory was taken over."""
    step = jm.jit_step(_first_the_loss, donate_argnames=["state"])
    loss, state = step({"w": jnp.ones((256, 256))})
    probe = AllocationsProbe()
    before = {event.bytes: event.id for event in probe.read(0)[0] if isinstance(event, Alloc)}
    loss, state = step(state)
    events, _ = probe.read(1)
    (run,) = (event for event in events if isinstance(event, ProgramStart))
    assert [(output.bytes, output.reuses) for output in run.outputs] == [
        (4, None),
        (256 * 256 * 4, before[256 * 256 * 4]),
    ]
    assert loss < 0 or state


def _first_the_loss(state):
    return state["w"].sum(), {"w": jnp.sin(state["w"])}


def _scaled(state, by):
    return {"w": jnp.sin(state["w"]) @ state["w"].T * by}, by
