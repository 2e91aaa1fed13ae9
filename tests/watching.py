"""A monitor whose calls are noted, and its files read back: what a hook must have done by the end of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.presets import MonitorSettings

SETTINGS = MonitorSettings(window_s=0.02, scan_s=0.02, on_error="raise")


class NotingMonitor(jm.MemoryMonitor):
    """The real one, which also keeps the numbers of the steps that it was told."""

    def __init__(self, logdir: Path) -> None:
        super().__init__(SETTINGS, logdir=logdir)
        self.logdir, self.steps = logdir, []

    def __call__(self, step: Any, metrics: Any = None) -> None:
        self.steps.append(step)
        super().__call__(step, metrics)


def told(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Lines printed, but for the run's end, and those on how long a probe takes: that depends on the machine."""
    printed = capfd.readouterr()
    return [line for line in (printed.out + printed.err).splitlines() if not of_every_run(line)]


def of_every_run(line: str) -> bool:
    """Whether a line is one of a run's last two, or on how long a probe takes."""
    return " is read every " in line or line.startswith("jaxmem: the run ended: ")


def assert_read_back(folder: Path) -> EventAccumulator:
    """A closed monitor's files: one event file with figures, and lines to the last."""
    (file,) = folder.glob("events.out.tfevents.*")
    page = EventAccumulator(str(file)).Reload()
    assert all(0 < point.value < 2**20 for point in page.Scalars("memory/host_mib"))
    lines = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "end"
    return page


def tensors(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a curve that TensorFlow wrote."""
    page = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [(each.step, float(make_ndarray(each.tensor_proto))) for each in page.Tensors(tag)]


def assert_written(monitor: NotingMonitor, steps: range, *metrics: str) -> None:
    """Every step was told once, in order, and the files of the closed monitor tell of all of them."""
    assert monitor.steps == list(steps)
    page = assert_read_back(monitor.logdir)
    assert page.Scalars("memory/host_mib")[-1].step == steps[-1]
    assert {f"train/{name}" for name in metrics} <= set(page.Tags()["scalars"])
