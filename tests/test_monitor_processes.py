"""The monitor and the life of a process: no close, a kill, a fork, two processes; each in a real interpreter of its own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.runs import process_name, stories_of
from jaxmem_callbacks.records.runs import EventKind
from jaxmem_callbacks.writers.events import event_title
from jaxmem_callbacks.writers.page_model import run_model
from jaxmem_callbacks.writers.report import happened
from tests.processes import until

ROOT = Path(__file__).parents[1]
START = """
import sys, time, os
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
import jaxmem_callbacks as jm
from jaxmem_callbacks.records.presets import MonitorSettings
settings = MonitorSettings(window_s=0.02, scan_s=0.02)
step = jax.jit(lambda x: (x + 1, {"loss": x.sum()}))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", START + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def finished(process: subprocess.Popen[str], typed: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(typed, timeout=120)
    return process.returncode, out, err


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]


NEVER_CLOSED = """
monitor = jm.MemoryMonitor(MonitorSettings(window_s=3600.0, scan_s=3600.0), logdir=sys.argv[1])
x = jnp.zeros(8)
for i in range(5):
    x, metrics = step(x)
    monitor(i, metrics)
pid = os.fork()
if pid == 0:
    monitor(99); monitor.flush(); monitor.close()
    os._exit(7)  # JAX itself does not survive the end of an interpreter after a fork
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
x, metrics = step(x)
monitor(5, metrics)
sys.exit(3)
"""


def test_a_monitor_that_is_never_closed_ends_with_the_interpreter_and_a_fork_leaves_it_alone(tmp_path: Path):
    code, _, err = finished(start(NEVER_CLOSED, str(tmp_path)))
    assert code == 3, err
    printed = [line for line in err.splitlines() if line.startswith("jaxmem")]
    assert [line.partition("the run ended: ")[0] for line in printed] == ["jaxmem: "] * 2, "once, and not by the fork"
    (events,) = tmp_path.glob("events.*")
    page = EventAccumulator(str(events))
    page.Reload()
    assert [point.step for point in page.Scalars("memory/host_mib")][-1] == 5, "the open window was written"
    assert page.Images("memory/over_time")
    assert 99 not in [line.get("step") for line in lines(tmp_path)]


KILLED = """
monitor = jm.MemoryMonitor(settings, logdir=sys.argv[1])
x = jnp.zeros(8)
for i in range(100000):
    x, metrics = step(x)
    monitor(i, metrics)
    time.sleep(0.002)
"""


@pytest.mark.core
def test_json_lines_are_complete_to_the_last_full_line_after_a_kill(tmp_path: Path):
    process, path = start(KILLED, str(tmp_path)), tmp_path / "memory.jsonl"

    def full_lines() -> list[dict]:
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def last_step() -> int:
        return max((line.get("step", -1) for line in full_lines()), default=-1)

    until(lambda: len(full_lines()) > 20 and last_step() >= 100)
    process.send_signal(signal.SIGKILL)
    assert finished(process)[0] == -signal.SIGKILL
    assert len(full_lines()) > 20
    assert last_step() >= 100
    page = EventAccumulator(str(tmp_path))
    page.Reload()
    assert page.Scalars("memory/live_arrays_mib"), "windows are flushed as they close"


# One of two processes; its number and the address of the first are arguments.
OF_TWO = """
from dataclasses import replace
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=rank)
held = jnp.zeros((rank, 2**18))  # the second holds a MiB, which is its limit
"""
TWO = (
    OF_TWO
    + """
with jm.MemoryMonitor(replace(settings, limit_bytes=2**20), logdir=sys.argv[1]) as monitor:
    x = jnp.zeros(8)
    for i in range(5):
        x, metrics = step(x)
        monitor(i, metrics)
        time.sleep(0.03)
    sample = monitor.sample(5)
print(rank, "memory/live_arrays_gib" in sample, [event.kind for event in monitor.events])
"""
)


def address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def test_of_two_processes_both_sample_and_the_first_writes(tmp_path: Path):
    where = address()
    processes = [start(TWO, str(tmp_path), str(rank), where) for rank in range(2)]
    results = [finished(process) for process in processes]
    assert [(code, out) for code, out, _ in results] == [(0, "0 True []\n"), (0, "1 True ['near_oom']\n")], results
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert len({line["run"] for line in lines(tmp_path)}) == 1
    assert "processes" not in {line["kind"] for line in lines(tmp_path)}, "no exchange unless asked for"
    assert all("another monitor" not in err for _, _, err in results)
    own = [json.loads(line) for line in (tmp_path / "memory.process-1.jsonl").read_text().splitlines()]
    assert [(line["kind"], line.get("event")) for line in own] == [("run", None), ("event", "near_oom"), ("end", None)]
    (story,) = stories_of(tmp_path)
    (told,) = story.elsewhere.events
    assert (told.where, told.event.device, story.events) == ("process 1", "cpu:2048", [])
    assert own[0]["devices"]["process"] == 1
    assert told_on_tensorboard(tmp_path) == {"process-1": ["near_oom"]}


def told_on_tensorboard(folder: Path) -> dict[str, list[str]]:
    """Runs that TensorBoard finds there beside the first process's, with the kinds of their events; they have nothing else."""
    found = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    others = {name: tags for name, tags in found.Runs().items() if name != "."}
    assert all(tags["tensors"] == ["memory/events/text_summary"] for tags in others.values())
    titles = {event_title(kind): kind for kind in get_args(EventKind)}
    texts = {name: found.Tensors(name, "memory/events/text_summary") for name in others}
    shown = {name: [each.tensor_proto.string_val[0].decode() for each in told] for name, told in texts.items()}
    return {name: [titles[each.split("**")[1]] for each in told] for name, told in shown.items()}


FAILING = """
from dataclasses import replace
from tests.recovering import limit_address_space
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=rank)
x = jnp.zeros(8)
with jm.MemoryMonitor(settings, logdir=sys.argv[1]) as monitor:
    for i in range(100000):
        x, metrics = step(x)
        monitor(i, metrics)
        time.sleep(0.002)
        if i == 100 and rank:
            limit_address_space(2**28)
            jnp.zeros(2**30).block_until_ready()
"""


@pytest.mark.core
def test_a_failure_of_one_process_is_an_event_of_its_run_that_the_first_ones_page_shows(tmp_path: Path):
    folder, where = tmp_path / "run", address()
    processes = [start(FAILING, str(folder), str(rank), where) for rank in range(2)]
    until(lambda: '"out_of_memory"' in "".join(p.read_text() for p in folder.glob(process_name(1))), seconds=120)
    until(lambda: (folder / "memory.jsonl").exists() and lines(folder), seconds=120)
    for process in processes:
        process.kill()
        finished(process)
    (story,) = stories_of(folder)
    (told,) = story.elsewhere.events
    (report,) = (tmp_path / "run-oom").glob("oom-*-process1-*")
    assert (told.where, told.event.kind) == ("process 1", "out_of_memory")
    assert told.event.message.endswith(f"The report is in {report}.")
    assert "asked for 4.0 GiB" in told.event.message
    assert "(not compiled)" in told.event.action
    assert run_model(story, name="", sentence="", details=())["glance"]["verdict"] == (
        f"It does not fit: memory ran out at step {told.event.step} on process 1."
    )
    assert "other processes reported out of memory at step " in happened(story)
    assert told_on_tensorboard(folder) == {"process-1": ["out_of_memory"]}


FIRST_KILLED = """
from dataclasses import replace
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=rank)
x, held = jnp.zeros(8), []
with jm.MemoryMonitor(replace(settings, limit_bytes=2**20), logdir=sys.argv[1]) as monitor:
    for i in range(100000):
        x, metrics = step(x)
        monitor(i, metrics)
        time.sleep(0.002)
        if i == 100 and rank: held.append(jnp.zeros(2**18))
"""


@pytest.mark.core
def test_of_a_run_whose_first_process_was_killed_the_report_tells_what_each_had_written(tmp_path: Path, capsys):
    """JAX itself aborts the others then, within a second: what they told was on the disk before."""
    where = address()
    processes = [start(FIRST_KILLED, str(tmp_path), str(rank), where) for rank in range(2)]
    files = [tmp_path / "memory.jsonl", tmp_path / process_name(1)]
    until(lambda: all(path.exists() for path in files) and '"near_oom"' in files[1].read_text(), seconds=60)
    processes[0].send_signal(signal.SIGKILL)
    assert [finished(process)[0] for process in processes] == [-signal.SIGKILL, -signal.SIGABRT]
    assert main(["report", str(tmp_path)]) == 0
    sentence = capsys.readouterr().out.splitlines()[0]
    assert "no event was reported; other processes reported near out of memory at step 1" in sentence
    assert sentence.endswith("(process 1); the run has no closing line, so it was killed or is still running.")
    assert main(["compare", str(tmp_path), str(tmp_path), "--max-regress", "0%"]) == 0
    assert "was not closed" in capsys.readouterr().out
    assert told_on_tensorboard(tmp_path) == {"process-1": ["near_oom"]}


FOUR = """
import signal
from dataclasses import replace
import jax.monitoring, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
rank = int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[3], num_processes=4, process_id=rank)
compiled = []
def hear(event, duration, **details):
    if "backend_compile" in event: compiled.append(details.get("fun_name"))
jax.monitoring.register_event_duration_secs_listener(hear)
mesh = jm.make_mesh({"data": -1, "fsdp": 2}, across_slices="data")
print("told", [sorted({device.process_index for device in row}) for row in mesh.devices])
batches = [{"x": np.full((2, 3), i + rank, np.float32)} for i in range(20)]
def body(weights, batch):
    return weights + batch["x"].mean(), {"loss": batch["x"].sum() + weights}
step = jax.jit(body, out_shardings=NamedSharding(mesh, P()))
weights = np.float32(0)
own = jax.device_put(np.zeros((rank + 1) * 2**20, np.uint8), jax.local_devices()[1])  # no two have the same
monitor = jm.MemoryMonitor(replace(settings, processes_s=0.05), logdir=sys.argv[1])
for i, batch in enumerate(jm.prefetch(batches, NamedSharding(mesh, P("data")), max_bytes="1KiB")):
    weights, metrics = step(weights, batch)
    monitor(i, metrics)
    time.sleep(0.01)
    if i == 1: jax.block_until_ready(metrics); compiled.clear()
print("told", float(weights), batch["x"].shape, batch["x"].sharding.shard_shape(batch["x"].shape))
print("told", "memory/live_arrays_gib" in monitor.sample(20), compiled, flush=True)
sys.stdin.readline()
if rank == 3: os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
_, metrics = step(weights, batch)  # needs the dead one
monitor(21, metrics)
monitor.flush()
monitor.close()
print("told", time.monotonic() - began < 10, flush=True)
os._exit(0)  # the end of the interpreter waits for the dead one, with and without a monitor
"""


@pytest.mark.core
def test_of_four_processes_a_dead_one_holds_up_no_hook(tmp_path: Path):
    """Before that: each samples, the first writes, the monitor compiles nothing, so there is no collective of its own.

    The exchange among them is on: the first knows the highest and whose it is, and later that the others are gone.
    """
    where = address()
    processes = [start(FOUR, str(tmp_path), str(rank), where) for rank in range(4)]
    weights = sum(number + (0 + 1 + 2 + 3) / 4 for number in range(20))
    for process in processes:
        assert process.stdout is not None
        told = itertools.islice((line for line in process.stdout if line.startswith("told")), 3)
        assert list(told) == ["told [[0], [1], [2], [3]]\n", f"told {weights} (8, 3) (2, 3)\n", "told True []\n"]
    ends = [finished(process, "\n") for process in reversed(processes)]
    assert [(code, out) for code, out, _ in ends] == [(-signal.SIGKILL, ""), *[(0, "told True\n")] * 3], ends
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert len({line["run"] for line in lines(tmp_path)}) == 1
    told = [line for line in lines(tmp_path) if line["kind"] == "processes"]
    of_all = [(line, line["figures"]["live_arrays_bytes"]) for line in told if not line["silent"]]
    # On a slow machine a process that looks seldom tells nothing of its arrays at some exchanges.
    whole, held = [each for each in of_all if each[1]["high"] >= 4 * 2**20][-1]
    assert whole["processes"] == 4
    assert (held["high_process"], held["high_device"]) == (3, f"cpu:{3 * 2048 + 1}"), (
        "its second device, as JAX numbers them"
    )
    assert held["high"] < 4.1 * 2**20
    assert held["low"] < 2**17, "a first device"
    assert told[-1]["silent"] == [1, 2, 3], "the dead one, and those that have ended"
    page = EventAccumulator(str(tmp_path))
    page.Reload()
    # A window of several exchanges shows the highest of them.
    highest = max(
        line["figures"]["live_arrays_bytes"]["high"] for line in told if "live_arrays_bytes" in line["figures"]
    )
    shown = max(point.value for point in page.Scalars("window/memory/processes/live_arrays_mib/max"))
    assert shown * 2**20 == pytest.approx(highest)
