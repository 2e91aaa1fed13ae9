"""The site: it has every page and every public name, builds strictly, and fails on a broken link, section or name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from benchmarks.sources import ROOT
from jaxmem_callbacks.cli import exit_codes
from jaxmem_callbacks.cli.main import COMMANDS

DOCS = ROOT / "docs"
# What a browser gets by itself from another server.
FETCHED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(?:https?:|//)|<link[^>]+rel="(?:stylesheet|pre\w+)"[^>]+href="(?:https?:|//)'
)


def test_the_python_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: jm\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(jm.__all__)


def test_every_command_and_exit_code_has_a_row() -> None:
    text = (DOCS / "commands.md").read_text()
    assert set(re.findall(r"^\| `jaxmem (\w+)", text, re.MULTILINE)) == set(COMMANDS)
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and not name.startswith("_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


def test_every_message_of_the_troubleshooting_page_is_printed_by_the_package() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "jaxmem_callbacks").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts over several lines
    ours = (DOCS / "troubleshooting.md").read_text().partition("### Of this library")[2].partition("\n### ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)
    assert len(messages) > 15
    assert [each for each in messages if each not in sources] == []


def built(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(out),
    ]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    done = built(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    files = (tmp_path / "site").rglob("*.html")
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text("utf-8") for path in files}
    wanted = {"index.html", "quickstart.html", "api.html", "troubleshooting.html", "repository/CHANGELOG.html"}
    assert wanted <= pages.keys()
    assert [name for name, text in pages.items() if FETCHED.search(text)] == []
    headings = re.findall(r"<h3[^>]*>\s*jm\.(\w+)\s", pages["api.html"])
    assert sorted(headings) == sorted(jm.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("[x](absent.md)", "absent.md"),
        ("[x](plan.md#no-such-section)", "no-such-section"),
        ("[x](../results/absent.json)", "absent.json"),
        ("::: jaxmem_callbacks.absent", "jaxmem_callbacks.absent"),
    ],
)
def test_a_broken_link_section_or_name_fails(broken: str, said: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("plan.md", "README.md"):
        (docs / name).write_text("# A page\n")
    (docs / "README.md").write_text(f"# Home\n\n{broken}\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    settings = settings.replace("hooks: [tools/docs_site.py]\n", "").replace("paths: [.]", f"paths: ['{ROOT}']")
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
    (docs / "README.md").write_text("# Home\n\n[x](plan.md#a-page)\n")
    shutil.rmtree(tmp_path / "site", ignore_errors=True)
    whole = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert whole.returncode == 0, whole.stderr
