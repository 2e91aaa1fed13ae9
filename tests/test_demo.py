"""`make demo`, shortened: what it promises to print is printed, and what it promises to write is in the event file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.units import parse_bytes
from jaxmem_callbacks.writers.log import END
from tests.browser import Browser
from tests.processes import EMITTED_QUICKLY
from tests.tensorboards import error_boxes, in_tab, opened, ours, tensorboard, used

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo.py"
STEPS = 6
SHORTENED = "import demo; demo.COMPARED, demo.JUDGED = 2, 2; demo.main()"
ROWS = ("arguments", "outputs", "aliased", "temporaries", "total")


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of an earlier run and one of the user's."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    folder.mkdir()
    for name in ("events.out.tfevents.1.earlier", "memory.jsonl", "notes.txt"):
        (folder / name).write_text("earlier")
    return folder


@pytest.fixture(scope="module")
def printed(logdir: Path) -> str:
    """What a few steps of the demo print into a pipe of 80 columns."""
    path = os.pathsep.join([str(ROOT), str(DEMO.parent)])
    variables = {**os.environ, **EMITTED_QUICKLY, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "COLUMNS": "80"}
    command = [sys.executable, "-c", SHORTENED, "--steps", str(STEPS), "--logdir", str(logdir)]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    lines = [line for line in answer.stderr.splitlines() if "jaxmem:" in line and " is read every " not in line]
    reported = re.compile(rf"jaxmem: (Near out of memory|Recompilation) at step |{END}: ")
    told = [
        line for line in lines if not reported.search(line)
    ]  # the events and the last two lines, which the log shows
    assert not told, "no part of the monitor was switched off; on a busy machine one may be read less often"
    return answer.stdout


@pytest.fixture(scope="module")
def events(printed: str, logdir: Path) -> EventAccumulator:
    """The run as TensorBoard reads it."""
    del printed  # the run comes first
    return EventAccumulator(str(logdir)).Reload()


def sizes(printed: str, row: str) -> tuple[int, int]:
    """Bytes of one row of the table: plain, and with the preset."""
    found = re.search(rf"^ *{row} +([\d.]+ \w*B) +([\d.]+ \w*B)", printed, flags=re.MULTILINE)
    assert found, f"{row} in\n{printed}"
    return parse_bytes(found[1]), parse_bytes(found[2])


def test_the_table_shows_what_the_preset_saves(printed: str):
    plain, preset = ({row: sizes(printed, row)[side] for row in ROWS} for side in (0, 1))
    assert plain["arguments"] == preset["arguments"]
    assert plain["aliased"] == 0
    assert preset["aliased"] > 0.9 * preset["outputs"]
    assert plain["temporaries"] > 5 * preset["temporaries"]
    assert plain["total"] > 4 * preset["total"]
    for each in (plain, preset):
        added_up = each["arguments"] + each["outputs"] - each["aliased"] + each["temporaries"]
        assert each["total"] == pytest.approx(added_up, rel=0.02)


def test_the_price_is_shown_too(printed: str):
    extra = re.search(r"extra FLOPs +none +([\d.]+) G +\+(\d+)%, recomputed", printed)
    assert extra, printed
    assert 10 <= int(extra[2]) <= 34, "one forward pass at most"
    apart = re.search(r"Same mathematics: .* at most (\S+), relative", printed)
    assert apart, printed
    assert float(apart[1]) <= 1e-6


def test_the_held_out_loss_falls(printed: str):
    losses = re.search(r"Held-out loss ([\d.]+) -> ([\d.]+)", printed)
    assert losses, printed
    assert float(losses[2]) < 0.8 * float(losses[1])


def test_the_events_are_told(printed: str):
    limit = jm.load_preset(DEMO.with_suffix(".yaml")).monitor.limit_bytes
    assert limit is not None
    assert sizes(printed, "total")[1] < limit < sizes(printed, "total")[0]
    text = " ".join(printed.split())
    assert "Events of the run: 2" in text
    assert "Near out of memory at step 0 plain_step alone needs" in text
    assert f"Recompilation at step {STEPS - 1} train_step was compiled again" in text
    assert "batch: int32[4,257] -> int32[2,257]" in text


def test_progress_and_the_line_to_type_are_shown(printed: str, logdir: Path):
    assert f"Training {STEPS} steps" in printed
    assert re.findall(r"step +(\d+) +loss +[\d.]+ +live arrays +[\d.]+ MiB", printed)[-1] == str(STEPS - 1)
    assert re.search(
        rf"^ +\S+ --logdir {re.escape(str(logdir))}$", printed.replace(" && tensorboard", ""), re.MULTILINE
    )
    assert max(map(len, printed.replace(str(logdir), "").splitlines())) <= 80


def test_one_event_file_replaces_the_earlier_one(printed: str, logdir: Path):
    del printed
    (file,) = logdir.glob("events.out.tfevents.*")
    assert not file.name.endswith("earlier")
    assert (logdir / "notes.txt").read_text() == "earlier"
    assert (logdir / "memory.jsonl").read_text().startswith('{"run"')


def test_every_step_is_a_point_of_memory(events: EventAccumulator):
    tags = set(events.Tags()["scalars"])
    needs = {"memory/program_mib/plain_step", "memory/program_mib/train_step", "memory/preset_limit_mib"}
    assert needs | {"memory/live_arrays_mib", "memory/host_mib", "train/loss"} <= tags
    points = events.Scalars("memory/live_arrays_mib")
    assert len(points) >= STEPS - 2, "the full demo has at least 120 steps, and so at least 100 points"
    assert points[-1].step == STEPS - 1


def test_tensorboard_shows_the_events_and_the_figure(events: EventAccumulator):
    texts = [each.tensor_proto.string_val[0].decode() for each in events.Tensors("memory/events/text_summary")]
    assert [text.split("**")[1] for text in texts] == ["Near out of memory", "Recompilation"]
    assert "memory/over_time" in events.Tags()["images"]


def test_pictures_are_not_taken_without_a_run(tmp_path: Path):
    command = [sys.executable, str(ROOT / "tools" / "screenshot_demo.py"), "--logdir", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == f"No run in {tmp_path}: make demo"


@pytest.mark.browser
@pytest.mark.parametrize("data_server", ["true", "false"])
def test_its_run_is_used_in_tensorboard_right_after_the_start(
    printed: str, logdir: Path, browser: Browser, tmp_path: Path, data_server: str
):
    """The tab with every view, and TensorBoard's own pages: no error box, and no error in the console."""
    del printed
    arguments = ("--logdir", str(logdir), "--load_fast", data_server)
    with tensorboard(tmp_path / "tensorboard.log", *arguments) as address:
        opened(browser, address)
        drawn = "return page.querySelector('#time svg') !== null && page.querySelector('#peak .cell') !== null"
        assert browser.wait_for(lambda: in_tab(browser, drawn))
        found = used(browser)
        assert (found["views"], found["events"]) == (7, 2)
        assert min(found[kind] for kind in ("figures", "cells", "blocks", "heaps")) >= 1
        assert ours(browser.errors()) == []
        for part, words in (
            ("scalars", "tag:\nmemory/live_arrays_mib"),
            ("custom_scalars", "Live arrays [MiB], from live_arrays"),
            ("images", "memory/over_time"),
            ("text", "What to do"),
        ):
            browser.open(f"{address}/#{part}")
            assert browser.wait_for(lambda words=words: words in browser.text()), part
            assert error_boxes(browser) == []
            assert ours(browser.errors()) == []
