"""A monitor whose calls are noted, and its files read back: what a hook must have done by the end of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.settings import MonitorSettings

SETTINGS = MonitorSettings(window_s=0.02, scan_s=0.02, on_error="raise")


class NotingMonitor(jm.MemoryMonitor):
    """The real one, which also keeps the numbers of the steps that it was told."""

    def __init__(self, logdir: Path) -> None:
        super().__init__(SETTINGS, logdir=logdir)
        self.logdir, self.steps = logdir, []

    def __call__(self, step: Any, metrics: Any = None) -> None:
        self.steps.append(step)
        super().__call__(step, metrics)


def assert_written(monitor: NotingMonitor, steps: range, *metrics: str) -> None:
    """Every step was told once, in order, and the files of the closed monitor tell of all of them."""
    assert monitor.steps == list(steps)
    (file,) = monitor.logdir.glob("events.out.tfevents.*")
    page = EventAccumulator(str(file)).Reload()
    shown = page.Scalars("memory/host_gib")
    assert shown[-1].step == steps[-1]
    assert all(0 < point.value < 1024 for point in shown)
    assert {f"train/{name}" for name in metrics} <= set(page.Tags()["scalars"])
    lines = [json.loads(line) for line in (monitor.logdir / "memory.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "end"
