"""The real TensorBoard in a process of its own, and its tab Memory in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser import Browser, click_through


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


def used(browser: Browser) -> dict[str, int]:
    """All that the tab has is used, in every view: how many of each kind there were."""
    return click_through(browser, _FRAME)


def error_boxes(browser: Browser) -> list[str]:
    """The texts of TensorBoard's own boxes for tags that are missing, or do not match, and for data that it could not load."""
    return browser.run(_ERROR_BOXES)


# Their class in TensorBoard's custom scalars, and the words of its other pages.
_ERROR_BOXES = """
const found = [];
const walk = node => {
  const words = node.textContent ? node.textContent.trim() : '';
  if (node.nodeType === Node.TEXT_NODE && /could not be loaded|^Missing Tags/.test(words)) found.push(words);
  if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return;
  if (node.classList && node.classList.contains('error-content')) found.push(words);
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found;
"""
