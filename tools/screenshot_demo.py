"""Pictures for the documents: the demo's run in the real TensorBoard, its report, and the report of a failure.

    make demo && .venv/bin/python tools/screenshot_demo.py

Reads the files of the demo's run, runs examples/out_of_memory.py, and writes docs/images/memory_tab.png, memory_tab_dark.png,
tensorboard_charts.png, tensorboard_events.png, report.png and oom_report.png.

Needs Chromium with its driver, and the packages of the parts `project`
and `demo`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import Browser, missing  # noqa: E402 - the checkout is put on the path first

IMAGES = ROOT / "docs" / "images"
CHARTS = "?darkMode=false&smoothing=0&tagFilter={tags}#timeseries"
# Two wide charts in a row, and a narrow list of runs: as a user sets them by hand, once.
WIDE = """
localStorage.setItem('_tb_global_settings', JSON.stringify({timeSeriesCardMinWidth: 450, sideBarWidthInPercent: 10}));
"""
# The page after one has closed what stands in the way: the settings, and the table of the marked step.
TIDY = """
const boxes = [...document.querySelectorAll('mat-checkbox')];
const steps = boxes.find((box) => box.textContent.includes('Enable step selection'));
const input = steps && steps.querySelector('input');
if (input && input.checked) input.click();
const button = [...document.querySelectorAll('button')].find((each) => each.textContent.trim().endsWith('Settings'));
if (button) button.click();
return Boolean(steps) && Boolean(button);
"""
# The tab is a frame in TensorBoard's page, and complete once the largest program's peak is drawn.
TAB_IS_DRAWN = """
const under = (root) =>
  [...root.querySelectorAll('*')].flatMap((each) => [each, ...(each.shadowRoot ? under(each.shadowRoot) : [])]);
const frame = under(document).find((each) => each.localName === 'iframe');
const page = frame && frame.contentDocument;
return Boolean(page) && page.querySelector('#time svg') !== null && page.querySelector('#peak .cell') !== null;
"""


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows the runs in a folder."""
    log = folder / "tensorboard.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--host", "localhost", "--port", "0"]
    with log.open("w") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as server:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://localhost:\d+", log.read_text())):
            if time.monotonic() > deadline:
                server.terminate()
                sys.exit(f"TensorBoard did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield found[0]
        server.terminate()


def photograph(logdir: Path, out: Path, tags: str) -> None:
    """Save the tab Memory in light and dark, the Time Series page, and the Text page with the events."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(logdir, folder / "runs" / logdir.name)  # seen from the folder above, the run has its own name
        with tensorboard(folder) as address, Browser() as browser:
            browser.resize(1400, 1000)
            for picture, dark in (("memory_tab", "false"), ("memory_tab_dark", "true")):
                browser.open(f"{address}/?darkMode={dark}#jaxmem")
                if not browser.wait_for(lambda: browser.run(TAB_IS_DRAWN)):
                    sys.exit("TensorBoard shows no tab Memory: pip install -e . registers it")
                time.sleep(1)
                browser.screenshot(out / f"{picture}.png")
            browser.resize(1240, 860)
            browser.run(WIDE)
            browser.open(f"{address}/{CHARTS.format(tags=tags)}")
            browser.wait_for(lambda: "live_arrays_mib" in browser.text())
            browser.wait_for(lambda: browser.run(TIDY))
            time.sleep(6)  # lines are drawn one by one
            browser.screenshot(out / "tensorboard_charts.png")
            browser.resize(1400, 900)
            browser.open(f"{address}/?darkMode=false#text")
            browser.wait_for(lambda: "What to do" in browser.text())
            time.sleep(1)
            browser.screenshot(out / "tensorboard_events.png")


def photograph_page(page: Path, path: Path) -> None:
    """Save the top of a page."""
    with Browser() as browser:
        browser.resize(1200, 1150)
        browser.open(page.as_uri())
        browser.wait_for(lambda: browser.run("return document.querySelector('#time svg, #peak svg') !== null"))
        browser.screenshot(path)


def photograph_failure(path: Path) -> None:
    """Save the top of the report of an example that runs out of memory."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(ROOT / "examples" / "out_of_memory.py")]
        subprocess.run(command, check=False, cwd=name, capture_output=True)
        (page,) = Path(name).glob("oom/*/report.html")
        photograph_page(page, path)


def photograph_report(logdir: Path, path: Path) -> None:
    """Save the top of the run's report."""
    shown = logdir.absolute().relative_to(ROOT) if logdir.absolute().is_relative_to(ROOT) else logdir
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "report.html"
        command = [sys.executable, "-m", "jaxmem_callbacks.cli.main", "report", str(shown), "-o", str(page)]
        subprocess.run(command, check=True, cwd=ROOT)
        photograph_page(page, path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument(
        "--tags",
        default="live_arrays_mib$|(plain|train)_step$|train/loss$",
        help="regular expression of the tags to show",
    )
    args = parser.parse_args()
    if not list(args.logdir.glob("events.out.tfevents.*")):
        sys.exit(f"No run in {args.logdir}: make demo")
    if missing():
        sys.exit(f"{' and '.join(missing())} not found: apt-get install chromium chromium-driver")
    args.out.mkdir(parents=True, exist_ok=True)
    photograph(args.logdir, args.out, args.tags)
    photograph_report(args.logdir, args.out / "report.png")
    photograph_failure(args.out / "oom_report.png")
    print(f"Saved memory_tab*.png, tensorboard_*.png, report.png and oom_report.png in {args.out}")


if __name__ == "__main__":
    main()
