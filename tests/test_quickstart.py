"""The quickstart, typed as it stands in a folder of its own: its scripts, its commands, and what the page says they print."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.test_doc_commands import NOT_RUN
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "quickstart.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"[\d.,]+")
TRAINED, HERE = "range(40)", "range(4)"  # steps of the page, and as many of them as a test waits for


def typed(line: str, folder: Path) -> str:
    """What a line of the page prints."""
    words = shlex.split(line, comments=True)
    module = {"jaxmem": ["-m", "jaxmem_callbacks.cli.main"], "python": []}[words[0]]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "160"}
    command = [sys.executable, *module, *words[1:]]
    done = forked.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def without_figures(line: str) -> str:
    return " ".join(FIGURE.sub("_", line).split())


def is_said(quoted: str, printed: str) -> bool:
    """Whether a line was printed, with other figures perhaps; three dots leave out its end."""
    start = without_figures(quoted.removesuffix("..."))
    return any(without_figures(line).startswith(start) for line in printed.splitlines())


@pytest.mark.core
def test_the_quickstart_runs_as_it_stands(tmp_path: Path) -> None:
    printed, losses, shown = "", [], 0
    for language, body in FENCE.findall(PAGE.read_text("utf-8")):
        if language == "python":
            assert TRAINED in body
            (tmp_path / "train.py").write_text(body.replace(TRAINED, HERE))
        elif language == "sh":
            lines = [re.sub(r"\s+#.*", "", line) for line in body.splitlines()]
            printed = "".join(typed(line, tmp_path) for line in lines if line not in NOT_RUN)
            losses += re.findall(r"^loss (\S+)$", printed, re.MULTILINE)
        else:
            assert [line for line in body.splitlines() if not is_said(line, printed)] == [], printed
            shown += 1
    assert shown == 3
    assert (tmp_path / "runs" / "a" / "report.html").is_file()
    (with_policy,) = losses
    first = FENCE.findall(PAGE.read_text("utf-8"))[1][1]
    (tmp_path / "plain.py").write_text(first.replace(TRAINED, HERE))
    (plain,) = re.findall(r"^loss (\S+)$", typed("python plain.py", tmp_path), re.MULTILINE)
    assert float(with_policy) == pytest.approx(float(plain), rel=1e-4), "the page says that the loss is the same"


@pytest.mark.core
def test_the_step_of_the_quickstart_needs_less_than_half() -> None:
    text = PAGE.read_text("utf-8")
    plain, policy = re.findall(r"^  step +([\d.]+) MiB +([\d.]+) MiB$", text, re.MULTILINE)[0]
    assert float(policy) < float(plain) / 2, "of which the first paragraph speaks"
