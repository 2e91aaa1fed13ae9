"""Recovery under a real limit of address space, in one process of its own: what it gives, and what it never hides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import EMITTED_QUICKLY, OPTIMISED, kept_compiles

pytestmark = pytest.mark.timeout(900)  # minutes, where others take the processor
ROOT = Path(__file__).parents[1]
FAILS = 36  # the 37th of 60
# Losses to the last bit and what just fits, as users compile; unoptimised: what ends a run, and losses within a tolerance.
# Their order counts: what one has freed is mapped still for the next.
AS_COMPILED = ("unlimited", "microbatches", "remat", "both_from_disk")
UNOPTIMISED_RUNS = (
    "resumed",
    "refused",
    "alive",
    "other_batches",
    "forgotten",
    "no_ladder",
    "donated",
    "uneven",
)
ACCUMULATED = 1e-4  # what docs/accumulation.md allows in float32; this loss is a sum of a million numbers


def runs(folder, scenarios, **more):
    """What each scenario gave, and stderr; ``more`` variables of the environment."""
    command = [sys.executable, "-m", "tests.recovering", str(folder), *scenarios]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **kept_compiles(folder / "compiles"), **more}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    exact = runs(tmp_path_factory.mktemp("exact"), AS_COMPILED, **OPTIMISED)
    others = runs(tmp_path_factory.mktemp("others"), UNOPTIMISED_RUNS, **EMITTED_QUICKLY)
    return {**exact, **others, "stderr": exact["stderr"] + others["stderr"]}


def apart(run, told):
    """The largest relative distance of a run's losses from the unlimited ones."""
    losses = told["unlimited"]["losses"]
    return max(abs(value - losses[step]) / abs(losses[step]) for step, value in run["losses"].items())


def test_a_run_that_runs_out_at_step_37_of_60_finishes_with_the_losses_of_an_unlimited_one(told):
    run = told["microbatches"]
    assert [int(step) for step in run["losses"]] == list(range(60)), "each step's metrics come once"
    assert apart(run, told) <= ACCUMULATED
    ((step, rung, policy, begun, passed),) = run["moves"]
    assert (step, rung, begun) == (FAILS, "microbatches", 30)
    assert policy in ("none, 4 microbatches", "none, 8 microbatches"), "4 just fit on one of the two lines"
    assert "defragment: the CPU's memory is no pool that could be split" in passed


def test_under_stronger_remat_every_loss_is_the_same_to_the_last_bit(told):
    run = told["remat"]
    assert run["losses"] == told["unlimited"]["losses"], "with batches kept from memory that was overwritten since"
    ((_, rung, policy, begun, passed),) = run["moves"]
    assert (rung, begun, policy.partition(",")[0]) == ("remat", 30, "full")
    assert passed[0] == "remat: dots_saveable ran out too"


def test_rungs_compose_and_snapshots_on_disk_do_as_well(told):
    run = told["both_from_disk"]
    ((_, rung, policy, begun, _),) = run["moves"]
    assert (rung, policy, begun) == ("remat", "dots_saveable, 2 microbatches", 30)
    assert apart(run, told) <= ACCUMULATED
    assert len(run["losses"]) == 60
    kind, taken, size, seconds, _ = run["snapshots"]
    assert (kind, taken) == ("orbax", 6)
    assert seconds > 0
    assert size == told["remat"]["snapshots"][2] - 8, "on disk the random key is not counted"


def test_what_snapshots_cost_is_told(told):
    kind, taken, size, seconds, buffered = told["remat"]["snapshots"]
    assert (kind, taken, size) == ("host", 6, 2 * 48 * 32 * 32 * 4 + 8 + 4)
    assert 0 < seconds < 60
    assert buffered == 10 * 2 * 256 * 32 * 4, "ten batches since the last one"


def test_an_exhausted_ladder_ends_with_the_failure_itself_and_a_checkpoint_to_go_on_from(told):
    ended, went_on = told["resumed"]["ended"], told["resumed"]["went_on"]
    name, text, frames, cause = ended["error"]
    assert (name, text.partition(":")[0], cause) == ("JaxRuntimeError", "RESOURCE_EXHAUSTED", "NoneType")
    assert frames[:2] == ["train", "step"]
    assert "block_until_ready" in frames, "where it was raised first"
    assert ended["moves"][0][1] == "save_and_exit"
    assert went_on["restored"] == [30, "2"], "with the policy that the run had come to"
    assert "error" not in went_on
    losses = told["unlimited"]["losses"]
    assert [int(step) for step in went_on["losses"]] == list(range(30, 60))
    assert all(abs(value / losses[step] - 1) <= ACCUMULATED for step, value in went_on["losses"].items())
    assert went_on["warned"] == [], "the restored state was donated, under the same conditions"


def test_batches_of_other_rows_are_done_in_as_many_microbatches_as_divide_them(told):
    run = told["uneven"]
    assert "error" not in run
    ((_, rung, policy, begun, _),) = run["moves"]
    assert (rung, begun) == ("microbatches", 34)
    assert policy in ("none, 4 microbatches", "none, 8 microbatches"), "which divide neither 250 rows nor 101"
    assert [int(step) for step in run["losses"]] == list(range(34, 60)), "repeated, and one that came later"


def test_a_loss_that_is_no_mean_is_not_accumulated(told):
    ((_, rung, _, _, passed),) = told["refused"]["moves"]
    assert rung == "remat"
    assert "microbatches=2 would change the numbers of squared" in passed[0]
    assert sum("microbatches" in each.partition(":")[0] for each in passed) == 1, "refused once, not once a number"


def test_a_state_that_was_not_donated_is_not_fetched_back(told):
    ((step, _, _, begun, _),) = told["alive"]["moves"]
    assert step == begun == FAILS


def test_a_batch_that_was_donated_to_the_failed_call_is_given_again(told):
    run = told["donated"]
    ((step, rung, _, begun, _),) = run["moves"]
    assert (step, rung, begun) == (FAILS, "remat", 34)
    assert [int(step) for step in run["losses"]] == list(range(34, 60))
    assert "error" not in run
    assert run["warned"] == []


def test_a_replay_that_gives_other_metrics_ends_the_run(told):
    name, text, _, cause = told["other_batches"]["error"]
    assert (name, cause) == ("RecoveryError", "JaxRuntimeError"), "and shows the failure that it began with"
    assert text.startswith("step 34 was repeated from its snapshot and gave loss ")
    assert "The run does not go on with other numbers." in text


def test_a_buffer_that_let_go_of_a_batch_says_what_would_hold_it(told):
    name, text, _, cause = told["forgotten"]["error"]
    assert (name, cause) == ("RecoveryError", "JaxRuntimeError")
    assert text.startswith("step 34 cannot be repeated: the snapshot is of step 34, and batches of up to 8.0 MiB")
    assert "recovery: a failure from step 36 on could not be repeated" in told["stderr"], "told before it was needed"


def test_each_failure_is_one_event_and_one_line(told):
    for name in ("microbatches", "remat", "both_from_disk", "refused", "alive", "donated", "uneven", "no_ladder"):
        assert told[name]["events"].count("recovery") == 1, name
    said = told["stderr"].splitlines()
    lines = [line for line in said if "memory ran out in step" in line]
    assert len(lines) == 9
    (exhausted,) = (line for line in lines if "the ladder is exhausted" in line)
    assert "What to do" not in exhausted, "nothing is left to do"
    assert told["no_ladder"]["error"][0] == "JaxRuntimeError"
