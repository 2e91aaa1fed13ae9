"""The page of an out-of-memory report in a real browser: nothing fetched, nothing run, readable everywhere, nothing cut off.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxmem_callbacks.records.page import page_html
from jaxmem_callbacks.writers.oom_report import oom_model
from tests.browser import Browser, contrasts, cut_off_when_narrow, keep_picture
from tests.oom_reports import hostile_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    del browser  # without one there is nothing to write a page for
    path = tmp_path_factory.mktemp("oom") / "report.html"
    path.write_text(page_html(oom_model(hostile_report(), version="0")), "utf-8")
    return path


def test_nothing_is_fetched_or_run(browser: Browser, page: Path):
    opened(browser, page)
    assert browser.run("return window.hurt === undefined")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [2, 0]
    assert browser.text().count("<script>window.hurt=1</script>") > 25
    widths = browser.run(
        "return [...document.querySelectorAll('.bar-line i')].map(one => one.getBoundingClientRect().width)"
    )
    assert len(widths) == 5
    assert min(widths) > 20, "a family of modules, a holder, a group of the peak, a bound and a hole are drawn"


def opened(browser: Browser, page: Path) -> None:
    """Drawn, with all that is folded."""
    browser.open(page.as_uri())
    assert browser.wait_for(lambda: browser.run("return document.querySelector('#open') !== null"))
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.errors() == []


@pytest.mark.parametrize("seen", [{}, {"scheme": "dark"}, {"media": "print"}], ids=str)
def test_it_is_readable_and_fits(browser: Browser, page: Path, seen: dict[str, str]):
    browser.see_as(**seen)
    opened(browser, page)
    count, pale = contrasts(browser)
    assert count > 60
    assert pale == []
    assert cut_off_when_narrow(browser, "oom_narrow") == []
    keep_picture(browser, f"oom_{'_'.join(seen.values()) or 'light'}")
