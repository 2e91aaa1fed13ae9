"""Headless Chromium, driven through chromedriver's W3C WebDriver interface with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

_Found = TypeVar("_Found")
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1500,1100",
)


def missing() -> list[str]:
    """What of Chromium and its driver is not on PATH."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


def require() -> None:
    """Go on where there is a browser; skip, or fail where `JAXMEM_REQUIRE_BROWSER=1` says that this must prove."""
    if missing():
        import pytest  # the pictures of the documents are taken without it

        if os.environ.get("JAXMEM_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{' and '.join(missing())} not on PATH: apt-get install chromium chromium-driver")
        pytest.skip("browser: not proved")  # tests/conftest.py repeats this line at the end of the run


class Browser:
    """One browser window, in a profile of its own that goes with it."""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        started = next(
            match for line in self._driver.stdout if (match := re.search(r"successfully on port (\d+)", line))
        )
        self._address = f"http://localhost:{started[1]}/session"
        options = {"binary": shutil.which("chromium"), "args": [*_ARGUMENTS, f"--user-data-dir={self._profile.name}"]}
        logged = {"browser": "ALL"}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logged}}}
        self._address += "/" + self._call("POST", "", wanted)["sessionId"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("DELETE", "")
        self._driver.terminate()
        self._driver.communicate(timeout=20)  # and closes the pipe
        self._profile.cleanup()

    def open(self, url: str) -> None:
        """Go to a page, by way of an empty one: TensorBoard does not reload for another part after `#`."""
        self._call("POST", "/url", {"url": "about:blank"})
        self._call("POST", "/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """Give the page this size in pixels; Chromium's own window is never less than 500 wide, and a telephone is."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})

    def see_as(self, *, media: str = "", scheme: str = "light") -> None:
        """Show pages as on ``print``, or to somebody who asked for a ``dark`` scheme; from now on."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        wanted = {"cmd": "Emulation.setEmulatedMedia", "params": {"media": media, "features": features}}
        self._call("POST", "/goog/cdp/execute", wanted)

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self._call("POST", "/print", {}))

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys one after the other: what has the focus gets them."""
        strokes = [{"type": kind, "value": _KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": strokes})

    def drag(
        self, start: tuple[float, float], end: tuple[float, float], *, holding: str = "", by: str = "mouse"
    ) -> None:
        """Press the mouse at one place of the window and release it at another, in pixels; a click where both are one.

        ``by`` is ``touch`` for a finger.
        """
        moves = [
            {"type": "pointerMove", "x": round(start[0] + share * (end[0] - start[0])), "y": round(end[1])}
            for share in (0.25, 0.5, 1.0)
        ]
        first = {"type": "pointerMove", "x": round(start[0]), "y": round(start[1])}
        pressed, released = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        mouse = {
            "type": "pointer",
            "id": by,
            "parameters": {"pointerType": by},
            "actions": [first, pressed, *moves, released],
        }
        if not holding:
            self._act(mouse)
            return
        key, waits = {"value": _KEYS[holding]}, [{"type": "pause"}] * len(moves)
        held = [{"type": "keyDown", **key}, *waits, *waits[:2], {"type": "keyUp", **key}]
        self._act({"type": "key", "id": "keys", "actions": held}, mouse)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element of this kind, which is brought into the window."""
        place = self.run(_MIDDLE, selector)
        self.drag(place, place)

    def _act(self, *sources: dict[str, Any]) -> None:
        self._call("POST", "/actions", {"actions": list(sources)})

    def text(self) -> str:
        """The text of the whole page, shadow trees included."""
        return self.run(_ALL_TEXT)

    def wait_for(self, what: Callable[[], _Found], *, seconds: float = 40.0) -> _Found:
        """Ask again until the answer is true; after that long, whatever it is."""
        deadline = time.monotonic() + seconds
        while not (found := what()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def errors(self) -> list[str]:
        """What the console has shown of errors and warnings since it was asked last."""
        logged = self._call("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in logged if each["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, method=method)  # noqa: S310 - localhost
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - localhost
            return json.loads(answer.read())["value"]


def keep_picture(browser: Browser, name: str) -> None:
    """Save what the window shows where `JAXMEM_SCREENSHOTS` names a folder."""
    if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


def contrasts(browser: Browser) -> tuple[int, list[str]]:
    """How many texts the page has, and those that are too pale on what is behind them."""
    found = browser.run(_CONTRASTS)
    return len(found), [text for contrast, text in found if contrast < _LEAST_CONTRAST]


def cut_off(browser: Browser) -> list[str]:
    """What reaches over the window's edge."""
    return browser.run(_OVERFLOW)


def cut_off_when_narrow(browser: Browser, picture: str) -> list[str]:
    """The same in a window as wide as a telephone, of which a picture may be kept."""
    browser.resize(400, 900)
    try:
        keep_picture(browser, picture)
        return cut_off(browser)
    finally:
        browser.resize(1480, 960)


def click_through(browser: Browser, page: str = "const page = document;") -> dict[str, int]:
    """Use all that a memory page has, in every view, as people do: how many of each kind there were.

    Args:
        browser: It shows the page.
        page: JavaScript that names its document.
    """
    return browser.run(f"{page}\n{_CLICK_THROUGH}")


_KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Shift": "\ue008", "Escape": "\ue00c"}
_KEYS |= {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}
_MIDDLE = """
const node = document.querySelector(arguments[0]);
node.scrollIntoView({block: 'center', behavior: 'instant'});
const box = node.getBoundingClientRect();
return [box.x + box.width / 2, box.y + box.height / 2];
"""
_LEAST_CONTRAST = 4.5  # WCAG 2, level AA, for text of a page's usual size
_ALL_TEXT = """
const seen = [];
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE) { seen.push(node.textContent); return; }
  if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.nodeName)) return;
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return seen.map(text => text.trim()).filter(text => text).join('\\n');
"""
# What reaches over the window's edge, other than inside what scrolls by itself.
_OVERFLOW = """
return [...document.querySelectorAll('h1, h2, h3, h4, p, li, figure, img, article, div, table, footer')]
  .filter(one => !one.parentElement.closest('.scroll'))
  .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(one => one.textContent.slice(0, 40));
"""
# What is drawn again by a click is looked for again.
_CLICK_THROUGH = """
const all = selector => [...page.querySelectorAll(selector)];
const fire = (node, name, options) => node.dispatchEvent(new Event(name, {bubbles: true, ...options}));
const press = (node, key) => node.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
const point = (node, name) => {
  const box = node.getBoundingClientRect(), at = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
  node.dispatchEvent(new PointerEvent(name, {bubbles: true, pointerId: 1, ...at}));
};
const done = {views: all('h2').length};
all('nav a').forEach(link => link.click());
all('details').forEach(one => { one.open = true; });
const turned = (name, selector, use) => {
  done[name] = all(selector).length;
  for (let at = 0; at < all(selector).length; at += 1) use(all(selector)[at], () => all(selector)[at]);
};
turned('lists', '.view select', list => {
  for (let at = 0; at < list.options.length; at += 1) { list.selectedIndex = at; fire(list, 'change'); }
  list.selectedIndex = 0; fire(list, 'change');
});
turned('switches', '.switches button', button => button.click());
turned('lenses', '.lens button', button => button.click());
turned('keys', '.keys button', button => { button.click(); });
turned('keys', '.keys button', button => { button.click(); });
turned('figures', 'svg[tabindex], .treemap', (_, figure) => {
  for (const key of ['ArrowRight', 'ArrowLeft', '+', '-', 'Enter', 'Escape']) press(figure(), key);
});
turned('covers', '.cover', cover => { point(cover, 'pointermove'); point(cover, 'pointerleave'); });
turned('blocks', '.block', block => { point(block, 'pointermove'); point(block, 'pointerleave'); });
done.cells = all('.cell').length;
for (let at = 0; at < Math.min(done.cells, 8); at += 1) {
  point(all('.cell')[at], 'pointermove');
  fire(all('.cell')[at], 'click');
  fire(page.querySelector('.cell'), 'click');
  press(page.querySelector('.treemap'), 'Escape');
}
turned('points', '#plan circle', circle => fire(circle, 'click'));
turned('heaps', 'canvas', canvas => { press(canvas, 'ArrowDown'); point(canvas, 'pointermove'); });
done.events = all('.event-mark').length;
if (done.events) fire(page.querySelector('.event-mark'), 'click');
all('details').forEach(one => { one.open = true; });
return done;
"""
# For every text its contrast with what is behind it.
_CONTRASTS = """
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => {
  const [r, g, b] = numbers(colour).slice(0, 3).map(one => one / 255)
    .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = node => {
  for (let one = node; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if ((numbers(colour)[3] ?? 1) > 0) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const drawnBehind = node => {
  const group = node.namespaceURI.includes('svg') && node.parentElement.nodeName === 'g' ? node.parentElement : null;
  const shape = group && group.querySelector('rect');
  return shape ? getComputedStyle(shape).fill : behind(node);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode, node = text.parentElement;
  if (!text.textContent.trim() || ['STYLE', 'SCRIPT', 'TITLE', 'title'].includes(node.nodeName)) continue;
  const style = getComputedStyle(node);
  const ink = light(node.namespaceURI.includes('svg') ? style.fill : style.color), paper = light(drawnBehind(node));
  found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), text.textContent.trim().slice(0, 40)]);
}
return found;
"""
