"""The real Weights & Biases without its server: what a watched run adds to the loop's rows in the run's own file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmem_callbacks as jm
from benchmarks.adapters import EVENTS, HOST, KNOWN, LOSS, PICTURE, SETTINGS, wandb_rows
from tests.processes import until

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("default")]

STEPS = 30


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = importlib.import_module("wandb")
    begun = wandb.init(dir=str(tmp_path), project="jaxmem", settings=wandb.Settings(console="off"))
    yield begun
    begun.finish()


def trained(writer: Any, each: Any, settings: Any = SETTINGS) -> jm.MemoryMonitor:
    """A run with an event; ``each`` is what the loop logs itself."""
    state = jax.numpy.zeros((1024, 1024))
    step = jax.jit(lambda x: (x + 1, {"loss": x.sum()}))
    with jm.MemoryMonitor(settings, writer=writer) as monitor:
        for number in range(STEPS):
            state, metrics = step(state)
            each(number)
            monitor(number, metrics)
            jax.block_until_ready(state)
    return monitor


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of the one run in a folder, which has ended: its own process writes the file, and may do so after ``finish``."""
    (log,) = folder.rglob("wandb/offline-run-*/logs/debug-internal.log")
    until(lambda: "stream: all finished" in log.read_text())
    (file,) = folder.rglob("*.wandb")
    return list(wandb_rows(file, importlib.import_module("wandb.proto.wandb_internal_pb2")))


def test_no_row_of_the_loop_is_lost_and_all_of_the_monitors_is_there(run: Any, tmp_path: Path) -> None:
    monitor = trained(run, lambda step: run.log({"own": step}, step=step))
    run.finish()
    found = rows(tmp_path)
    assert [json.loads(row["own"]) for row in found if "own" in row] == list(range(STEPS))
    shown = {name for row in found for name in row}
    for tag in (HOST, LOSS, EVENTS, KNOWN, PICTURE):
        assert any(tag in name for name in shown), tag
    steps = [int(float(row["memory/step"])) for row in found if "memory/step" in row]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS - 1
    assert {event.kind for event in monitor.events} == {"near_oom"}


def test_events_and_pictures_are_files_of_its_own_classes(run: Any, tmp_path: Path) -> None:
    trained(run, lambda step: None)
    run.finish()
    media = [path for path in tmp_path.rglob("media/*/**/*") if path.is_file()]
    pages = "".join(path.read_text() for path in media if path.suffix == ".html")
    assert "Near out of memory" in pages
    pictures = [path for path in media if path.suffix == ".png"]
    assert any("over_time" in path.name for path in pictures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_rows_that_the_run_numbers_itself_are_whole_and_the_module_stands_for_its_run(run: Any, tmp_path: Path) -> None:
    wandb = importlib.import_module("wandb")
    assert wandb.run is run
    trained(wandb, lambda step: wandb.log({"own": step}))
    run.finish()
    found = rows(tmp_path)
    assert [json.loads(row["own"]) for row in found if "own" in row] == list(range(STEPS))
    assert any(HOST in name for row in found for name in row)


def test_a_run_that_was_finished_before_the_monitor_ends_no_training(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def each(step: int) -> None:
        if step == STEPS // 2:
            run.finish()

    trained(run, each, replace(SETTINGS, on_error="warn"))
    lines = [line for line in capfd.readouterr().err.splitlines() if "is switched off" in line]
    assert len(lines) <= 1
    assert all("writer 1" in line for line in lines)
