"""`jm.oom_guard` on real failures in this process: what it writes, what it leaves alone, and that it holds nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import threading
import time
import traceback
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import PlanError
from jaxmem_callbacks.records.runs import MemoryEvent
from tests import oom_steps
from tests.pages import Page

pytestmark = pytest.mark.core
KEPT_IN_A_LIST = []
QUICK_S = 2.0
SEEN = "what somebody saw before it failed"
HUGE = 2**47  # bytes; more than a process can address


@pytest.fixture(scope="module", autouse=True)
def bounded():
    """This process may take 4 GiB more than it has: no machine is asked for what it may not have."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**32, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def run_out(guard):
    """One array that no machine has, asked for inside a guard; the exception that came out."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, guard:
        jnp.zeros(HUGE // 4)
    return caught.value


def reports(outdir: Path) -> list[Path]:
    return sorted(outdir.glob("oom-*")) if outdir.exists() else []


def facts(folder: Path):
    return json.loads((folder / "facts.json").read_text())


def fail(guard, step, state, batch):
    """The failure of a step as it left a guard, and how many seconds it was held up."""
    began = []

    def train():
        try:
            jax.block_until_ready(step(state, batch))
        finally:
            began.append(time.monotonic())

    with pytest.raises(jax.errors.JaxRuntimeError) as caught, guard:
        train()
    return caught.value, time.monotonic() - began[0]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A real step that ran out of memory under a guard and a monitor: folder, exception and how long the guard took."""
    place = tmp_path_factory.mktemp("failed")
    state, batch = oom_steps.new_state(), oom_steps.new_batch()
    KEPT_IN_A_LIST.extend(jnp.ones((256, 256)) for _ in range(40))
    step = jm.jit_step(oom_steps.train_step, donate_argnames=("state",))
    with jm.MemoryMonitor(logdir=place / "run") as monitor:
        monitor(7, {"loss": 0.5})
        monitor.tell(MemoryEvent(kind="recovery", step=7, time_s=time.time(), device="cpu:0", message=SEEN, action=""))
        monitor.flush()
        error, took_s = fail(jm.oom_guard(monitor, plan_seconds=0), step, state, batch)
        again = jm.oom_guard(monitor, outdir=place / "again", plan_seconds=0)
        # Others may take turns with it on a busy machine, but a guard that waits for something does so every time.
        for _ in range(3):
            if took_s >= QUICK_S:
                took_s = fail(again, step, state, batch)[1]
    KEPT_IN_A_LIST.clear()
    (folder,) = reports(place / "run-oom")
    return folder, error, took_s, step


def test_it_is_quick_and_says_in_one_sentence_what_happened(failed):
    folder, error, took, step = failed
    asked = re.search(r"allocating (\d+) bytes", str(error))[1]
    told = facts(folder)
    assert took < QUICK_S
    assert told["sentence"].startswith("Probably the program train_step asked for ")
    assert told["sentence"].endswith("it did not fit for lack of capacity, since more was asked for than was there.")
    assert told["facts"]["requested_bytes"] == int(asked)
    assert told["cause"] == "capacity"
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[0] == f"# {told['sentence']}"
    assert told["program"]["memory"]["temp_bytes"] == pytest.approx(int(asked), rel=0.01)
    assert told["lacking_bytes"] == int(asked) - min(
        limit["limit_bytes"] - limit["used_bytes"] for limit in told["limits"]
    )
    del step


def test_the_report_has_its_parts_in_their_order(failed):
    text = (failed[0] / "report.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == [
        "Who holds the memory",
        "The program that failed, and its peak",
        "The monitor's last readings and events",
        "Bounds of memory and the allocator, after the failure",
        "Versions and environment",
        "What to do, the best first",
        "The exception",
    ]
    page = Page(failed[0] / "report.html")
    assert set(titles) <= set(page.text.splitlines())
    assert page.model["runs"][0]["glance"]["first"]["action"], "what to do comes first of all"
    assert facts(failed[0])["failures"] == []


def test_holders_are_named_by_argument_and_variable_with_their_site(failed):
    rows = {row["name"]: row for row in facts(failed[0])["holders"]}
    (batch,) = [row for name, row in rows.items() if name.startswith("batch['x']")]
    assert (batch["type_text"], batch["kind"]) == ("float32[16384,64]", "batch")
    assert batch["site"].startswith("oom_steps.py:")
    (several,) = [row for name, row in rows.items() if name.startswith("KEPT_IN_A_LIST")]
    assert (several["count"], several["bytes"]) == (40, 40 * 256 * 256 * 4)
    assert several["site"].startswith("test_oom_guard.py:")


def test_donated_arguments_are_told_to_be_gone(failed):
    program = facts(failed[0])["program"]
    assert "state['params']['w']" in program["gone"]
    assert not [path for path in program["gone"] if path.startswith("batch")]
    assert program["gone_bytes"] == 3 * oom_steps.LAYERS * oom_steps.WIDTH**2 * 4 + 4
    assert "gone" in program["fate"]


def test_the_monitors_last_words_are_in_it(failed):
    told = facts(failed[0])
    assert told["step"] == 7
    assert {"host", "live_arrays"} <= {reading["source"] for reading in told["readings"]}
    assert [event["message"] for event in told["events"]] == [SEEN]
    assert SEEN in (failed[0] / "report.md").read_text()
    page = Page(failed[0] / "report.html")
    assert SEEN in page.text
    curves = {curve["figure"] for curve in page.model["runs"][0]["curves"]}
    assert {"live_array_bytes", "resident_bytes"} <= curves, "memory over time, under the names that the page draws"


def test_without_time_for_planning_nothing_is_claimed(failed):
    told = facts(failed[0])
    assert told["planning"] == "Nothing was compiled, because no time was given for it (plan_seconds=0)."
    assert [remedy["what"] for remedy in told["remedies"] if remedy["compiled"]] == []
    assert all(remedy["basis"].startswith(("not compiled", "counted")) for remedy in told["remedies"])
    assert any(
        line.startswith("print(jm.plan(train_step, state, batch") for r in told["remedies"] for line in r["lines"]
    )


def test_the_exception_goes_on_unchanged(tmp_path):
    raised = []

    def fails():
        try:
            jnp.zeros(HUGE // 4)
        except jax.errors.JaxRuntimeError as error:
            raised.append((error, error.args, dict(vars(error)), traceback.format_exception(error)))
            raise

    with pytest.raises(jax.errors.JaxRuntimeError) as caught, jm.oom_guard(outdir=tmp_path, plan_seconds=0):
        fails()
    error, args, attributes, before = raised[0]
    assert caught.value is error
    assert (error.args, dict(vars(error)), error.__cause__, error.__context__) == (
        args,
        attributes,
        error.__cause__,
        None,
    )
    assert set(before) <= set(traceback.format_exception(error)), "the frames that were there still are"
    assert len(reports(tmp_path)) == 1


OTHERS = {
    "an error of the user's": ValueError("wrong shape"),
    "Ctrl-C": KeyboardInterrupt(),
    "an exit": SystemExit(3),
    "a plan in which nothing fits": PlanError("Nothing fits: RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."),
    "an INTERNAL error without evidence": jax.errors.JaxRuntimeError("INTERNAL: YNNPACK operation failed: error"),
    "another resource": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Too many open files"),
}


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_other_exceptions_pass_without_a_report(error, tmp_path, capfd):
    with pytest.raises(type(error)) as caught, jm.oom_guard(outdir=tmp_path, plan_seconds=0):
        raise error
    assert caught.value is error
    assert reports(tmp_path) == []
    assert capfd.readouterr().err == ""


def ask_for_a_terabyte():
    raise MemoryError("Unable to allocate 1.00 TiB for an array with shape (1,)")  # noqa: EM101, TRY003 - NumPy's own words


def end_the_run():
    try:
        ask_for_a_terabyte()
    except MemoryError as error:
        msg = "the run ended"
        raise RuntimeError(msg) from error


def stumble_while_handling():
    try:
        ask_for_a_terabyte()
    except MemoryError:
        {}["no such key"]


def test_what_is_raised_from_a_failure_is_reported_and_what_comes_while_handling_one_is_not(tmp_path):
    with pytest.raises(RuntimeError), jm.oom_guard(outdir=tmp_path / "from", plan_seconds=0):
        end_the_run()
    (folder,) = reports(tmp_path / "from")
    assert facts(folder)["error_type"] == "RuntimeError from MemoryError"
    with pytest.raises(KeyError), jm.oom_guard(outdir=tmp_path / "while", plan_seconds=0):
        stumble_while_handling()
    assert reports(tmp_path / "while") == []


def test_nested_guards_and_a_monitor_write_one_report(tmp_path, capfd):
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        jm.MemoryMonitor(logdir=tmp_path / "run") as monitor,
        jm.oom_guard(monitor, outdir=tmp_path / "outer", plan_seconds=0),
        jm.oom_guard(outdir=tmp_path / "inner", plan_seconds=0),
    ):
        jnp.zeros(HUGE // 4)
    assert [len(reports(tmp_path / place)) for place in ("inner", "outer", "run-oom")] == [1, 0, 0]
    assert capfd.readouterr().err.count("jaxmem: out of memory, explained in ") == 1


def test_every_failure_of_pythons_own_is_told_though_the_next_lies_in_the_place_of_the_last(tmp_path):
    for _ in range(3):
        with (
            pytest.raises(MemoryError),
            jm.oom_guard(outdir=tmp_path, plan_seconds=0),
            jm.oom_guard(outdir=tmp_path, plan_seconds=0),
        ):
            bytearray(HUGE)
    assert len(reports(tmp_path)) == 3


def test_a_monitors_own_with_is_a_guard(tmp_path, capfd):
    monitor = jm.MemoryMonitor(logdir=tmp_path / "run")
    monitor(3)
    with pytest.raises(MemoryError), monitor:
        np.ones(HUGE, np.uint8)
    (folder,) = reports(tmp_path / "run-oom")
    assert facts(folder)["step"] == 3
    assert f"explained in {folder}/report.md" in capfd.readouterr().err


def test_it_keeps_the_newest_and_removes_nothing_else(tmp_path, capfd):
    theirs = [tmp_path / "oom-notes.txt", tmp_path / "oom-20200101-000000-process0-pid1" / "mine.txt"]
    theirs += [tmp_path / "oom-20200101-000000-process1-pid1" / "report.md", tmp_path / "runs" / "report.md"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept")
    guard = jm.oom_guard(outdir=tmp_path, plan_seconds=0, keep=2)
    for _ in range(5):
        run_out(guard)
    lines = [line for line in capfd.readouterr().err.splitlines() if "explained in " in line]
    said = [Path(line.rpartition(" ")[2]).parent for line in lines]
    own = {folder for folder in reports(tmp_path) if (folder / "facts.json").exists()}
    assert own == set(said[-2:])
    assert all(path.read_text() == "kept" for path in theirs)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    run_out(jm.oom_guard(outdir=tmp_path / "file" / "reports", plan_seconds=0))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("jaxmem: out of memory: ")
    assert "No report was written: NotADirectoryError" in said[1]


class BrokenWitness:
    def witnessed(self):
        msg = "nobody looked"
        raise LookupError(msg)


def test_a_part_that_fails_is_named_and_the_others_are_written(tmp_path):
    run_out(jm.oom_guard(BrokenWitness(), outdir=tmp_path, plan_seconds=0))
    (folder,) = reports(tmp_path)
    assert facts(folder)["failures"] == ["the monitor's last words: LookupError: nobody looked"]
    for name in ("report.md", "report.html"):
        assert "LookupError: nobody looked" in (folder / name).read_text()
    assert "## Who holds the memory" in (folder / "report.md").read_text()


def test_it_holds_no_frame_and_no_array(tmp_path):
    class Local:
        """Something that only a frame of the failed call holds."""

    arrays, objects = [], []

    def fails(state):
        own = Local()
        objects.append(weakref.ref(own))
        arrays.append(weakref.ref(state["params"]["w"]))
        _, metrics = step(state, oom_steps.new_batch())
        metrics["loss"].block_until_ready()
        return own

    step = jm.jit_step(oom_steps.train_step, donate_argnames=())
    guard = jm.oom_guard(outdir=tmp_path, plan_seconds=0)
    try:
        with guard:
            fails(oom_steps.new_state())
    except jax.errors.JaxRuntimeError:
        pass
    gc.collect()
    assert len(reports(tmp_path)) == 1
    assert [each() for each in (*objects, *arrays)] == [None, None]


def test_threads_have_a_report_each(tmp_path):
    guard = jm.oom_guard(outdir=tmp_path, plan_seconds=0)
    threads = [threading.Thread(target=run_out, args=(guard,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [facts(folder)["failures"] for folder in reports(tmp_path)] == [[], [], []]


def test_as_a_decorator(tmp_path):
    @jm.oom_guard(outdir=tmp_path / "plain", plan_seconds=0)
    def train(size):
        """Train."""
        return jnp.zeros(size)

    @jm.oom_guard(outdir=tmp_path / "awaited", plan_seconds=0)
    async def serve(size):
        await asyncio.sleep(0)
        return jnp.zeros(size)

    assert (train.__name__, train.__doc__, train(3).shape) == ("train", "Train.", (3,))
    assert asyncio.run(serve(4)).shape == (4,)
    with pytest.raises(jax.errors.JaxRuntimeError):
        train(HUGE // 4)
    with pytest.raises(jax.errors.JaxRuntimeError):
        asyncio.run(serve(HUGE // 4))
    assert [len(reports(tmp_path / place)) for place in ("plain", "awaited")] == [1, 1]


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(
        TypeError, match=r"got str as its monitor\. Expected a jm\.MemoryMonitor or None.*outdir='reports'"
    ):
        jm.oom_guard("runs/a")
    with pytest.raises(ValueError, match=r"plan_seconds=-1\. Expected seconds from 0 on"):
        jm.oom_guard(plan_seconds=-1)
    with pytest.raises(ValueError, match=r"keep=0\. Expected a number of reports of at least 1"):
        jm.oom_guard(keep=0)

    def batches():
        yield 1

    with pytest.raises(TypeError, match=r"cannot guard batches as a decorator: it is a generator function"):
        jm.oom_guard()(batches)
