"""A real run, looked at in the real TensorBoard with a real browser: scalars, events, figure and what is known are there.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures; `JAXMEM_REQUIRE_BROWSER=1` makes a missing browser a failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import forked
from tests.browser import Browser, require
from tests.page_run import ROWS, SHORT_AT, SHORT_ROWS, TAG
from tests.processes import EMITTED_QUICKLY, until
from tests.tensorboards import error_boxes, ours

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[1]

Look = Callable[..., str]


class Run(NamedTuple):
    """A folder of runs with one run in it, and the number of that one's last step."""

    folder: Path
    last_step: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    require()
    folder = tmp_path_factory.mktemp("runs")
    said = forked.run(
        [sys.executable, "-m", "tests.page_run", str(folder)],
        cwd=ROOT,
        env=os.environ | EMITTED_QUICKLY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return Run(folder=folder, last_step=int(said.stdout.split()[-1]))


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
        until(lambda: _last_step_read(found[0]) == run.last_step, seconds=120)
        yield found[0]
        server.terminate()


def _last_step_read(address: str) -> int:
    """Up to which step TensorBoard has read the run by now, its pictures included; it reads file by file, beside serving."""
    last = []
    for plugin, kind, tag in (("scalars", "scalars", TAG), ("images", "images", "memory/over_time")):
        query = urllib.parse.urlencode({"run": "demo", "tag": tag, "sample": 0})
        try:
            url = f"{address}/data/plugin/{plugin}/{kind}?{query}"
            with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - localhost
                points = json.loads(answer.read())
        except urllib.error.HTTPError:  # it knows no such tag yet
            return -1
        last.append(max(point[1] if isinstance(point, list) else point["step"] for point in points))
    return min(last)


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    del address  # the server comes first
    with Browser() as window:
        yield window


@pytest.fixture(scope="module")
def look(browser: Browser, address: str) -> Look:
    """Open a part of the page, wait until it shows all the texts, keep a picture if wanted, return all its text."""

    def shows_all(texts: tuple[str, ...]) -> bool:  # they come one by one
        shown = browser.text()
        return all(text in shown for text in texts)

    def at(part: str, *texts: str) -> str:
        browser.open(f"{address}/#{part}")
        browser.wait_for(lambda: shows_all(texts))
        browser.wait_for(lambda: browser.run(_DRAWN), seconds=10)
        if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
            time.sleep(2)  # lines are animated
            browser.screenshot(Path(folder) / f"tensorboard_{part}.png")
        assert error_boxes(browser) == []
        assert ours(browser.errors()) == []
        return browser.text()

    return at


def test_the_scalars_page_shows_memory_by_step(look: Look, browser: Browser):
    text = look("scalars", "tag:\nmemory/live_arrays_mib")
    shown = re.findall(r"tag:\n(\S+)", text)
    assert {"memory/live_arrays_mib", "memory/live_arrays_count", "memory/host_mib", "train/loss"} <= set(shown)
    assert not any(tag.startswith("window/") for tag in shown[: shown.index("train/loss")]), "the figures come first"
    assert "No dashboards are active" not in text
    runs = browser.run("return fetch('data/plugin/scalars/tags').then(answer => answer.json())")
    assert sorted(runs) == ["demo", "plan"], "no extra directories"
    assert runs["plan"].keys() == {"memory/planned_gib/train_step", "memory/plan_budget_gib"}
    assert {"memory/preset_limit_mib", "memory/program_mib/page_step"} <= runs["demo"].keys(), "on a second page"
    # What was predicted is there with what was compiled, in every window of the run.
    planned, compiled = (
        browser.run(f"{_POINTS_OF}('memory%2F{name}_mib%2Fpage_step')") for name in ("planned", "program")
    )
    assert planned[-1][1:] == compiled[-1][1:]


def test_the_scalars_have_at_least_a_hundred_points(look: Look, browser: Browser, run: Run):
    look("scalars", "tag:\nmemory/live_arrays_mib")
    points = browser.run(f"{_POINTS_OF}('memory%2Flive_arrays_mib')")
    assert len(points) >= 100
    assert points[-1][1] == run.last_step
    assert all(value > 0 for *_, value in points)


def test_the_text_page_tells_both_events_and_what_is_known(look: Look):
    text = look("text", "memory/known_here/text_summary", "Recompilation", "unknown, because JAX's CPU client keeps no")
    assert "Near out of memory" in text
    assert "page_step alone needs" in text
    assert "Recompilation" in text
    assert f"float32[{ROWS},256] -> float32[{SHORT_ROWS},256]" in text
    assert f"step\n{SHORT_AT}\n" in text
    assert "unknown, because JAX's CPU client keeps no allocator statistics" in text


def test_the_images_page_shows_memory_over_time(look: Look, browser: Browser, run: Run):
    text = look("images", "memory/over_time", "memory/heap_map", f"step\n{run.last_step}")
    assert f"step\n{run.last_step}" in text
    widths = browser.wait_for(lambda: browser.run(_WIDTHS))
    assert widths == [700] * 4, "all loaded: memory over time, heap map, and both plans' frontiers"
    assert "memory/heap_map" in text
    assert min(part for _, part in browser.run(_SHOWN_WIDTHS)) >= 0.49, (
        "letters are drawn at twice the size that can be read"
    )


def test_the_scalars_say_what_they_are_and_from_where(look: Look, browser: Browser):
    """As TensorBoard shows it beside a chart."""
    look("scalars", "tag:\nmemory/live_arrays_mib")
    tags = browser.run("return fetch('data/plugin/scalars/tags').then(answer => answer.json())")["demo"]
    assert "in MiB, from jax.live_arrays(), at the moment of reading" in tags["memory/live_arrays_mib"]["description"]
    undescribed = [tag for tag, about in tags.items() if not about["description"] and "train/" not in tag]
    assert undescribed == []


def test_the_custom_scalars_page_has_titled_charts_with_data(look: Look, browser: Browser):
    text = look("custom_scalars", "Live arrays [MiB], from live_arrays")  # the last chart: they are put up one by one
    for title in (
        "Device memory",
        "Against the limit, mean of each window [MiB]",
        "Need of each program by its compiler, beside what was planned [MiB]",
        "Need of each program by its compiler, beside what was planned [GiB]",
        "Compiled over planned, less 1 [share]",
        "Resident memory of the process [MiB]",
        "The step's metrics, mean of each window",
        "Range of each window: min, mean, max",
        "Live arrays [MiB], from live_arrays",
    ):
        assert title in text
    assert "Room that is left [MiB]" not in text, "no chart without data"
    lines = browser.run(
        "return fetch('data/plugin/custom_scalars/scalars?run=demo&tag=' + "
        "encodeURIComponent('^memory/program_mib/(?!.*/(min|max)$)')).then(answer => answer.json())"
    )
    assert "memory/program_mib/page_step" in lines["tag_to_events"]


def test_the_text_page_shows_the_plans(look: Look):
    """The run's own and the one that is a run by itself, each with its candidates and where figures come from."""
    text = look(
        "text",
        "plan/where_figures_come_from/text_summary",
        "full, keep 0.341",
        "1.0 TiB (1,099,511,627,776 B)",
        "predicted",
    )
    cells = text[text.index("plan/candidates/text_summary") :]
    assert "\n->\nfull, keep 0.341\n71.6 MiB\nunknown\n99%\n+9.8%\nunknown\n0\n" in cells
    assert "71.6 MiB (75,078,042 B)\nthe compiler for h100_sxm: arguments + results" in cells
    assert "the attached device's compiler: arguments + results" in cells
    assert "1.0 TiB (1,099,511,627,776 B)\nas asked for" in cells
    assert "the step's peak" in cells, "and what makes it, of the plan that was really compiled"
    assert "predicted" in text


def test_an_error_box_is_found_where_one_is(browser: Browser, tmp_path: Path):
    toy = tmp_path / "toy.html"
    toy.write_text(
        "<body><h3>Data could not be loaded.</h3><p id='host'></p><script>host.attachShadow({mode: 'open'}).innerHTML ="
        " '<p class=error-content>steps do not match</p>'</script>"
    )
    browser.open(toy.as_uri())
    assert error_boxes(browser) == ["Data could not be loaded.", "steps do not match"]


def test_the_time_series_page_shows_the_same(look: Look):
    text = look("timeseries", "memory\n/live_arrays_count")
    assert "memory\n/host_mib" in text


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
# Of each picture its own width, and the part of it that TensorBoard shows it in.
_SHOWN_WIDTHS = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  if (node.nodeName === 'IMG' && node.naturalWidth > 0)
    found.push([node.naturalWidth, node.getBoundingClientRect().width / node.naturalWidth]);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found;
"""
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
