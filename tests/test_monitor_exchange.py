"""The exchange of figures among processes: what each tells, what is made of it, and that nobody waits for who does not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks._compat.coordination import shared_store
from jaxmem_callbacks.analysis.figures import DERIVED, FIGURES, NAMES, across_scalars, figure_of, range_tags
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.run_summary import MetricAvailability
from jaxmem_callbacks.callbacks.cross_process import ProcessReport, ProcessReports
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading, Unavailable
from jaxmem_callbacks.writers.tensorboard import layout_of
from tests.processes import until
from tests.test_monitor_processes import address, finished, start

GIB = 2**30


def read(device: str, in_use: int, step: int = 1) -> Reading:
    return Reading(
        source="allocator",
        device=device,
        step=step,
        time_s=1.0,
        in_use_bytes=in_use,
        limit_bytes=8 * GIB,
        pool_bytes=8 * GIB,
    )


def texts(*of_processes: list[Reading]) -> dict[str, str]:
    found: dict[str, str] = {}
    for process, readings in enumerate(of_processes):
        told = ProcessReport()
        told.add(readings)
        found[str(process)] = told.text() or ""
    return found


def test_lowest_mean_and_highest_name_the_process_in_whole_bytes():
    heard = ProcessReports(10.0, 2)
    heard.learn(
        texts([read("gpu:0", GIB), read("gpu:1", 2 * GIB)], [read("gpu:2", 5 * GIB), read("gpu:3", 3 * GIB)]), 0.0
    )
    across = heard.across(7, 1.5, 0.0)
    held = across.figures["in_use_bytes"]
    assert (held.low, held.low_process, held.mean) == (GIB, 0, 2.75 * GIB)
    assert (held.high, held.high_process, held.high_device) == (5 * GIB, 1, "gpu:2")
    assert all(type(each) is int for each in (held.low, held.mean, held.high, *held.highs.values()))
    assert held.highs == {"0": 2 * GIB, "1": 5 * GIB}
    assert across.figures["headroom_bytes"].highs == {}, "no page draws it"
    assert (across.figures["headroom_bytes"].low, across.figures["headroom_bytes"].low_process) == (3 * GIB, 1)
    assert (across.step, across.processes, across.heard, across.silent) == (7, 2, 2, ())
    scalars = across_scalars(across)
    tag = "memory/processes/in_use_gib"
    assert [scalars[place] for place in (tag, *range_tags(tag))] == [2.75, 1.0, 5.0]


def test_what_was_highest_since_it_was_told_is_told_and_nothing_twice():
    told = ProcessReport()
    told.add([read("gpu:0", GIB), read("gpu:0", 4 * GIB), read("gpu:0", GIB)])
    heard = ProcessReports(10.0, 1)
    heard.learn({"0": told.text() or ""}, 0.0)
    assert heard.across(0, 0.0, 0.0).figures["in_use_bytes"].high == 4 * GIB
    assert told.text() is None


def test_who_says_nothing_new_for_three_rounds_is_silent_and_left_out_whatever_its_clock():
    heard = ProcessReports(10.0, 3)
    both = texts([read("cpu:0", 1)], [read("cpu:1", 2)])
    heard.learn(both, 100.0)
    assert heard.across(0, 0.0, 130.0).silent == (2,)
    heard.learn({"0": both["0"].replace('"serial": 1', '"serial": 2'), "1": both["1"]}, 131.0)
    later = heard.across(0, 0.0, 131.0)
    assert (later.silent, later.heard) == ((1, 2), 1)
    assert later.figures["in_use_bytes"].high == 1
    heard.learn({}, 132.0)
    assert heard.across(0, 0.0, 132.0).silent == (0, 1, 2), "who ended took it back"


def test_a_figure_that_is_read_seldom_stands_until_it_is_told_again():
    told = ProcessReport()
    heard = ProcessReports(10.0, 1)
    host = Reading(source="host", device="host", step=1, time_s=1.0, resident_bytes=3 * GIB)
    for now_s, readings in enumerate([[read("gpu:0", GIB), host], [read("gpu:0", 2 * GIB)]]):
        told.add(readings)
        heard.learn({"0": told.text() or ""}, float(now_s))
    figures = heard.across(1, 1.0, 1.0).figures
    assert figures["in_use_bytes"].high == 2 * GIB
    assert figures["host_bytes"].high == 3 * GIB


def test_every_figure_has_its_tag_meaning_and_chart():
    assert len(NAMES) == len(FIGURES) + len(DERIVED)
    tags: list[str] = []
    for figure in NAMES.values():
        tag = f"memory/processes/{figure.tag.removeprefix('memory/')}"
        found = figure_of(range_tags(tag)[1])
        assert found is not None
        assert (found.tag, found.unit, found.source) == (tag, figure.unit, figure.source)
        assert "over all processes" in found.described()
        tags += [tag, *range_tags(tag)]
    assert figure_of("memory/processes/nothing_gib") is None
    charts = layout_of(tags)["All processes: min, mean, max"]
    assert charts["In use [GiB], from allocator"] == (
        "Multiline",
        [f"^{tag}$" for tag in ("memory/processes/in_use_gib", *range_tags("memory/processes/in_use_gib"))],
    )


def test_the_table_names_processes_and_who_is_silent():
    heard = ProcessReports(10.0, 3)
    heard.learn(texts([read("gpu:0", GIB)], [read("gpu:1", 2 * GIB), read("gpu:2", GIB)]), 0.0)
    known = MetricAvailability()
    known.learn(Observation(step=1, time_s=0.0, processes=heard.across(1, 0.0, 0.0)))
    rows = {row.figure: (row.latest, row.text) for row in known.rows()}
    assert rows["memory/processes/in_use_gib"] == (
        "min 1.0 GiB (process 0), mean 1.2 GiB, max 2.0 GiB (process 1, gpu:1)",
        "of 2 of 3 processes; silent: 2",
    )


def test_a_run_of_one_process_says_so_and_has_no_store():
    assert shared_store() is None
    written = jm.CollectingWriter()
    with jm.MemoryMonitor(MonitorSettings(processes_s=0.01), writer=written) as monitor:
        monitor(0)
        monitor.flush()
    (why,) = [each.reason for each in written.of(Unavailable) if each.figure == "processes"]
    assert why == "this run has one process"


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"processes_s=0 \(expected more than 0 seconds, or None\)"):
        jm.MemoryMonitor(MonitorSettings(processes_s=0))
    with pytest.raises(ValueError, match=r"number 0.\s+Expected: a number of seconds above 0, or null"):
        jm.load_preset("monitor_only", monitor={"processes_s": 0})


STOPPED = """
from dataclasses import replace
import signal
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=rank)
monitor = jm.MemoryMonitor(replace(settings, processes_s=0.02), logdir=sys.argv[1])
x = jnp.zeros(8)
def train(first, steps):
    global x
    for i in range(first, first + steps):
        x, metrics = step(x)
        monitor(i, metrics)
        time.sleep(0.002)
train(0, 100)
print("told", flush=True)
sys.stdin.readline()
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
began = time.monotonic()
train(100, 100)
monitor.flush()
monitor.close()
print("told", time.monotonic() - began < 8, float(x[0]), flush=True)
os._exit(0)  # the end of the interpreter waits for the stopped one, with and without a monitor
"""


@pytest.mark.core
def test_a_coordinator_that_stands_still_holds_up_no_hook_no_flush_and_no_close(tmp_path: Path):
    """A call to its store never comes back: the runtime itself has no limit for it."""
    where = address()
    processes = [start(STOPPED, str(tmp_path), str(rank), where) for rank in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert "told\n" in process.stdout
    assert processes[0].stdin is not None
    processes[0].stdin.write("\n")
    processes[0].stdin.flush()
    until(lambda: Path(f"/proc/{processes[0].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    code, out, err = finished(processes[1], "\n")
    os.kill(processes[0].pid, signal.SIGKILL)
    finished(processes[0])
    assert (code, out) == (0, "told True 200.0\n"), err
    assert err.count("jaxmem: the exchange with the other processes gets no answer") == 1
