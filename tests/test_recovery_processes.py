"""Two real processes recover together: on the same rung at the same step, or both end, whoever fails and however."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import RecoveryWarning
from jaxmem_callbacks.transforms.frameworks import checkpoints_in
from tests import recovering
from tests.processes import EMITTED_QUICKLY, kept_compiles

pytestmark = pytest.mark.timeout(900)  # minutes, where others take the processor
ROOT = Path(__file__).parents[1]
FAILS = 3


def started(folder, *scenarios):
    """Two processes that train together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    compiles = kept_compiles(folder / "compiles")
    variables = {**os.environ, **EMITTED_QUICKLY, **compiles, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.recovering_together", str(rank), address, str(folder), *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=ROOT,
        )
        for rank in range(2)
    ]


def ended(processes):
    """Exit code, answers and stderr of both."""
    found = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            raise
        told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # Gloo writes there too
        answers = {answer["scenario"]: answer for answer in told}
        found.append((process.returncode, answers, err))
    return found


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """The pair in a collective, the pair of which one dies, and their folder: at once, since they wait most of the time."""
    folder = tmp_path_factory.mktemp("lost")
    pairs = [started(folder, "in_a_collective"), started(folder, "dead")]
    return *(ended(pair) for pair in pairs), folder


def test_all_stand_on_the_same_rung_at_the_same_step(tmp_path: Path):
    first, second = ended(started(tmp_path, "apart", "compiling", "both", "over_devices", "moved_by_one"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    for name, failed_on in (("apart", [1]), ("compiling", [1]), ("both", [0, 1])):
        here, there = first[1][name], second[1][name]
        assert here["moves"] == there["moves"]
        assert here["losses"] == there["losses"]
        ((step, rung, _, begun, who),) = here["moves"]
        assert (step, rung, begun, who) == (FAILS, "microbatches", 0, failed_on)
    assert all("memory ran out in step 3 on process 1 of 2" in err for _, _, err in (first, second)), "told by both"
    assert len(first[1]["apart"]["losses"]) == 6
    assert "process 1 of 2 (MemoryError: Unable to allocate 512. MiB" in first[2], "while it was traced, on one alone"
    assert [run[1]["both"]["latest"] for run in (first, second)] == [2, 2], "saved after step 6, by both"
    heard = [{"from": 0, "text": ""}, {"from": 1, "text": "é"}]
    assert [run[1]["over_devices"]["heard"] for run in (first, second)] == [heard, heard]
    moved, still = first[1]["moved_by_one"], second[1]["moved_by_one"]
    assert [path for path, kind in moved["moved"] if kind == "device"] == [
        f"['{name}']" for name in ("keys", "own", "rows", "weak", "whole")
    ], "also those that the other process has a part of, without that one"
    assert len(moved["moved"]) == 9, "all but the weakly typed one went through the host too"
    assert (moved["untouched"], moved["same"], moved["weak"], still["moved"]) == (True, True, True, [])
    assert moved["total"] == still["total"] == 2 * sum(x * x for x in range(64))


def test_one_that_waits_in_a_collective_ends_with_the_one_that_failed(lost):
    (waiting, failed), _, folder = lost
    assert (waiting[0], failed[0]) == (1, 1)
    kind, text = waiting[1]["in_a_collective"]["error"]
    assert kind == "RecoveryError"
    assert text.startswith("memory ran out in step 3 on process 1 of 2: JaxRuntimeError: RESOURCE_EXHAUSTED")
    kind, text = failed[1]["in_a_collective"]["error"]
    assert (kind, text.partition(":")[0]) == ("JaxRuntimeError", "RESOURCE_EXHAUSTED")
    note = checkpoints_in(folder / "in_a_collective" / "kept" / "saved").note(0)
    assert (note["step"], note["policy"]["microbatches"]) == (0, 2), "saved from host memory"
    with pytest.warns(RecoveryWarning, match=r"devices count: saved 2, here "):
        start, state = jm.Recovery(
            recovering.step_of(recovering.loss_fn), checkpoints=folder / "in_a_collective" / "kept"
        ).restore(recovering.new_state())
    assert (start, int(state["count"])) == (0, 0)
    assert "process 0 waits in a collective for one that failed" in failed[2]


def test_a_dead_process_holds_up_nobody(lost):
    _, (alive, dead), _ = lost
    assert dead[0] == -signal.SIGKILL
    assert alive[0] != 0
    kind, text = alive[1]["dead"]["error"]
    assert kind == "RecoveryError"
    assert text.startswith("process 1 of 2 did not report within 15 s how the step went: dead, or far behind.")
