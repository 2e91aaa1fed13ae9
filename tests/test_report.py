"""`jaxmem report`: a run's files enter, one page leaves that tells what the monitor told, and shows what users gave as text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.analysis.run_summary import RunSummary
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.page import page_style
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.writers.jsonl import JsonlWriter
from jaxmem_callbacks.writers.protocol import LoggedTable
from jaxmem_callbacks.writers.report import duration_words, happened
from tests import forked, sample_plans
from tests.pages import Page
from tests.sample_runs import HOSTILE, event, write_run

TAGS = {"html", "head", "meta", "title", "style", "body", "main", "h1", "p", "noscript", "script"}


def reported(folder: Path, *arguments: str) -> Page:
    assert main(["report", str(folder), *arguments]) == 0
    return Page(folder / "report.html")


def test_the_page_begins_with_what_happened(tmp_path, capsys):
    page = reported(write_run(tmp_path / "a", plan=sample_plans.six()))
    said = (
        "Steps 0 to 39 ran in 39.0 s on 2 x NVIDIA H100; memory was highest after step 30 with 970 MiB in use, 97% of the limit "
        "of 1000 MiB; one event was reported: near out of memory at step 30."
    )
    out = capsys.readouterr().out
    assert out == f"one: {said}\nwrote {tmp_path / 'a' / 'report.html'}\n"
    assert (page.model["title"], page.model["summary"]) == (f"Memory of {tmp_path / 'a'}", said)
    assert page.texts[2:4] == [f"Memory of {tmp_path / 'a'}", said], "after title and style, also without a script"
    (run,) = page.model["runs"]
    assert run["sentence"] == said
    assert run["glance"]["verdict"] == "It fits, and only just: 30.0 MiB of 1000 MiB were left."
    assert run["glance"]["first"] == {"event": 0, "title": "Near out of memory", "action": "plain"}


def test_the_page_tells_the_whole_story(tmp_path):
    """In this order here; tests/test_report_browser.py holds the order on the screen."""
    page = reported(write_run(tmp_path, plan=sample_plans.six()))
    (run,) = page.model["runs"]
    assert [(each["title"], each["step"], each["device"]) for each in run["events"]] == [
        ("Near out of memory", 30, "plain")
    ]
    text = page.text
    places = [
        text.index(words)
        for words in (
            "What to do:",
            "1000 MiB (1048576000 B)",
            "71.6 MiB predicted, 500 MiB compiled, 970 MiB measured; +598.3% compiled, +1254.7% measured: the allocator's peak",
            "memory/in_use_gib\nmin 485 MiB (gpu:0), mean 728 MiB, max 970 MiB (gpu:1)\nallocator\nheld by the allocator",
            "unknown, because the allocator's statistics do not have it here",
            "Programs and what they need, by their compiler",
            "train_step\n2 times\n500 MiB\n200 MiB\n150 MiB\n150 MiB\n300 MiB\nunknown\n0\ngpu, attached",
            "train_step: batch['x']: plain",
            "the compiler for h100_sxm",
            "Metrics of the training",
            "loss\n1\nnan\n0.025641\n1",
            "version of jax\n0.12.0.1",
            "setting jsonl_part_bytes\n256 MiB",
        )
    ]
    assert places == sorted(places)
    known = [row[1] == "unknown" for row in run["known"]]
    assert known == sorted(known), "what is unknown comes last"


def test_nothing_is_fetched_and_nothing_of_the_run_runs(tmp_path):
    page = reported(write_run(tmp_path, text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=sample_plans.six()))
    assert set(page.tags) <= TAGS
    assert page.tags.count("script") == 2, "the model, which is data, and the page's own module"
    assert not [name for name in page.attributes if name.startswith("on") or name in ("href", "src")]
    module = page.texts[-1]
    digest = base64.b64encode(hashlib.sha256(module.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page.source
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in page.text, "as it is, and what would turn words around by its number"
    assert page.text.count("window.hurt=1") > 10
    assert "<script>window" not in page.source
    assert not re.search(r"url\(|@import", page_style()), "no address in the style either"


def test_several_runs_are_told_in_their_order(tmp_path, capsys):
    write_run(tmp_path / "a", run="first")
    write_run(tmp_path / "a", run="killed", close=False)
    path = tmp_path / "a" / "memory.jsonl"
    path.write_text(path.read_text() + '{"run":"killed","ki')
    write_run(tmp_path / "b", run="elsewhere", part_bytes=4000)
    page = reported(tmp_path)
    assert [run["name"] for run in page.model["runs"]] == ["first", "killed", "elsewhere"]
    assert "3 runs, of which the newest: Steps 0 to 39 ran" in page.text
    assert page.text.count("the run has no closing line, so it was killed or is still running.") == 1
    number = len(path.read_text().splitlines())
    assert f"memory.jsonl, line {number}, is left out: cut in the middle: the run was killed" in page.text
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["first", "killed", "elsewhere"]


def test_a_part_that_is_not_there_is_remarked_upon(tmp_path):
    write_run(tmp_path, part_bytes=4000)
    (tmp_path / "memory.000001.jsonl").unlink()
    assert "Its file begins with part 2: the parts before it are not here." in reported(tmp_path).text


def test_it_is_written_where_asked_and_refuses_what_it_cannot(tmp_path, capsys):
    write_run(tmp_path / "a")
    assert main(["report", str(tmp_path / "a" / "memory.jsonl"), "-o", str(tmp_path / "out.html")]) == 0
    assert (tmp_path / "out.html").exists()
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "no" / "out.html")]) == 2
    assert "out.html cannot be written: No such file or directory. Name a file" in capsys.readouterr().err
    (tmp_path / "a" / "memory.jsonl").write_text("")
    assert main(["report", str(tmp_path / "a")]) == 2
    assert "holds no line of a run. The monitor writes its first line" in capsys.readouterr().err
    (tmp_path / "a" / "memory.jsonl").write_text("{}\n")
    assert main(["report", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "memory.jsonl:1: '{}' is no line of a run" in error
    assert "Traceback" not in error


@pytest.mark.core
def test_a_real_run_is_told_as_the_monitor_told_it(tmp_path):
    double = jm.CollectingWriter()
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, limit_bytes=2**40, jsonl_part_bytes=2**13, on_error="raise")
    step = jm.jit_step(lambda state, batch: (state + batch.sum(), {"loss": batch.sum()}))
    with jm.MemoryMonitor(settings, logdir=tmp_path, writer=double) as monitor:
        state = jnp.zeros((2048, 2048))  # more than what other tests left alive
        for index in range(5):
            state, metrics = step(state, jnp.ones(8 if index < 3 else 4))
            monitor(index, metrics)
            monitor.flush()
    assert (tmp_path / "memory.000001.jsonl").stat().st_size <= 2**13
    (story,) = stories_of(tmp_path)
    table = double.of(LoggedTable)[-1]
    known_first = sorted(story.known_rows, key=lambda row: not row.known)
    assert [(row.figure, row.latest, row.source, row.text) for row in known_first] == table.rows
    assert story.heap is not None
    assert (2048 * 2048 * 4, "float32[2048,2048]") in [(each.bytes, each.label) for each in story.heap.buffers]
    assert (story.heap.device, story.heap.step) == ("cpu:0", 4)
    page = reported(tmp_path)
    last = page.model["runs"][0]["heaps"][-1]
    assert (last["device"], last["step"]) == ("cpu:0", 4)
    assert "float32[2048,2048]" in [group["label"] for group in last["groups"]]
    assert story.events == list(monitor.events)
    assert story.ended
    assert story.start is not None
    assert story.start.devices["platform"] == "cpu"
    assert story.start.settings["window_s"] == 0.01
    assert set(story.start.versions) == {"jaxmem_callbacks", "jax", "jaxlib"}
    assert story.metrics["loss"].last == 4.0
    assert {curve.figure: curve.stretches[-1].step for curve in story.timeline.curves}["live_array_bytes"] == 4


def test_what_the_monitor_lost_is_counted_in_the_report_too(tmp_path):
    class Waiting:
        entered, go = threading.Event(), threading.Event()

        def read(self, step):
            self.entered.set()
            self.go.wait(60)
            return [Reading(source="host", device="host", step=step, time_s=time.time(), resident_bytes=1)]

    probe, double = Waiting(), jm.CollectingWriter()
    with jm.MemoryMonitor(logdir=tmp_path, writer=double, probes=[probe]) as monitor:
        monitor(0)
        assert probe.entered.wait(60), "a look is on, and takes no stamps until its end"
        for step in range(1, 4096 + 8):
            monitor(step)
        probe.go.set()
        monitor.flush()
    (story,) = stories_of(tmp_path)
    lost = ("steps that the monitor missed", "7")
    assert lost in [tuple(row[:2]) for row in double.of(LoggedTable)[-1].rows]
    assert lost in [(row.figure, row.latest) for row in story.known_rows]
    assert "\n".join(lost) in reported(tmp_path).text


def test_a_metric_that_begins_as_nan_has_a_lowest_and_a_highest(tmp_path):
    writer = JsonlWriter(tmp_path / "memory.jsonl", "r")
    for step, loss in enumerate((math.nan, 3.0, math.nan, 2.0)):
        writer.write(Metrics(step=step, time_s=1.0, values={"loss": loss}))
    writer.close()
    assert "loss\nnan\n2\n2\n3" in reported(tmp_path).text


def test_a_newer_kind_of_event_is_told_by_its_name(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "memory.jsonl"
    path.write_text(path.read_text().replace('"near_oom"', '"sunspots_seen"') + '{"run":"one","kind":"of_2030"}\n')
    text = reported(tmp_path).text
    assert "sunspots_seen\ntitle\nSunspots seen" in text
    assert "is left out: of kind 'of_2030', which only a newer version knows." in text


def test_runs_without_memory_or_start_are_told_too(tmp_path):
    (tmp_path / "memory.jsonl").write_text(json.dumps({"run": "bare", "kind": "unknown"}) + "\n")
    text = reported(tmp_path).text
    assert "No step was seen; no memory was read; no event was reported; the run has no closing line" in text
    assert "Whether it fits is unknown: nothing reported a limit here." in text
    assert "Unknown, because the run's first line does not have them." in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_durations_read_well(seconds, words):
    assert duration_words(seconds) == words


def test_many_events_are_counted_and_few_named():
    story = RunSummary(run="r", events=[event(step=step) for step in range(6)])
    assert "6 events were reported: near out of memory at step 0, near out of memory at step 1" in happened(story)
    assert "at step 2, and 3 more" in happened(story)


def test_the_command_needs_no_backend(tmp_path):
    """Reading a run must not take the GPU that a training on the same machine has."""
    import sys

    write_run(tmp_path, plan=sample_plans.six())
    code = (
        "import sys; from jaxmem_callbacks.cli.main import main; main(['report', sys.argv[1]]);"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = forked.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=variables, check=True
    )
    assert done.stdout.endswith("False\n")
