"""The report in a real browser: nothing fetched, nothing run, readable on light, dark and paper, and nothing cut off.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxmem_callbacks.cli.main import main
from tests import sample_plans
from tests.browser import Browser, contrasts, cut_off, cut_off_when_narrow, keep_picture
from tests.sample_runs import HOSTILE, hostile_plan, write_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    del browser  # without one there is nothing to write a page for
    folder = write_run(tmp_path_factory.mktemp("run"), plan=sample_plans.six())
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


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
    keep_picture(browser, "report_light")


def test_nothing_is_fetched_and_what_users_gave_is_text(browser: Browser, tmp_path: Path):
    folder = write_run(tmp_path, text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=hostile_plan())
    assert main(["report", str(folder)]) == 0
    browser.open((folder / "report.html").as_uri())
    assert browser.run("return window.hurt === undefined")
    fetched = browser.run("return performance.getEntriesByType('resource').map(one => one.name.slice(0, 22))")
    assert set(fetched) <= {"data:image/png;base64,"}
    assert browser.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [0, 1]
    assert browser.text().count("<script>window.hurt=1</script>") > 15
    assert cut_off(browser) == []


@pytest.mark.parametrize(
    "seen", [{}, {"scheme": "dark"}, {"media": "print"}, {"media": "print", "scheme": "dark"}], ids=str
)
def test_every_text_is_readable(browser: Browser, page: Path, seen: dict[str, str]):
    browser.see_as(**seen)
    browser.open(page.as_uri())
    count, pale = contrasts(browser)
    assert count > 100
    assert pale == []
    dark = browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (seen == {"scheme": "dark"}), "paper is white for everybody"
    keep_picture(browser, f"report_{'_'.join(seen.values()) or 'seen'}")


def test_it_fits_a_narrow_window_and_paper(browser: Browser, page: Path):
    browser.see_as()
    browser.open(page.as_uri())
    assert cut_off_when_narrow(browser, "report_narrow") == []
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
    assert contrasts(browser) == (2, ["pale"])
    assert cut_off(browser) == ["wide"]
