"""Faults of the monitor: one line on stderr, that part is off, training and the other parts go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.writers.protocol import LoggedTable, Record, Writer
from jaxmem_callbacks.writers.report import happened
from tests.watching import told

FAST = MonitorSettings(window_s=0.01, scan_s=0.01)


class BrokenProbe:
    def read(self, step: int) -> Sequence[Reading]:
        msg = f"driver gone\nat step {step}"
        raise OSError(msg)


class BrokenWriter(Writer):
    def write(self, record: Record) -> None:
        del record
        msg = "disk full"
        raise OSError(msg)


def drive(monitor: jm.MemoryMonitor, steps: int = 5) -> None:
    with monitor:
        for step in range(steps):
            monitor(step, {"loss": 1.0})
            monitor.flush()


def test_a_probe_that_raises_is_named_once_and_the_others_go_on(capfd):
    double = jm.CollectingWriter()
    drive(jm.MemoryMonitor(FAST, writer=double, probes=[BrokenProbe(), HostProbe()]))
    (line,) = told(capfd)
    assert line.startswith(
        "jaxmem: the probe BrokenProbe is switched off for the rest of the run: OSError: driver gone at step"
    )
    assert len([record for record in double.records if isinstance(record, Reading)]) >= 5


def test_what_is_switched_off_stands_in_the_runs_files_and_its_report_too(tmp_path: Path, capfd):
    double = jm.CollectingWriter()
    drive(jm.MemoryMonitor(FAST, logdir=tmp_path, writer=double, probes=[BrokenProbe(), HostProbe()]))
    (line,) = [line.removeprefix("jaxmem: ") for line in told(capfd)]
    (story,) = stories_of(tmp_path)
    assert story.messages == [line]
    assert happened(story).endswith(f"; the monitor reported of itself: {line}.")
    row = ("message of the monitor, 1", "", "monitor", line)
    assert row in [tuple(each) for each in double.of(LoggedTable)[-1].rows]
    assert row in [(each.figure, each.latest, each.source, each.text) for each in story.known_rows]


def test_a_probe_that_returns_nothing_is_that_probes_fault(capfd):
    class Forgetful:
        def read(self, step: int) -> Any:
            del step

    double = jm.CollectingWriter()
    drive(jm.MemoryMonitor(FAST, writer=double, probes=[Forgetful(), HostProbe()]))
    (line,) = told(capfd)
    assert line.startswith("jaxmem: the probe Forgetful is switched off for the rest of the run: TypeError: ")
    assert len(double.of(Reading)) >= 5


def test_a_number_that_no_float_holds_is_left_out_alone(capfd):
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(FAST, writer=double, probes=[HostProbe()]) as monitor:
        monitor(0, {"loss": 1.0, "huge": 10**400})
        monitor.flush()
    (line,) = told(capfd)
    assert line == "jaxmem: the metric huge is not shown: only scalars are kept."
    assert double.of(Metrics)[0].values == {"loss": 1.0}


def test_a_writer_that_raises_is_named_once_and_the_others_go_on(capfd):
    double = jm.CollectingWriter()
    drive(jm.MemoryMonitor(FAST, writer=[BrokenWriter(), double]))
    (line,) = told(capfd)
    assert line == "jaxmem: writer 1 (BrokenWriter) is switched off for the rest of the run: OSError: disk full"
    assert double.of(Window)
    assert double.closed


def test_in_tests_it_raises_on_the_users_own_thread():
    settings = MonitorSettings(window_s=60.0, scan_s=60.0, on_error="raise")
    with pytest.raises(OSError, match="driver gone"):
        drive(jm.MemoryMonitor(settings, probes=[BrokenProbe()]), steps=1)


class Broken:
    def __int__(self):
        msg = "no number today"
        raise RuntimeError(msg)


def test_a_hook_that_fails_is_switched_off_and_training_goes_on(capfd):
    with jm.MemoryMonitor(FAST, probes=[]) as monitor:
        monitor(Broken())
        monitor(1)
    (line,) = told(capfd)
    assert line.startswith("jaxmem: the hook is switched off for the rest of the run: RuntimeError: no number today")


def test_an_unwritable_folder_is_one_line(tmp_path: Path, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    full = Reading(source="allocator", device="gpu:0", step=0, time_s=0.0, in_use_bytes=99, limit_bytes=100)
    monitor = jm.MemoryMonitor(FAST, logdir=blocked / "run", probes=[jm.ScriptedProbe([full])])
    drive(monitor)
    (line,) = told(capfd)
    assert line.startswith(f"jaxmem: writing to {blocked / 'run'} is switched off for the rest of the run: ")
    assert [event.device for event in monitor.events] == ["gpu:0"], "it still watches"


def test_two_monitors_on_one_folder_do_not_mix(tmp_path: Path, capfd):
    with jm.MemoryMonitor(FAST, logdir=tmp_path) as first:
        first(0)
        first.flush()
        drive(jm.MemoryMonitor(FAST, logdir=tmp_path))
        first(1)
    (line,) = told(capfd)
    assert (
        "another monitor writes to this folder; close it first (monitor.close()) or give this one another logdir"
        in line
    )
    assert len(list(tmp_path.glob("events.*"))) == 1
    drive(jm.MemoryMonitor(FAST, logdir=tmp_path))
    assert len(list(tmp_path.glob("events.*"))) == 2, "closed, it is free again"
    assert told(capfd) == []


def test_what_is_no_scalar_is_said_once_and_not_held(capfd):
    double = jm.CollectingWriter()
    monitor = jm.MemoryMonitor(FAST, writer=double, probes=[])
    with monitor:
        for step in range(3):
            monitor(step, {"loss": 1.0, "logits": jnp.ones((4, 4))})
            monitor(step, [1, 2])
            monitor.flush()
    lines = told(capfd)
    assert sorted(lines) == [
        "jaxmem: the metric list (expected a mapping of names to scalars) is not shown: only scalars are kept.",
        "jaxmem: the metric logits is not shown: only scalars are kept.",
    ]


@pytest.mark.parametrize("given", [{"loss": 0.5}, None, "first", float("nan")], ids=["metrics", "none", "text", "nan"])
def test_what_is_no_number_of_a_step_is_counted_instead(given, capfd):
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(FAST, writer=double, probes=[HostProbe()]) as monitor:
        for _ in range(3):
            monitor(given)
        monitor.flush()
    assert double.of(Window)[-1].step == 2
    (line,) = told(capfd)
    kind = type(given).__name__
    assert f"the step was given as {kind}, which is no number; the monitor counts calls instead. Give it a" in line


def test_a_step_on_the_device_is_never_read(capfd):
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(FAST, writer=double, probes=[HostProbe()]) as monitor:
        for step in range(3):
            monitor(jnp.int32(100 + step))
        monitor.flush()
    assert double.of(Window)[-1].step == 2
    (line,) = told(capfd)
    assert "the monitor counts calls instead. Give it a Python int: monitor(i, metrics)." in line


def test_a_metric_deleted_meanwhile_is_left_out(capfd):
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(FAST, writer=double, probes=[HostProbe()]) as monitor:
        gone = jnp.float32(1.0) + 0
        gone.delete()
        monitor(0, {"gone": gone, "kept": 2.0})
        monitor.flush()
    assert "train/gone" not in double.of(Window)[0].spreads
    assert double.of(Window)[0].spreads["train/kept"].mean == 2.0
    assert told(capfd) == []


def test_a_users_exception_passes_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the report goes
    problem = RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    double = jm.CollectingWriter()

    def train() -> None:
        with jm.MemoryMonitor(FAST, writer=[BrokenWriter(), double]) as monitor:
            monitor(0)
            raise problem

    with pytest.raises(RuntimeError) as caught:
        train()
    assert caught.value is problem
    assert caught.value.__context__ is None
    assert double.closed
    assert list(tmp_path.glob("oom/*/report.md"))


def test_an_environment_that_does_not_hold_after_the_start_is_told_once(capfd):
    with jm.MemoryMonitor("tpu_default") as monitor:
        monitor(0)
        monitor.flush()
        monitor(1)
        monitor.flush()
    (line,) = [line for line in told(capfd) if "obey" in line]
    assert line == (
        "jaxmem: tpu_default: the backend does not obey its environment. platform: JAX runs on cpu:0, and the preset is for tpu. "
        "`jaxmem doctor --start` shows more."
    )


def test_in_tests_an_environment_that_does_not_hold_raises():
    monitor = jm.MemoryMonitor(jm.load_preset("tpu_default", monitor={"on_error": "raise"}))
    monitor(0)
    with pytest.raises(EnvironmentSettingError, match="tpu_default: the backend does not obey its environment"):
        monitor.flush()
    monitor.close()


def test_an_environment_of_which_nothing_can_be_known_here_is_not_told(capfd, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with jm.MemoryMonitor("gpu_growth") as monitor:
        monitor(0)
        monitor.flush()
    assert "obey" not in capfd.readouterr().err, "a CPU has no pool"


class DeletedMeanwhile:
    """A metric that another thread deletes between the question whether it is deleted and the next."""

    shape = ()

    def __init__(self) -> None:
        self.value = jnp.float32(1) + 0
        self.value.delete()

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.value.is_ready()

    def __float__(self) -> float:
        return float(self.value)


class Unshaped:
    @property
    def shape(self) -> tuple[int, ...]:
        msg = "no shape yet"
        raise ValueError(msg)


def in_itself() -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    metrics["again"] = metrics
    return metrics


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jaxlib 0.10 ends the process in is_ready() of a deleted array"
)
def test_a_metric_that_is_deleted_at_the_very_end_ends_nothing(capfd):
    with jm.MemoryMonitor(MonitorSettings(scan_s=60.0, window_s=60.0)) as monitor:
        monitor(0)
        time.sleep(0.3)
        monitor(1, {"loss": DeletedMeanwhile()})
    assert told(capfd) == []


def test_a_metric_that_is_odd_at_the_very_end_ends_nothing(capfd):
    class Forgotten(DeletedMeanwhile):
        def is_ready(self) -> bool:
            msg = "no such handle"
            raise KeyError(msg)

    with jm.MemoryMonitor(MonitorSettings(scan_s=60.0, window_s=60.0)) as monitor:
        monitor(0)
        time.sleep(0.3)
        monitor(1, {"loss": Forgotten()})
    assert {line.split(": ")[1] for line in told(capfd)} <= {
        "reading metrics is switched off for the rest of the run",
        "waiting for metrics is switched off for the rest of the run",
    }


@pytest.mark.parametrize(("metrics", "error"), [({"loss": Unshaped()}, "ValueError"), (in_itself(), "RecursionError")])
def test_an_odd_metric_takes_nothing_else_with_it(metrics: Any, error: str, capfd):
    double = jm.CollectingWriter()
    with jm.MemoryMonitor(FAST, writer=double) as monitor:
        for step in range(20):
            monitor(step, metrics)
            time.sleep(0.01)
    (line,) = told(capfd)
    assert line.startswith(f"jaxmem: taking metrics is switched off for the rest of the run: {error}: ")
    assert double.of(Window)[-1].step == 19


def test_what_a_loop_hands_over_may_raise(capfd):
    class Info:
        step = 4

        @property
        def loss(self) -> float:
            msg = "donated"
            raise RuntimeError(msg)

    with jm.MemoryMonitor(FAST) as monitor:
        monitor.on_step(object())
        monitor.on_step(Info())
        monitor(5)
    (line,) = told(capfd)
    assert "the hook of what a loop hands over is switched off for the rest of the run: AttributeError: " in line


def test_where_no_thread_can_be_had_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch, capfd):
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "jaxmem-monitor":
            msg = "can't start new thread"
            raise RuntimeError(msg)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    began_s = time.monotonic()
    with jm.MemoryMonitor(FAST) as monitor:
        for step in range(3):
            monitor(step, {"loss": 1.0})
        monitor.sample(3)
        monitor.flush()
    assert time.monotonic() - began_s < 5, "it is not waited for"
    (line,) = told(capfd)
    assert line == "jaxmem: the hook is switched off for the rest of the run: RuntimeError: can't start new thread"
