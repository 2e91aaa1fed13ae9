"""A real run, looked at in the real TensorBoard with a real browser: scalars, events, figure and what is known are there.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures; `JAXMEM_REQUIRE_BROWSER=1` makes a missing browser a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.windows import Window
from jaxmem_callbacks.records.settings import MonitorSettings
from tests import sample_plans as samples
from tests.browser import Browser, require
from tests.processes import bytes_of_others

pytestmark = pytest.mark.browser
POINTS, SHORT_AT, MOST_STEPS = 110, 60, 2000

Look = Callable[[str, str], str]


class Run(NamedTuple):
    """A folder of runs with one run in it, the number of that one's last step, and how much larger its batch was made."""

    folder: Path
    last_step: int
    scale: int


def page_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, gradient = jm.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w) @ w - 1.0) ** 2))(weights)
    return weights - 0.05 * gradient, {"loss": loss}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of at least 100 points with both events, in the folder above its own, as users have it."""
    require()
    folder = tmp_path_factory.mktemp("runs")
    # Arrays that other tests of this process hold count as live: the step is as much larger as keeps them far from its limit.
    scale = 1 + bytes_of_others() // 2**20
    settings = MonitorSettings(window_s=0.02, scan_s=0.02, limit_bytes=4 * 2**20 * scale, on_error="raise")
    step = jm.jit_step(page_step, jm.StepPolicy())
    weights, batch = jnp.full((256, 256), 0.01), jnp.ones((1024 * scale, 256))
    double = jm.CollectingWriter()
    plan = jm.plan(page_step, weights, batch, budget="1TiB")
    jm.Plan(samples.six()).to_tensorboard(folder / "plan")
    with jm.MemoryMonitor(settings, logdir=folder / "demo", writer=double, plan=plan) as monitor:
        for index in range(MOST_STEPS):  # as many as it takes on a busy machine
            weights, metrics = step(weights, batch if index != SHORT_AT else batch[: 300 * scale])
            monitor(index, metrics)
            time.sleep(0.03)
            if len(double.of(Window)) >= POINTS and index > SHORT_AT:
                break
    assert [event.kind for event in monitor.events] == ["near_oom", "recompilation"]
    return Run(folder=folder, last_step=index, scale=scale)


@pytest.fixture(scope="module")
def address(run: Run) -> Iterator[str]:
    """Where the real TensorBoard shows the run."""
    log = run.folder.parent / "tensorboard.log"
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(run.folder),
        "--host",
        "localhost",
        "--port",
        "0",
    ]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://localhost:\d+", log.read_text())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found, log.read_text()
        yield found[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    del address  # the server comes first
    with Browser() as window:
        yield window


@pytest.fixture(scope="module")
def look(browser: Browser, address: str) -> Look:
    """Open a part of the page, wait until it shows a text, keep a picture if wanted, return all its text."""

    def at(part: str, until: str) -> str:
        browser.open(f"{address}/#{part}")
        browser.wait_for(lambda: until in browser.text())
        browser.wait_for(lambda: browser.run(_DRAWN), seconds=10)
        if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
            time.sleep(2)  # lines are animated
            browser.screenshot(Path(folder) / f"tensorboard_{part}.png")
        return browser.text()

    return at


def test_the_scalars_page_shows_memory_by_step(look: Look, browser: Browser):
    text = look("scalars", "tag:\nmemory/live_arrays_gib")
    shown = re.findall(r"tag:\n(\S+)", text)
    assert {"memory/live_arrays_gib", "memory/live_arrays_count", "memory/host_gib", "train/loss"} <= set(shown)
    assert "No dashboards are active" not in text
    runs = browser.run("return fetch('data/plugin/scalars/tags').then(answer => answer.json())")
    assert sorted(runs) == ["demo", "plan"], "no extra directories"
    assert runs["plan"].keys() == {"memory/planned_gib/train_step", "memory/plan_budget_gib"}
    assert {"memory/preset_limit_gib", "memory/program_gib/page_step"} <= runs["demo"].keys(), "on a second page"
    # What was foretold lies beside what was compiled, in every window of the run.
    planned, compiled = (
        browser.run(f"{_POINTS_OF}('memory%2F{name}_gib%2Fpage_step')") for name in ("planned", "program")
    )
    assert planned[-1][1:] == compiled[-1][1:]


def test_the_scalars_have_at_least_a_hundred_points(look: Look, browser: Browser, run: Run):
    look("scalars", "tag:\nmemory/live_arrays_gib")
    points = browser.run(f"{_POINTS_OF}('memory%2Flive_arrays_gib')")
    assert len(points) >= 100
    assert points[-1][1] == run.last_step
    assert all(value > 0 for *_, value in points)


def test_the_text_page_tells_both_events_and_what_is_known(look: Look, run: Run):
    text = look("text", "memory/known_here/text_summary")
    assert "Near out of memory" in text
    assert "page_step alone needs" in text
    assert "Recompilation" in text
    assert f"float32[{1024 * run.scale},256] -> float32[{300 * run.scale},256]" in text
    assert f"step\n{SHORT_AT}\n" in text
    assert "unknown, because JAX's CPU client keeps no allocator statistics" in text


def test_the_images_page_shows_memory_over_time(look: Look, browser: Browser, run: Run):
    text = look("images", "memory/over_time")
    assert f"step\n{run.last_step}" in text
    widths = browser.wait_for(lambda: browser.run(_WIDTHS))
    assert sorted(widths) == [840, 840, 1008, 1008], "all loaded: memory over time, heap map, and both plans' frontiers"
    assert "memory/heap_map" in text


def test_the_scalars_say_what_they_are_and_from_where(look: Look, browser: Browser):
    """As TensorBoard shows it beside a chart."""
    look("scalars", "tag:\nmemory/live_arrays_gib")
    tags = browser.run("return fetch('data/plugin/scalars/tags').then(answer => answer.json())")["demo"]
    assert "in GiB, from jax.live_arrays(), at the moment of reading" in tags["memory/live_arrays_gib"]["description"]
    undescribed = [tag for tag, about in tags.items() if not about["description"] and not tag.startswith("train/")]
    assert undescribed == []


def test_the_custom_scalars_page_has_titled_charts_with_data(look: Look, browser: Browser):
    text = look("custom_scalars", "Live arrays [GiB], from live_arrays")  # the last chart: they are put up one by one
    for title in (
        "Device memory",
        "Against the limit, mean of each window [GiB]",
        "Need of each program by its compiler, beside what was planned [GiB]",
        "Compiled over planned, less 1 [share]",
        "Resident memory of the process [GiB]",
        "The step's metrics, mean of each window",
        "Range of each window: min, mean, max",
        "Live arrays [GiB], from live_arrays",
    ):
        assert title in text
    assert "Room that is left [GiB]" not in text, "no chart without data"
    lines = browser.run(
        "return fetch('data/plugin/custom_scalars/scalars?run=demo&tag=' + "
        "encodeURIComponent('^memory/program_gib/(?!.*/(min|max)$)')).then(answer => answer.json())"
    )
    assert "memory/program_gib/page_step" in lines["tag_to_events"]


def test_the_text_page_shows_the_plans(look: Look):
    """The run's own and the one that is a run by itself, each with its candidates and where figures come from."""
    text = look("text", "plan/where_figures_come_from/text_summary")
    cells = text[text.index("plan/candidates/text_summary") :]
    assert "\n->\nfull, keep 0.341\n71.6 MiB\nunknown\n99%\n+9.8%\nunknown\n0\n" in cells
    assert "71.6 MiB (75,078,042 B)\nthe compiler for h100_sxm: arguments + results" in cells
    assert "the attached device's compiler: arguments + results" in cells
    assert "1.0 TiB (1,099,511,627,776 B)\nas asked for; the scalar memory/plan_budget_gib" in cells
    assert "the step's peak" in cells, "and what makes it, of the plan that was really compiled"
    assert "predicted" in text


def test_the_time_series_page_shows_the_same(look: Look):
    text = look("timeseries", "memory\n/live_arrays_count")
    assert "memory\n/host_gib" in text


# Whether the page has settled: every chart or image has something in it.
_DRAWN = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  if (['IMG', 'CANVAS', 'TABLE', 'path'].includes(node.nodeName)) found.push(node);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found.length > 0;
"""
_POINTS_OF = """
const points = tag => fetch('data/plugin/scalars/scalars?run=demo&tag=' + tag).then(answer => answer.json());
return points"""
_WIDTHS = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  if (node.nodeName === 'IMG' && node.naturalWidth > 0) found.push(node.naturalWidth);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found;
"""
