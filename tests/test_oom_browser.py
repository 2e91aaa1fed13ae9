"""The page of an out-of-memory report in a real browser: nothing fetched, nothing run, readable everywhere, nothing cut off.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmem_callbacks.writers.oom_page import oom_html
from tests.browser import CONTRASTS, OVERFLOW, Browser, require
from tests.oom_reports import hostile_report

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
    path = tmp_path_factory.mktemp("oom") / "report.html"
    path.write_text(oom_html(hostile_report(), version="0"), "utf-8")
    return path


def test_nothing_is_fetched_or_run(browser: Browser, page: Path):
    browser.open(page.as_uri())
    assert browser.run("return window.hurt === undefined")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [0, 0]
    assert browser.text().count("<script>window.hurt=1</script>") > 25
    widths = browser.run(
        "return [...document.querySelectorAll('.bar rect')].map(one => one.getBoundingClientRect().width)"
    )
    assert len(widths) == 4
    assert min(widths) > 20, "a holder, a group of the peak, a bound and a hole are drawn"


@pytest.mark.parametrize("seen", [{}, {"scheme": "dark"}, {"media": "print"}], ids=str)
def test_it_is_readable_and_fits(browser: Browser, page: Path, seen: dict[str, str]):
    browser.see_as(**seen)
    browser.open(page.as_uri())
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 60
    assert [each for each in contrasts if each[0] < LEAST_CONTRAST] == []
    browser.resize(400, 900)
    try:
        assert browser.run(OVERFLOW) == []
    finally:
        browser.resize(1480, 960)
    if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"oom_{'_'.join(seen.values()) or 'light'}.png")
