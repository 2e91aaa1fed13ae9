"""Each fault that a run can meet: the training ends as it would have, and one line on stderr names what was switched off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from tests.fault_runs import RUNS, STEPS
from tests.processes import EMITTED_QUICKLY
from tests.watching import of_every_run

ROOT = Path(__file__).parents[1]
SILENT = [
    "healthy",
    "forked",
    "spawned",
    "cell_again",
    "interrupted",
    "terminated",
    "killed_writing",
    "clock_set_back",
    "restored",
    "deleted",
    "not_finite",
]
# What each other fault is told as, in one line.
TOLD = {
    "stalled": "JSONL in {run} hangs and is left behind: what it did not take is not written.",
    "unwritable": "writing to {run} is switched off for the rest of the run: FileExistsError: ",
    "removed": "writing to {run} is switched off for the rest of the run: FileNotFoundError: the folder was removed",
    "too_large": "writing to {run} is switched off for the rest of the run: OSError: [Errno 27] File too large",
    "full_device": "writing to {run} is switched off for the rest of the run: OSError: [Errno 28] No space left on device",
    "raising_probe": "the probe Raising is switched off for the rest of the run: RuntimeError: driver gone at step ",
    "two_monitors": "writing to {run} is switched off for the rest of the run: RuntimeError: another monitor writes to",
    "many_arrays": "the probe LiveArraysProbe is read every ",
}
TOLD = {name: words for name, words in TOLD.items() if name in RUNS}
# The same run without the monitor, where that is not the plain one.
LIKE = {"interrupted": "interrupted_plain", "terminated": "terminated_plain", "killed_writing": "killed_plain"}


@dataclass(frozen=True)
class Survived:
    """What is left of all runs."""

    place: Path
    codes: dict[str, int]

    def said(self, name: str) -> list[str]:
        """What a run wrote on stderr. On a busy machine any of them may read a probe less often; one run is there for that."""
        lines = (self.place / name / "err").read_text().splitlines()
        of_one = name == "many_arrays"
        return [line for line in lines if not of_every_run(line) or (of_one and " is read every " in line)]

    def printed(self, name: str) -> str:
        return (self.place / name / "out").read_text()

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.place / name / "run" / "memory.jsonl").read_text().splitlines()]

    def page(self, name: str) -> EventAccumulator:
        page = EventAccumulator(str(self.place / name / "run"), size_guidance={"scalars": 0, "tensors": 0})
        page.Reload()
        return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    place = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fault_runs", str(place), *RUNS],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
        env={**os.environ, **EMITTED_QUICKLY, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return Survived(place, json.loads(done.stdout))


def test_every_run_is_judged():
    plain = {"plain", *LIKE.values()}
    assert sorted([*SILENT, *TOLD, *plain]) == sorted(RUNS)


@pytest.mark.parametrize("name", [*SILENT, *TOLD])
def test_the_training_ends_as_without_the_monitor(runs: Survived, name: str):
    other = LIKE.get(name, "plain")
    assert runs.codes[name] == runs.codes[other], runs.said(name)
    assert runs.printed(name) == runs.printed(other) != ""


def test_the_plain_runs_end_as_they_should(runs: Survived):
    assert [runs.codes[name] for name in ("plain", *LIKE.values())] == [0, -2, -15, -9]
    assert runs.printed("plain").count("\n") == 2


@pytest.mark.parametrize("name", TOLD)
def test_one_line_names_what_was_switched_off(runs: Survived, name: str):
    said = runs.said(name)
    assert len(said) == 1, said
    assert said[0].startswith("jaxmem: " + TOLD[name].format(run=runs.place / name / "run"))


@pytest.mark.parametrize("name", SILENT)
def test_what_harms_nothing_is_not_told(runs: Survived, name: str):
    assert [line for line in runs.said(name) if "jaxmem: " in line or "Exception ignored" in line] == []


@pytest.mark.parametrize("name", ["interrupted", "terminated", "clock_set_back", "restored", "deleted", "not_finite"])
def test_what_was_seen_is_written(runs: Survived, name: str):
    """To the last window, or to the kill."""
    steps = [point.step for point in runs.page(name).Scalars("memory/live_arrays_mib")]
    assert len(steps) >= 5
    middle = 200 // 2
    assert max(steps) >= {"interrupted": middle, "terminated": middle - 50, "restored": 169}.get(name, STEPS - 1)


def test_after_a_fork_the_child_writes_nothing(runs: Survived):
    assert 999 not in [line.get("step") for line in runs.lines("forked")]
    points = runs.page("forked").Scalars("memory/host_mib")
    windows = [(point.step, point.wall_time) for point in points]
    assert windows == sorted(set(windows)), "each window is there once"
    steps = [step for step, _ in windows]
    assert len(set(steps[:-1])) == len(steps[:-1]), "what is seen after the last step alone has a second point there"
    assert steps[-1] == STEPS - 1


def test_a_cell_that_runs_again_writes_a_second_run(runs: Survived):
    assert len({line["run"] for line in runs.lines("cell_again")}) == 2
    assert len(list((runs.place / "cell_again" / "run").glob("events.*"))) == 2


def test_steps_may_come_twice_or_never(runs: Survived):
    steps = {line.get("step", 0) for line in runs.lines("restored")}
    assert not steps & set(range(120, 150))
    assert max(steps) == 169


def test_metrics_that_are_not_finite_are_shown_as_they_are(runs: Survived):
    values = [line["values"] for line in runs.lines("not_finite") if line["kind"] == "metrics"]
    assert {(each["nan"], each["inf"]) for each in values} == {("nan", "inf")}
    assert all(point.value != point.value for point in runs.page("not_finite").Scalars("train/nan"))


def test_metrics_are_read_after_the_clock_was_set_back(runs: Survived):
    steps = [line["step"] for line in runs.lines("clock_set_back") if line["kind"] == "metrics"]
    assert max(steps) > 150


def test_of_a_run_that_was_killed_in_a_line_all_before_it_is_read_and_the_next_run_appends(runs: Survived):
    folder = runs.place / "killed_writing" / "run"
    before = (folder / "memory.jsonl").read_bytes()
    assert not before.endswith(b"\n"), "it was killed in the middle of a line"
    assert len([json.loads(line) for line in before.splitlines()[:-1]]) > 5
    with jm.MemoryMonitor(logdir=folder) as monitor:
        monitor(0)
    broken = 0
    for line in (folder / "memory.jsonl").read_bytes().splitlines():
        try:
            json.loads(line)
        except ValueError:
            broken += 1
    assert broken == 1
