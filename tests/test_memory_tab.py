"""The tab Memory in the real TensorBoard and a real browser: with and without the data server, and whatever the folder holds.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures; `JAXMEM_REQUIRE_BROWSER=1` makes a missing browser a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxmem_callbacks.analysis.figures import Spread, Window
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.writers.perfetto import trace_of_steps
from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter
from tests.browser import Browser, click_through, contrasts, keep_picture, require
from tests.processes import EMITTED_QUICKLY
from tests.rich_runs import write_rich_run
from tests.sample_runs import HOSTILE, hostile_plan, write_run
from tests.tensorboards import error_boxes, in_tab, opened, ours, pick, shown, tensorboard, used

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[1]
WINDOWS, EVENTS = 50_000, 5_000
INTERACTIVE_S = 2.0
MOST_SENT = 5e6


def write_long_run(folder: Path) -> None:
    """A run of very many windows and events, as a monitor writes them."""
    folder.mkdir(parents=True)
    usual = {"run": "long"}
    start = {"kind": "run", "time_s": 1.7e9, "devices": {"platform": "gpu", "kind": "NVIDIA H100", "count": 1}}
    lines: list[dict[str, Any]] = [start]
    for step in range(WINDOWS):
        at = {"step": step, "time_s": 1.7e9 + step, "device": "gpu:0"}
        used = 40_000_000_000 + step % 97 * 200_000_000
        sizes = {"bytes_in_use": used, "peak_bytes_in_use": 60_000_000_000, "bytes_limit": 75_000_000_000}
        lines.append({"kind": "reading", "source": "allocator", **at, **sizes})
        if step % (WINDOWS // EVENTS) == 0:
            words = {"message": f"gpu:0 holds {used} B after step {step}.", "action": "Take a smaller batch."}
            lines.append(
                {"kind": "event", "event": "near_oom", **at, **words, "figures": {"limit_bytes": 75_000_000_000}}
            )
    (folder / "memory.jsonl").write_text("".join(f"{json.dumps(usual | line)}\n" for line in lines))


def write_real_runs(folder: Path) -> None:
    """A training over eight devices with a plan, and one that ends for want of memory."""
    flags = f"--xla_force_host_platform_device_count=8 {EMITTED_QUICKLY['XLA_FLAGS']}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_runs", str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RESOURCE_EXHAUSTED: Out of memory allocating" in done.stderr.splitlines()[-1], done.stderr


def write_device_run(folder: Path, *, limit: bool) -> None:
    """The event file of a GPU's run, whose allocator knows its limit or not."""
    folder.mkdir(parents=True)
    writer = TensorBoardWriter(folder, folder.name)
    for step in range(1500):  # more than TensorBoard keeps of a tag
        used = 30.0 + step % 7 * 4
        values = {"memory/in_use_gib": used}
        if limit:
            values |= {"memory/limit_gib": 60.0, "memory/headroom_gib": 60.0 - used}
        spreads = {tag: Spread(low=value, mean=value, high=value, count=1) for tag, value in values.items()}
        writer.write(Window(step=step, time_s=1.7e9 + step, spreads=spreads))
    writer.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    folder = tmp_path_factory.mktemp("log")
    write_real_runs(folder)
    write_long_run(folder / "long")
    write_run(folder / "hostile", text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=hostile_plan())
    write_rich_run(folder / "smaller", run="smaller", scale=0.8, events=False)
    write_rich_run(folder / "rich")
    write_device_run(folder / "device", limit=True)
    write_device_run(folder / "no_limit", limit=False)
    outside = tmp_path_factory.mktemp("outside")
    write_run(outside / "secret", run="outside")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "linked").mkdir()
    (folder / "linked" / "memory.jsonl").symlink_to(outside / "secret" / "memory.jsonl")
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with tensorboard(runs.parent / "fast.log", "--logdir", str(runs), "--load_fast", "true") as found:
        yield found


def asked(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}/data/plugin/jaxmem/{path}", timeout=60) as answer:  # noqa: S310 - localhost
        return json.loads(answer.read())


def test_the_newest_run_is_shown_with_every_view(browser: Browser, address: str):
    browser.see_as()
    text = opened(browser, address)
    browser.wait_for(lambda: in_tab(browser, "return page.querySelectorAll('svg').length >= 3"))
    assert text.startswith("Memory\n1 of 6 runs")
    for view in ("Over time", "What makes the peak", "The plan", "The heap", "Events, and what to do", "Details"):
        assert view in text
    assert "train_step" in text
    assert in_tab(browser, "return page.querySelectorAll('#peak .cell').length") > 40
    keep_picture(browser, "tab_light")
    assert ours(browser.errors()) == []


def test_two_runs_stand_beside_each_other(browser: Browser, address: str):
    opened(browser, address)
    in_tab(
        browser,
        "[...page.querySelectorAll('.run')].find(one => one.textContent === 'smaller').querySelector('input').click()",
    )
    assert browser.wait_for(lambda: in_tab(browser, "return page.querySelectorAll('#time svg').length === 2"))
    assert "smaller" in in_tab(browser, "return page.querySelector('#peak').innerText")
    keep_picture(browser, "tab_two_runs")
    assert ours(browser.errors()) == []


def test_it_is_dark_where_tensorboard_is(browser: Browser, address: str):
    browser.see_as()
    opened(browser, address)
    colour = "return page.defaultView.getComputedStyle(page.body).backgroundColor"
    assert in_tab(browser, colour) == "rgb(255, 255, 255)"
    browser.run("document.body.classList.add('dark-mode')")
    assert browser.wait_for(lambda: in_tab(browser, colour) != "rgb(255, 255, 255)", seconds=5)
    keep_picture(browser, "tab_dark")


def test_a_run_whose_names_are_html_is_text(browser: Browser, address: str):
    opened(browser, address)
    pick(browser, "hostile")
    assert browser.wait_for(lambda: "window.hurt=1" in shown(browser))
    in_tab(browser, "page.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert shown(browser).count("<script>window.hurt=1</script>") > 15
    assert in_tab(browser, "return page.defaultView.hurt === undefined")
    assert browser.run("return window.hurt === undefined")
    assert in_tab(browser, "return page.querySelectorAll('img').length") == 0
    assert ours(browser.errors()) == []


USUAL = ("At a glance", "Over time", "What makes the peak")
LAST = ("Events, and what to do", "Details")
FAILURE = ("At a glance", "What happened, and what to do", "Over time", "What makes the peak", *LAST)
VIEWS = {
    "rich": (*USUAL, "The plan", "The heap", *LAST),
    "smaller": (*USUAL, "The plan", "The heap", *LAST),
    "hostile": (*USUAL, "The plan", *LAST),
    "long": (*USUAL, *LAST),  # of programs it says that none reported what it needs
    "eight": (*USUAL, "Within a step", "The plan", "The heap", *LAST),
    "failed": (*USUAL, "Within a step", "The heap", *LAST),
}


def use(browser: Browser, run: str, views: tuple[str, ...]) -> None:
    """Show a run and use all of its page."""
    pick(browser, run)
    drawn = "return [...page.querySelectorAll('h2')].map(one => one.textContent)"
    assert browser.wait_for(lambda: tuple(in_tab(browser, drawn)) == views), in_tab(browser, drawn)
    assert browser.wait_for(lambda: in_tab(browser, "return page.querySelector('#time svg') !== null"))
    found = used(browser)
    assert found["views"] == len(views)
    assert found["figures"] >= 1
    assert bool(found["cells"]) == (views != VIEWS["long"])
    assert bool(found["blocks"]) == ("Within a step" in views)
    assert bool(found["points"]) == ("The plan" in views)
    assert bool(found["heaps"]) == ("The heap" in views)
    assert ours(browser.errors()) == []


@pytest.mark.parametrize("run", VIEWS)
def test_every_view_of_a_run_is_used(browser: Browser, address: str, run: str):
    opened(browser, address)
    use(browser, run, VIEWS[run])
    keep_picture(browser, f"tab_{run}")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("scalars", "memory/live_arrays_mib"),
        ("custom_scalars", "Live arrays [MiB], from live_arrays"),
        ("custom_scalars", "The limit, and below it as a band what is in use [GiB]"),
        ("images", "memory/over_time"),
        ("text", "What to do"),
        ("timeseries", "memory"),
    ],
)
def test_tensorboards_own_pages_of_all_runs_have_no_error_box(browser: Browser, address: str, part: str, words: str):
    """Those with event files: over eight devices with a plan, out of memory, and of GPUs with a limit and without one."""
    browser.open("about:blank")
    browser.errors()
    browser.open(f"{address}/#{part}")
    assert browser.wait_for(lambda: words in browser.text()), browser.text()
    assert browser.wait_for(lambda: all(run in browser.text() for run in ("eight", "failed"))), browser.text()
    assert error_boxes(browser) == []
    assert ours(browser.errors()) == []
    keep_picture(browser, f"tensorboard_{part}_{words[:3]}")


def test_a_program_above_the_limit_leaves_no_headroom(browser: Browser, address: str):
    """This CPU reports live arrays, and no temporaries."""
    opened(browser, address)
    pick(browser, "failed")
    tiles = "return [...page.querySelectorAll('.tile')].map(one => one.innerText).join('\\n')"
    said = browser.wait_for(lambda: in_tab(browser, tiles))
    assert "headroom\nnone\n" in said, said
    assert "above the limit of 48.0 MiB, while train_step runs" in said
    assert ours(browser.errors()) == []


def test_a_step_is_saved_for_perfetto(browser: Browser, address: str, runs: Path):
    """The file that the button saves holds what `jaxmem report --perfetto` writes, but for kinds of buffers and short names."""
    opened(browser, address)
    pick(browser, "eight")
    saves = "return [...page.querySelectorAll('#step button')].find(one => one.textContent === 'Save for Perfetto')"
    assert browser.wait_for(lambda: in_tab(browser, f"{saves} !== undefined"))
    in_tab(
        browser,
        "const its = page.defaultView.URL, make = its.createObjectURL.bind(its);"
        "its.createObjectURL = blob => { blob.text().then(text => { frame.saved = text; }); return make(blob); };"
        f"{saves.removeprefix('return')}.click()",
    )
    saved = json.loads(browser.wait_for(lambda: in_tab(browser, "return frame.saved")))
    (story,) = stories_of(runs / "eight")
    name, program = max(
        ((name, each) for name, each in story.programs.items() if each.schedule is not None),
        key=lambda pair: pair[1].memory.step_bytes,
    )
    written = trace_of_steps({name: program.schedule})
    for event in (*saved["traceEvents"], *written["traceEvents"]):
        if event["ph"] == "X":
            event["name"] = ""
            event["args"].pop("kind", None)
    assert saved == written
    assert sum(event["ph"] == "X" for event in saved["traceEvents"]) > 5
    assert ours(browser.errors()) == []


def lead_from_a_buffer_to_its_block_and_back(browser: Browser) -> None:
    focused = "return document.activeElement.closest('#peak .cell, #step .block')?.getAttribute('aria-label')"
    browser.run("document.querySelector('#peak .group.s3 .cell').focus()")
    browser.press("Enter")
    buffer = browser.run(focused)
    browser.press("Enter")
    size, unit, operation = browser.run(focused).split(" ", 2)
    assert buffer.endswith(f" {operation} {size} {unit}"), "the buffer of the treemap is a block within the step"
    assert browser.run("return document.querySelectorAll('#step .around').length") == 1
    browser.press("Enter")
    assert browser.run(focused) == buffer


def test_both_reports_are_used_from_a_file(browser: Browser, runs: Path):
    (failure,) = (runs / "failed-oom").glob("*/report.html")
    assert main(["report", str(runs / "eight"), "-o", str(runs.parent / "eight.html")]) == 0
    for page, views in ((runs.parent / "eight.html", VIEWS["eight"]), (failure, FAILURE)):
        browser.open(page.as_uri())
        drawn = "return [...document.querySelectorAll('h2')].map(one => one.textContent)"
        assert browser.wait_for(lambda drawn=drawn: browser.run(drawn) != [], seconds=10)
        assert tuple(browser.run(drawn)) == views
        assert browser.wait_for(lambda: browser.run("return document.querySelector('#time svg') !== null"))
        assert click_through(browser)["figures"] >= 1
        assert "live arrays" in browser.run("return document.querySelector('#time').innerText")
        if "Within a step" in views:
            lead_from_a_buffer_to_its_block_and_back(browser)
        assert browser.errors() == []


def test_links_are_not_followed_and_nothing_outside_is_read(address: str):
    assert [folder["name"] for folder in asked(address, "runs")["folders"]] == [
        "rich",
        "smaller",
        "hostile",
        "long",
        "failed",
        "eight",
    ]
    for place in ("link", "linked", "../outside", "/etc", ".."):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(address, f"run?folder={place}")


@pytest.mark.parametrize("data_server", ["true", "false"])
def test_a_very_long_run_is_there_in_two_seconds_and_a_few_megabytes(browser: Browser, runs: Path, data_server: str):
    """With a TensorBoard that has read nothing of it; while the rest is read the page answers."""
    arguments = ("--logdir", str(runs / "long"), "--load_fast", data_server)
    with tensorboard(runs.parent / "long.log", *arguments) as address:
        asked(address, "runs")  # TensorBoard's own start is not the tab's
        opened(browser, address)
        drawn = in_tab(browser, "return page.defaultView.performance.getEntriesByName('drawn')[0].startTime / 1000")
        assert drawn < INTERACTIVE_S
        assert browser.wait_for(lambda: f"{EVENTS:,}" in shown(browser), seconds=120), shown(browser)[:600]
        sent = in_tab(
            browser,
            "return page.defaultView.performance.getEntriesByType('resource')"
            ".reduce((sum, one) => sum + (one.name.includes('/jaxmem/') ? one.transferSize : 0), 0)",
        )
        assert 1000 < sent < MOST_SENT
        assert in_tab(browser, "return page.querySelectorAll('#time .event-mark').length") < 120
        keep_picture(browser, "tab_long")
        assert ours(browser.errors()) == []


def test_without_the_data_server_and_by_a_list_of_folders(browser: Browser, runs: Path):
    known = ("rich", "smaller", "eight", "failed", "hostile")
    folders = ",".join([*(f"{number}:{runs / name}" for number, name in enumerate(known)), "gs://bucket/three"])
    arguments = ("--logdir_spec", folders, "--load_fast", "false")
    with tensorboard(runs.parent / "slow.log", *arguments) as address:
        text = opened(browser, address)
        assert {folder["name"] for folder in asked(address, "runs")["folders"]} == set("01234")
        assert "gs://bucket/three is no local folder, and the Memory tab reads local folders only." in text
        for number, name in enumerate(known):
            use(browser, str(number), VIEWS[name])
        assert ours(browser.errors()) == []


def test_what_is_damaged_is_remarked_upon(runs: Path, tmp_path: Path):
    for place, text in (("cut", '{"run":"a","ki'), ("other", "{}\n[]\n"), ("empty", "")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "memory.jsonl").write_text(text)
    half = (runs / "rich" / "memory.jsonl").read_text().splitlines(keepends=True)
    write_run(tmp_path / "damaged")
    with (tmp_path / "damaged" / "memory.jsonl").open("a") as file:
        file.write('{"run":"one","kind":"reading"}\nnonsense\n')
        file.writelines(half[:3])
    with tensorboard(tmp_path / "tb.log", "--logdir", str(tmp_path), "--load_fast", "false") as address:
        found = {place: asked(address, f"run?folder={place}") for place in ("cut", "other", "empty", "damaged")}
    assert [len(found[place]["runs"]) for place in ("cut", "other", "empty", "damaged")] == [0, 0, 0, 2]
    assert "'{}' is no line of a run" in found["other"]["remark"]
    assert "is left out: cut in the middle" in json.dumps(found["damaged"]["runs"])


def test_every_text_of_the_tab_is_readable(browser: Browser, address: str):
    """TensorBoard's page around it is not ours, so the frame is looked at by itself."""
    for scheme in ("light", "dark"):
        browser.see_as(scheme=scheme)
        browser.open(f"{address}/data/plugin_entry.html?name=jaxmem")
        assert browser.wait_for(lambda: browser.run("return document.querySelector('#time svg') !== null"))
        number, pale = contrasts(browser)
        assert number > 100
        assert pale == []
    browser.see_as()
