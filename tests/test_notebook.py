"""What a notebook shows where a cell ends with a plan, a step's memory, a peak or a monitor: the memory page, in a real browser.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.peaks import Buffer, peak_of
from tests.browser import Browser, contrasts, cut_off_when_narrow, keep_picture
from tests.sample_runs import HOSTILE, hostile_plan
from tests.steps import compiles_of, loss_fn

VIEWS = {
    "step": ["What makes the peak", "Within a step", "Details"],
    "peak": ["What makes the peak", "Details"],
    "monitor": ["At a glance", "Over time", "What makes the peak", "Within a step"],
}


@jm.jit_step
def train(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    loss, gradients = jm.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments() -> tuple[Any, Any]:
    params = {"w": jnp.full((256, 128), 0.1), "v": jnp.ones((128, 64))}
    return params, {"x": jnp.ones((512, 256))}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> what a notebook puts below the cell."""
    params, batch = arguments()
    memory = jm.step_memory(train, params, batch)
    with jm.MemoryMonitor("monitor_only", logdir=tmp_path_factory.mktemp("runs") / "a") as monitor:
        for step in range(3):
            params, loss = train(params, batch)
            monitor(step, {"loss": loss})
        monitor.flush()
        shown = monitor._repr_html_()
    assert shown is not None
    return {"step": memory._repr_html_(), "peak": memory.peak()._repr_html_(), "monitor": shown}


def page_of(output: str, folder: Path) -> Path:
    """What the output's frame shows, as a file."""
    found = re.search(r'srcdoc="([^"]*)"', output)
    assert found is not None
    path = folder / "frame.html"
    path.write_text(html.unescape(found[1]), "utf-8")
    return path


def opened(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    assert browser.wait_for(lambda: browser.run("return document.querySelector('#peak .cell') !== null"))
    assert browser.errors() == []


@pytest.mark.browser
@pytest.mark.parametrize("name", VIEWS)
def test_it_is_the_memory_page(browser: Browser, outputs: dict[str, str], tmp_path: Path, name: str):
    page = page_of(outputs[name], tmp_path)
    for scheme in ("light", "dark"):
        browser.see_as(scheme=scheme)
        opened(browser, page)
        views = browser.run("return [...document.querySelectorAll('h2')].map(one => one.textContent)")
        assert views[: len(VIEWS[name])] == VIEWS[name]
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert contrasts(browser)[1] == []
        keep_picture(browser, f"notebook_{name}_{scheme}")
    assert "batch['x']" in browser.run("return document.querySelector('#peak table').innerText")
    assert cut_off_when_narrow(browser, f"notebook_{name}_narrow") == []
    browser.see_as()


@pytest.mark.browser
def test_its_frame_reaches_nothing_and_names_are_text(browser: Browser, outputs: dict[str, str], tmp_path: Path):
    hostile = Buffer(
        bytes=2**20,
        shape=HOSTILE,
        kind="temporary",
        operation=HOSTILE,
        source=HOSTILE,
        group="temporaries",
        why=HOSTILE,
    )
    shown = peak_of([hostile], moment=HOSTILE)._repr_html_()
    cells = [*outputs.values(), shown, jm.Plan(hostile_plan())._repr_html_()]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<body>{''.join(cells)}</body>", "utf-8")
    browser.errors()
    browser.open(notebook.as_uri())
    frames = browser.run(
        "return [...document.querySelectorAll('iframe')].map(one => [one.getAttribute('sandbox'), one.contentDocument])"
    )
    assert frames == [["allow-scripts", None]] * len(cells)
    assert browser.run("return [window.hurt === undefined, document.querySelectorAll('img').length]") == [True, 0]
    assert browser.text().count("As a table") == len(cells)
    keep_picture(browser, "notebook")
    assert browser.errors() == []
    opened(browser, page_of(shown, tmp_path))
    assert browser.run("return [window.hurt === undefined, document.querySelectorAll('img').length]") == [True, 0]
    assert "<script>window.hurt=1</script>" in browser.text()


@pytest.mark.core
def test_a_step_is_shown_without_a_second_compile():
    memory = jm.step_memory(train, *arguments())
    with compiles_of("train") as compiled:
        shown = memory._repr_html_()
    assert "<iframe" in shown
    assert compiled == []


@pytest.mark.core
def test_a_monitor_without_lines_has_no_report(tmp_path: Path):
    with jm.MemoryMonitor("monitor_only", logdir=tmp_path / "a") as monitor:
        assert monitor._repr_html_() is None
    assert jm.MemoryMonitor("monitor_only")._repr_html_() is None
