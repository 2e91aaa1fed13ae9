"""The report in a real browser: every view is drawn and answers, nothing is fetched, nothing of the run runs, all is readable.

`JAXMEM_SCREENSHOTS=folder` keeps the pictures.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.readers.runs import fields_of
from jaxmem_callbacks.records.runs import AcrossFigure, AcrossProcesses
from jaxmem_callbacks.records.units import format_bytes
from tests.browser import Browser, contrasts, cut_off, cut_off_when_narrow, keep_picture
from tests.rich_runs import GIB, STEP_S, rich_plan, write_rich_run
from tests.sample_runs import BEGAN, HOSTILE, hostile_plan, write_run

pytestmark = pytest.mark.browser
VIEWS = [
    "At a glance",
    "Over time",
    "What makes the peak",
    "The plan",
    "The heap",
    "Events, and what to do",
    "Details",
]


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    del browser  # without one there is nothing to write a page for
    folder = write_rich_run(tmp_path_factory.mktemp("run"))
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def opened(browser: Browser, page: Path, **seen: str) -> str:
    """The text of the page once it is drawn."""
    browser.see_as(**seen)
    browser.open(page.as_uri())
    browser.errors()
    browser.wait_for(lambda: browser.run("return document.querySelector('#time svg, #open') !== null"), seconds=10)
    return browser.text()


def count(browser: Browser, selector: str) -> int:
    return browser.run("return document.querySelectorAll(arguments[0]).length", selector)


def test_every_view_is_there_in_its_order(browser: Browser, page: Path):
    shown = opened(browser, page)
    assert browser.run("return [...document.querySelectorAll('h2')].map(one => one.textContent)") == VIEWS
    places = [
        shown.index(words)
        for words in (
            f"Memory of {page.parent}",
            "It fits: 13.0 GiB of 75.0 GiB were left, 17%.",
            "13.0 GiB\nof the limit of 75.0 GiB",
            "What to do first:",
            "Steps 0 to 319 ran in 2 min 24 s on 2 x NVIDIA H100 80GB HBM3",
            "train_step needs 58.0 GiB",
            "Live arrays by kind",
            "optimizer state 18.0 GiB, 35%",
            "full, keep 0.341",
            "keep: 0.341",
            "Most was held after step",
            "1. Recompilation at step 150",
            "Programs and what they need, by their compiler",
            "Figures that were known",
            "What is unknown here, and why",
        )
    ]
    assert places == sorted(places)
    assert count(browser, "#time path.line") >= 4, "in use, peak, largest free block, live arrays, host"
    assert count(browser, "#time path.layer") == 5, "parameters, optimizer state, batch, other arrays, smaller groups"
    assert count(browser, "#peak .cell") > 40
    assert count(browser, "#plan circle") == 6
    assert browser.errors() == []


@pytest.mark.parametrize(
    ("by", "first", "layers"),
    [
        ("kind", "optimizer state", 5),
        ("line", "optax/_src/transform.py:273 (init_fn)", 6),
        ("type", "bfloat16[24,2048,8192]", 10),
    ],
)
def test_live_arrays_are_stacked_by_kind_line_and_type(browser: Browser, page: Path, by: str, first: str, layers: int):
    opened(browser, page)
    browser.run(
        "[...document.querySelectorAll('#time button')].find(one => one.textContent === arguments[0]).click()",
        f"by {by}",
    )
    names = "return [...document.querySelectorAll('#time .layers li span')].map(one => one.textContent)"
    shown = browser.run(names)
    assert shown[0] == first
    assert len(shown) == layers == count(browser, "#time path.layer")


def test_an_event_stands_at_its_step_and_opens_its_card(browser: Browser, page: Path):
    opened(browser, page)
    tick, mark = browser.run(
        "const middle = node => { const box = node.getBoundingClientRect(); return box.x + box.width / 2; };"
        "return [middle([...document.querySelectorAll('#time .tick')].find(one => one.textContent === '150')),"
        " middle(document.querySelector('#time .event-mark'))];"
    )
    assert mark == pytest.approx(tick, abs=2)
    browser.run("document.querySelector('#time .event-mark').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert browser.run("return document.querySelector('.event-card').open")
    assert "Pad the last batch, or drop it." in browser.run("return document.querySelector('.event-card').innerText")


def test_a_mark_of_several_events_shows_how_many_and_one_event_its_number(browser: Browser, page: Path):
    """ "2" for two events stood beside "3" for the third."""
    try:
        browser.resize(390, 900)
        opened(browser, page)
        marks = "return [...document.querySelectorAll('#time .event-mark text')].map(one => one.textContent)"
        assert browser.wait_for(lambda: browser.run(marks)) == ["1", "3\u00d7"]
    finally:
        browser.resize(1480, 960)


def test_it_is_zoomed_by_keys_and_shows_values(browser: Browser, page: Path):
    opened(browser, page)

    def key(name: str) -> None:
        browser.run("document.querySelector('#time svg').focus()")
        browser.press(name)

    def steps() -> list[str]:
        return browser.run(
            "return [...document.querySelectorAll('#time .tick[text-anchor=middle]')].map(one => one.textContent)"
        )

    whole = steps()
    assert whole[0] == "0"
    key("ArrowRight")
    assert "in use" in browser.run("return document.querySelector('.tip').innerText")
    key("+")
    assert steps() != whole
    key("Escape")
    assert steps() == whole


_SEEN = """
const seen = id => {
  const ticks = [...document.querySelectorAll(`#${id} .tick[text-anchor=middle]`)].map(one => one.textContent);
  return id === 'heap' ? document.querySelector('#heap canvas').toDataURL() : ticks.join();
};
return seen(arguments[0]);
"""


@pytest.mark.parametrize(("view", "arrows"), [("time", 130), ("plan", 6), ("heap", 1)])
def test_a_figure_is_zoomed_and_moved_by_mouse_keys_and_buttons(browser: Browser, page: Path, view: str, arrows: int):
    opened(browser, page)
    figure = f"#{view} .chart > :is(svg, canvas)"
    assert browser.wait_for(lambda: count(browser, figure))
    x, y, width = browser.run(
        "const node = document.querySelector(arguments[0]); node.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = node.getBoundingClientRect(); return [box.x, box.y + box.height / 2, box.width]",
        figure,
    )

    def seen() -> str:
        return browser.run(_SEEN, view)

    def pressed(key: str) -> str:
        browser.run("document.querySelector(arguments[0]).focus({preventScroll: true})", figure)
        browser.press(key)
        return seen()

    whole = seen()
    browser.drag((x + 0.5 * width, y), (x + 0.7 * width, y))
    zoomed = seen()
    assert zoomed != whole
    browser.drag((x + 0.5 * width, y), (x + 0.6 * width, y), holding="Shift")
    moved = seen()
    assert moved not in (whole, zoomed)
    browser.click(f"#{view} .lens [aria-label=later]")
    assert seen() not in (whole, moved)
    assert pressed("Escape") == whole
    assert pressed("+") != whole
    assert pressed("-") == whole
    browser.click(f"#{view} .lens [aria-label='zoom in']")
    zoomed = seen()
    browser.run("document.querySelector(arguments[0]).focus({preventScroll: true})", figure)
    browser.press(*["ArrowRight"] * arrows)
    assert seen() not in (whole, zoomed), "past its edge the figure moves along"
    assert browser.errors() == []


def test_a_slice_of_the_heap_is_found_with_a_finger(browser: Browser, page: Path):
    """On a phone the whole map has slices of two pixels."""
    try:
        browser.resize(390, 900)
        opened(browser, page)
        assert browser.wait_for(lambda: count(browser, "#heap canvas"))
        for _ in range(4):
            browser.run("document.querySelector('#heap .lens [aria-label=\\'zoom in\\']').click()")
        x, y, width = browser.run(
            "const node = document.querySelector('#heap canvas'); node.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = node.getBoundingClientRect(); return [box.x, box.y + 25, box.width]"
        )
        words = "return document.querySelector('.tip:not([hidden])')?.innerText ?? ''"
        found = set()
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            browser.drag((x + share * width, y), (x + share * width, y), by="touch")
            found.add(browser.run(words))
            assert "at address 0x" in browser.run(words)
        assert len(found) >= 4
    finally:
        browser.resize(1480, 960)


def test_links_lead_from_one_view_to_another(browser: Browser, page: Path):
    """By mouse and by keyboard; the address stays as it was."""
    opened(browser, page)
    before = browser.run("return [location.href, history.length]")
    name = "return document.querySelector('#time .here-name').textContent"
    marks = "[...document.querySelectorAll('#time .event-mark')]"
    browser.run("document.querySelectorAll('.event-card')[3].querySelector('summary').focus()")
    browser.press("Enter", "Tab", "Enter")
    assert browser.run(name) == "step 260"
    assert "in use" in browser.run("return document.querySelector('.tip:not([hidden])').innerText")
    here, mark = browser.run(
        "const middle = node => { const box = node.getBoundingClientRect(); return box.x + box.width / 2; };"
        f"return [middle(document.querySelector('#time .here')), middle({marks}.pop())]"
    )
    assert here == pytest.approx(mark, abs=2)
    tops = browser.run(
        "return ['#time .layer', '#time .in-use.area'].map(one => Math.min(..."
        "[...document.querySelectorAll(one)].map(node => node.getBBox().y)))"
    )
    assert tops[0] > tops[1] + 200, (
        "no live array reaches into the figure above, though none was counted in this stretch"
    )
    browser.click(".tile .link")
    assert browser.run("return document.activeElement.closest('.view').id") == "peak"
    assert "train_step" in browser.run("return document.querySelector('#peak .crumbs').innerText")
    browser.run("document.querySelector('#heap canvas').focus()")
    browser.press("ArrowDown", "ArrowDown", "Enter")
    assert browser.run(name) == "step 90"
    assert count(browser, "#time .here") == 1
    assert browser.run("return [location.href, history.length]") == before
    assert browser.errors() == []


def test_the_treemap_opens_a_group_and_compares_programs(browser: Browser, page: Path):
    opened(browser, page)
    browser.run(
        "document.querySelector('#peak .group.s3 .cell').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert count(browser, "#peak .group") == 1
    assert "mlp/gelu" in browser.run("return document.querySelector('#peak table').innerText")
    browser.run(
        "const list = document.querySelectorAll('#peak select')[1]; list.selectedIndex = 1;"
        "list.dispatchEvent(new Event('change'))"
    )
    assert "train_step compared with eval_step: " in browser.text()


def test_a_point_of_the_plan_shows_its_preset(browser: Browser, page: Path):
    opened(browser, page)
    browser.run("document.querySelectorAll('#plan circle')[4].dispatchEvent(new MouseEvent('click'))")
    assert (
        browser.run("return document.querySelector('#plan pre').innerText") == "policy:\n  remat: full\n  keep: 0.2\n"
    )
    browser.run("document.querySelectorAll('#plan circle')[0].dispatchEvent(new MouseEvent('click'))")
    assert "It does not fit, so it has no preset." in browser.text()


def test_nothing_is_fetched_and_what_users_gave_is_text(browser: Browser, tmp_path: Path):
    folder = write_run(tmp_path, text=HOSTILE, run=HOSTILE, kind=HOSTILE, plan=hostile_plan())
    assert main(["report", str(folder)]) == 0
    opened(browser, folder / "report.html")
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.run("return window.hurt === undefined")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.run("return [document.scripts.length, document.querySelectorAll('img').length]") == [2, 0]
    assert browser.text().count("<script>window.hurt=1</script>") > 15
    assert cut_off(browser) == []
    assert browser.errors() == []


def test_a_script_of_somebody_else_does_not_run(browser: Browser, page: Path, tmp_path: Path):
    """The page's policy stops it, whatever way it came in."""
    other = tmp_path / "other.html"
    other.write_text(page.read_text("utf-8").replace("</body>", "<script>window.hurt=1</script></body>"), "utf-8")
    opened(browser, other)
    assert browser.run("return window.hurt === undefined")


@pytest.mark.parametrize(
    "seen", [{}, {"scheme": "dark"}, {"media": "print"}, {"media": "print", "scheme": "dark"}], ids=str
)
def test_every_text_is_readable(browser: Browser, page: Path, seen: dict[str, str]):
    opened(browser, page, **seen)
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    number, pale = contrasts(browser)
    assert number > 300
    assert pale == []
    dark = browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (seen == {"scheme": "dark"}), "paper is white for everybody"
    keep_picture(browser, f"report_{'_'.join(seen.values()) or 'seen'}")


def test_it_fits_a_narrow_window_and_paper(browser: Browser, page: Path):
    opened(browser, page)
    assert cut_off_when_narrow(browser, "report_narrow") == []
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert 3 <= printed.count(b"/Type /Page\n") <= 12
    if folder := os.environ.get("JAXMEM_SCREENSHOTS"):
        (Path(folder) / "report.pdf").write_bytes(printed)


_CROSSED = """
const box = document.querySelector('.room'), marks = [...box.querySelectorAll('.mark')].map(one => one.getBoundingClientRect().x);
const names = [...box.querySelectorAll('i')].filter(one => one.textContent).map(one => {
  const range = document.createRange();
  range.selectNodeContents(one);
  const text = range.getBoundingClientRect(), part = one.getBoundingClientRect();
  return [one.textContent, text.right > part.right || marks.some(mark => text.left < mark + 2 && mark < text.right)];
});
const below = [...document.querySelectorAll('.glance .keys li')].map(one => one.textContent);
return [names.filter(([, crossed]) => crossed).map(([text]) => text), [...names.map(([text]) => text), ...below]];
"""


@pytest.mark.parametrize("scale", [1.0, 1.6, 12.0])
def test_no_mark_crosses_a_name_of_the_bar_at_any_width(browser: Browser, tmp_path: Path, scale: float):
    """The program's parts are named on the bar where there is room, and below it where there is none."""
    folder = write_rich_run(tmp_path, scale=scale)
    assert main(["report", str(folder)]) == 0
    try:
        for width in (1400, 800, 390):
            browser.resize(width, 900)
            opened(browser, folder / "report.html")
            assert browser.wait_for(lambda: count(browser, ".room i") > 3)
            crossed, named = browser.run(_CROSSED)
            assert crossed == []
            for group in ("parameters", "optimizer state", "gradients", "saved activations", "temporaries"):
                assert sum(text.startswith(group) for text in named) == 1
    finally:
        browser.resize(1480, 960)


def test_what_the_legend_of_time_may_name_looks_unlike(browser: Browser, page: Path):
    """A compile and what a program needs had one colour."""
    opened(browser, page)
    styles = (
        "in-use",
        "reserved",
        "peak",
        "free",
        "live",
        "driver",
        "host",
        "limit",
        "need",
        "planned",
        "save",
        "compile",
    )
    looks = browser.run(
        "const keys = document.querySelector('#time .keys');"
        "return arguments[0].map(style => { const one = keys.appendChild(document.createElement('i'));"
        " one.className = `swatch ${style}`; const found = getComputedStyle(one);"
        " return [found.backgroundColor, found.clipPath].join(); });",
        styles,
    )
    assert len(set(looks)) == len(styles), dict(zip(styles, looks, strict=True))


def test_runs_stand_side_by_side(browser: Browser, tmp_path: Path):
    write_rich_run(tmp_path / "a", run="first")
    write_rich_run(tmp_path / "b", run="second", scale=0.8, events=False)
    assert main(["report", str(tmp_path)]) == 0
    opened(browser, tmp_path / "report.html")
    browser.run("document.querySelectorAll('.run input')[0].click()")
    assert browser.run("return document.querySelectorAll('#time .panel').length") == 2
    assert browser.wait_for(lambda: count(browser, "#time svg") == 2)
    assert "It fits: 25.4 GiB of 75.0 GiB" in browser.text() or "were left" in browser.text()
    assert browser.errors() == []


def test_a_run_without_memory_has_a_page_too(browser: Browser, tmp_path: Path):
    (tmp_path / "memory.jsonl").write_text(json.dumps({"run": "bare", "kind": "unknown"}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.wait_for(lambda: "There is no figure, since no memory was read." in browser.text())
    assert browser.errors() == []


def test_a_plan_is_a_page_of_its_own(browser: Browser, tmp_path: Path):
    path = jm.Plan(rich_plan(1.0)).to_html(tmp_path / "plan.html")
    assert path.stat().st_size < 300_000
    browser.errors()
    browser.open(path.as_uri())
    assert browser.wait_for(lambda: count(browser, "#plan circle") == 6)
    assert browser.run("return [...document.querySelectorAll('h2')].map(one => one.textContent)") == [
        "What makes the peak",
        "The plan",
        "Details",
    ]
    browser.run("document.querySelectorAll('#plan circle')[4].dispatchEvent(new MouseEvent('click'))")
    assert (
        browser.run("return document.querySelector('#plan pre').innerText") == "policy:\n  remat: full\n  keep: 0.2\n"
    )
    keep_picture(browser, "plan")
    assert browser.errors() == []


def test_a_plan_in_a_notebook_is_a_frame_that_reaches_nothing(browser: Browser, tmp_path: Path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<body>{jm.Plan(hostile_plan())._repr_html_()}</body>", "utf-8")
    browser.errors()
    browser.open(notebook.as_uri())
    frame = "document.querySelector('iframe')"
    assert browser.run(f"return [{frame}.getAttribute('sandbox'), {frame}.contentDocument]") == ["allow-scripts", None]
    keep_picture(browser, "notebook")
    assert browser.run("return window.hurt === undefined")
    assert "As a table" in browser.text()
    assert browser.errors() == []


def test_ticks_are_round_and_within(browser: Browser, page: Path):
    """The scale of every figure: powers of 1024 for bytes, and so many marks or a few more."""
    opened(browser, page)
    script = page.read_text("utf-8").partition('<script type="module">')[2].partition("</script>")[0]
    defined = script.partition("const $time")[0]
    found = browser.run(
        f"{defined}; return arguments[0].map(([low, high, count]) => [$draw.ticks(low, high, count),"
        " $draw.ticks(low, high, count, true)])",
        [[0, 1e-9, 1], [0, 0.7, 5], [3, 17, 4], [0, 319, 8], [0, 75 * 2**30, 5], [0, 1e15, 10], [5, 5, 3]],
    )
    for (low, high, most), each in zip(
        [(0, 1e-9, 1), (0, 0.7, 5), (3, 17, 4), (0, 319, 8), (0, 75 * 2**30, 5), (0, 1e15, 10), (5, 5, 3)],
        found,
        strict=True,
    ):
        for ticks in each:
            assert 1 <= len(ticks) <= most + 2
            assert all(low <= tick <= high * (1 + 1e-6) for tick in ticks)
    assert found[4][1] == [at * 20 * 2**30 for at in range(4)]


def test_sizes_are_written_as_python_writes_them(browser: Browser, page: Path):
    """A figure is in the page's tables and in its views: 2304 MiB were 2.2 GiB in one and 2.3 GiB in the other."""
    opened(browser, page)
    script = page.read_text("utf-8").partition('<script type="module">')[2].partition("</script>")[0]
    quarters = [at * unit // 4 for unit in (2**10, 2**20, 2**30) for at in (*range(5, 40), 401, 402, 406, 2047, 4093)]
    found = browser.run(
        f"{script.partition('const $time')[0]}; return arguments[0].map(size => $draw.bytes(size))", quarters
    )
    assert found == [format_bytes(size) for size in quarters]
    shares = [at / 1000 for at in (*range(100), *range(100, 1000, 5))]
    found = browser.run(
        f"{script.partition('const $time')[0]}; return arguments[0].map(share => $draw.percent(share))", shares
    )
    assert found[100:] == [f"{share:.0%}" for share in shares[100:]]


def test_contrast_and_overflow_can_fail(browser: Browser, tmp_path: Path):
    toy = tmp_path / "toy.html"
    toy.write_text("<body style='background:#fff'><p style='color:#aaa'>pale</p><p style='width:9000px'>wide</p>")
    browser.see_as()
    browser.open(toy.as_uri())
    assert contrasts(browser) == (2, ["pale"])
    assert cut_off(browser) == ["wide"]


def test_the_level_of_what_a_program_needs_leads_to_its_peak(browser: Browser, page: Path):
    opened(browser, page)
    browser.run(
        "document.querySelector('#time .level-name.leads').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    place = "document.querySelector('#peak svg').getBoundingClientRect()"
    seen = f"const {{ top, bottom }} = {place}; return top < innerHeight && bottom > 0"
    assert browser.wait_for(lambda: browser.run(seen))
    assert browser.run("return document.querySelector('#peak select').value").startswith("train_step")


def test_another_process_has_curves_of_its_own(browser: Browser, tmp_path: Path):
    with (write_rich_run(tmp_path, steps=40) / "memory.jsonl").open("a") as file:
        for step in range(0, 40, 5):
            highs = {"in_use_bytes": (40, 44 + step / 10), "host_bytes": (6, 7)}
            figures = {
                name: AcrossFigure(
                    low=low * GIB,
                    low_process=0,
                    mean=low * GIB,
                    high=high * GIB,
                    high_process=1,
                    highs={"0": low * GIB, "1": high * GIB},
                )
                for name, (low, high) in highs.items()
            }
            at = BEGAN + STEP_S * step
            fields = fields_of(AcrossProcesses(step=step, time_s=at, processes=2, figures=figures), at)
            file.write(json.dumps({"run": "rich", **fields}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    opened(browser, tmp_path / "report.html")
    choices = "return [...document.querySelectorAll('#time select option')].map(one => one.value)"
    assert browser.run(choices) == ["each device", "gpu:0", "gpu:1", "all processes", "process 1"]
    browser.run(
        "const select = document.querySelector('#time select'); select.value = 'process 1';"
        "select.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    assert count(browser, "#time path.line.in-use") == 1
    assert count(browser, "#time path.line.host") == 1, "the host of that process, and no other"
    assert count(browser, "#time path.line") == 2
    assert browser.errors() == []
