"""The report in a real browser: nothing fetched, nothing run, readable on light, dark and paper, and nothing cut off.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from tests import sample_plans
from tests.browser import CONTRASTS, OVERFLOW, Browser, require
from tests.sample_runs import HOSTILE, hostile_plan, write_run

pytestmark = pytest.mark.browser
LEAST_CONTRAST = 4.5  # WCAG 2, level AA, for text of a page's usual size


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require()
    with Browser() as window:
        yield window


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    del browser  # without one there is nothing to write a page for
    folder = write_run(tmp_path_factory.mktemp("run"), plan=sample_plans.six())
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def keep(browser: Browser, name: str) -> None:
    if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"report_{name}.png")


def test_the_story_is_there_in_words_and_drawn(browser: Browser, page: Path):
    browser.see_as()
    browser.open(page.as_uri())
    shown = browser.text()
    assert shown.startswith(
        f"Memory of {page.parent}\nSteps 0 to 39 ran in 39.0 s on 2 x NVIDIA H100; memory was highest"
    )
    assert "What to do:" in shown
    lines = browser.run("return [...document.querySelectorAll('.chart polyline')].map(one => one.getTotalLength())")
    assert len(lines) == 3, "bytes in use, their peak and the host"
    assert all(length > 500 for length in lines)
    marks = browser.run(
        "return [...document.querySelectorAll('.chart > svg > .event')].map(one => one.getBoundingClientRect().x)"
    )
    ticks = browser.run(
        "return [...document.querySelectorAll('.chart .tick')].filter(one => one.textContent === '30')"
        ".map(one => { const box = one.getBoundingClientRect(); return box.x + box.width / 2; })"
    )
    assert marks == pytest.approx(ticks, abs=2), "the event stands at its step"
    assert browser.run("return document.querySelector('img.paper').naturalWidth") == 1008
    keep(browser, "light")


def test_nothing_is_fetched_and_what_users_gave_is_text(browser: Browser, tmp_path: Path):
    folder = write_run(tmp_path, text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=hostile_plan())
    assert main(["report", str(folder)]) == 0
    browser.open((folder / "report.html").as_uri())
    assert browser.run("return window.hurt === undefined")
    fetched = browser.run("return performance.getEntriesByType('resource').map(one => one.name.slice(0, 22))")
    assert set(fetched) <= {"data:image/png;base64,"}
    assert browser.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [0, 1]
    assert browser.text().count("<script>window.hurt=1</script>") > 15
    assert browser.run(OVERFLOW) == []


@pytest.mark.parametrize(
    "seen", [{}, {"scheme": "dark"}, {"media": "print"}, {"media": "print", "scheme": "dark"}], ids=str
)
def test_every_text_is_readable(browser: Browser, page: Path, seen: dict[str, str]):
    browser.see_as(**seen)
    browser.open(page.as_uri())
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 100
    assert [each for each in contrasts if each[0] < LEAST_CONTRAST] == []
    dark = browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (seen == {"scheme": "dark"}), "paper is white for everybody"
    keep(browser, "_".join(seen.values()) or "seen")


def test_it_fits_a_narrow_window_and_paper(browser: Browser, page: Path):
    browser.see_as()
    browser.open(page.as_uri())
    browser.resize(400, 900)
    try:
        assert browser.run(OVERFLOW) == []
        keep(browser, "narrow")
    finally:
        browser.resize(1480, 960)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert 2 <= printed.count(b"/Type /Page\n") <= 8
    if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
        (Path(folder) / "report.pdf").write_bytes(printed)


def test_contrast_and_overflow_can_fail(browser: Browser, tmp_path: Path):
    toy = tmp_path / "toy.html"
    toy.write_text("<body style='background:#fff'><p style='color:#aaa'>pale</p><p style='width:9000px'>wide</p>")
    browser.see_as()
    browser.open(toy.as_uri())
    assert [each[1] for each in browser.run(CONTRASTS) if each[0] < LEAST_CONTRAST] == ["pale"]
    assert browser.run(OVERFLOW) == ["wide"]
