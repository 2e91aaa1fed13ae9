"""The monitor and the life of a process: no close, a kill, a fork, two processes; each in a real interpreter of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
START = """
import sys, time, os
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
import jaxmem_callbacks as jm
from jaxmem_callbacks.records.settings import MonitorSettings
settings = MonitorSettings(window_s=0.02, scan_s=0.02)
step = jax.jit(lambda x: (x + 1, {"loss": x.sum()}))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", START + script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
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
    assert "jaxmem" not in err
    (events,) = tmp_path.glob("events.*")
    page = EventAccumulator(str(events))
    page.Reload()
    assert [point.step for point in page.Scalars("memory/host_gib")][-1] == 5, "the open window was written"
    assert page.Images("memory/over_time")
    assert 99 not in [line.get("step") for line in lines(tmp_path)]


KILLED = """
monitor = jm.MemoryMonitor(settings, logdir=sys.argv[1])
x = jnp.zeros(8)
for i in range(100000):
    x, metrics = step(x)
    monitor(i, metrics)
    time.sleep(0.002)
    if i == 200: print("far enough", flush=True)
"""


@pytest.mark.core
def test_json_lines_are_complete_to_the_last_full_line_after_a_kill(tmp_path: Path):
    process = start(KILLED, str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "far enough\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert finished(process)[0] == -signal.SIGKILL
    text = (tmp_path / "memory.jsonl").read_text()
    full = text[: text.rindex("\n")].splitlines()
    assert len(full) > 20
    assert max(json.loads(line).get("step", -1) for line in full) >= 100
    page = EventAccumulator(str(tmp_path))
    page.Reload()
    assert page.Scalars("memory/live_arrays_gib"), "windows are flushed as they close"


TWO = """
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=rank)
with jm.MemoryMonitor(settings, logdir=sys.argv[1]) as monitor:
    x = jnp.zeros(8)
    for i in range(5):
        x, metrics = step(x)
        monitor(i, metrics)
        time.sleep(0.03)
    sample = monitor.sample(5)
print(rank, "memory/live_arrays_gib" in sample)
"""


def test_of_two_processes_both_sample_and_the_first_writes(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(TWO, str(tmp_path), str(rank), address) for rank in range(2)]
    results = [finished(process) for process in processes]
    assert [(code, out) for code, out, _ in results] == [(0, "0 True\n"), (0, "1 True\n")], results
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert len({line["run"] for line in lines(tmp_path)}) == 1
    assert all("another monitor" not in err for _, _, err in results)
