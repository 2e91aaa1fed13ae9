"""The tab Memory in the real TensorBoard and a real browser: with and without the data server, and whatever the folder holds.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures; `JAXMEM_REQUIRE_BROWSER=1` makes a missing browser a failure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, contrasts, keep_picture, require
from tests.rich_runs import write_rich_run
from tests.sample_runs import HOSTILE, hostile_plan, write_run

pytestmark = pytest.mark.browser
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    folder = tmp_path_factory.mktemp("log")
    write_long_run(folder / "long")
    write_run(folder / "hostile", text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=hostile_plan())
    write_rich_run(folder / "smaller", run="smaller", scale=0.8, events=False)
    write_rich_run(folder / "rich")
    outside = tmp_path_factory.mktemp("outside")
    write_run(outside / "secret", run="outside")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "linked").mkdir()
    (folder / "linked" / "memory.jsonl").symlink_to(outside / "secret" / "memory.jsonl")
    return folder


@contextmanager
def tensorboard(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a TensorBoard of its own."""
    command = [sys.executable, "-m", "tensorboard.main", *arguments, "--host", "localhost", "--port", "0"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://localhost:\d+", log.read_text())) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert found, log.read_text()
            yield found[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with tensorboard(runs.parent / "fast.log", "--logdir", str(runs), "--load_fast", "true") as found:
        yield found


def asked(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address}/data/plugin/jaxmem/{path}", timeout=60) as answer:  # noqa: S310 - localhost
        return json.loads(answer.read())


# The tab is a frame in TensorBoard's page.
_FRAME = """
const walk = node => {
  if (node.nodeName === 'IFRAME') return node;
  for (const child of [...node.childNodes, ...(node.shadowRoot ? [node.shadowRoot] : [])]) {
    const found = walk(child);
    if (found) return found;
  }
  return null;
};
const frame = walk(document.body), page = frame && frame.contentDocument;
"""


def in_tab(browser: Browser, script: str, *arguments: Any) -> Any:
    """What a script gives that has the tab's document as ``page``; None before there is one."""
    return browser.run(f"{_FRAME} if (!page || !page.body) return null; {script}", *arguments)


def shown(browser: Browser) -> str:
    return in_tab(browser, "return page.body.innerText") or ""


def opened(browser: Browser, address: str, words: str = "At a glance") -> str:
    browser.open("about:blank")
    browser.errors()  # those of another TensorBoard, which is gone, are not looked at
    browser.open(f"{address}/#jaxmem")
    assert browser.wait_for(lambda: words in shown(browser)), shown(browser)
    return shown(browser)


def pick(browser: Browser, run: str) -> None:
    in_tab(
        browser, "[...page.querySelectorAll('.run button')].find(one => one.textContent === arguments[0]).click()", run
    )


def ours(errors: list[str]) -> list[str]:
    """Without what TensorBoard's own page has to say of itself."""
    return [each for each in errors if "Three.js" not in each and "WebGL" not in each]


def test_the_newest_run_is_shown_with_every_view(browser: Browser, address: str):
    browser.see_as()
    text = opened(browser, address)
    browser.wait_for(lambda: in_tab(browser, "return page.querySelectorAll('svg').length >= 3"))
    assert text.startswith("Memory\n1 of 4 runs")
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


def test_links_are_not_followed_and_nothing_outside_is_read(address: str):
    assert [folder["name"] for folder in asked(address, "runs")["folders"]] == ["rich", "smaller", "hostile", "long"]
    for place in ("link", "linked", "../outside", "/etc", ".."):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(address, f"run?folder={place}")


def test_a_very_long_run_is_there_in_two_seconds_and_a_few_megabytes(browser: Browser, runs: Path):
    """With a TensorBoard that has read nothing of it; while the rest is read the page answers."""
    arguments = ("--logdir", str(runs / "long"), "--load_fast", "true")
    with tensorboard(runs.parent / "long.log", *arguments) as address:
        asked(address, "runs")  # TensorBoard's own start is not the tab's
        opened(browser, address)
        drawn = in_tab(
            browser,
            "const times = page.defaultView.performance; const reads = times.getEntriesByType('resource')"
            ".filter(one => one.name.includes('/jaxmem/run?')); return reads[0].responseEnd / 1000",
        )
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
    folders = f"one:{runs / 'rich'},two:{runs / 'smaller'},gs://bucket/three"
    arguments = ("--logdir_spec", folders, "--load_fast", "false")
    with tensorboard(runs.parent / "slow.log", *arguments) as address:
        text = opened(browser, address)
        assert [folder["name"] for folder in asked(address, "runs")["folders"]] == ["one", "two"]
        assert "gs://bucket/three is no local folder, and the Memory tab reads local folders only." in text
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
