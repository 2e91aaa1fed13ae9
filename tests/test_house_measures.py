"""Measures of how easy the package is to follow. They may get better; a bound is raised only by an edit that says why."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxmem_callbacks"
# Rooms where a small file is the rule: a private touch of JAX, a framework, a command.
SMALL_BY_RULE = {"_compat", "integrations", "cli"}
SMALL = 60  # lines
# Words of a private language: texts state, show, report, name or return.
PRIVATE = re.compile(r"\b(tells?|told|says?|said)\b")
CONVEYOR = re.compile(r"\b(enters?|leaves)\b[^.]{0,80}(;|,)[^.]{0,120}\b(enters?|leaves?)\b")


@functools.cache
def sources() -> dict[str, str]:
    """Module -> its text, without `__init__` files."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8") for path in paths}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module -> the package's modules that it imports at its top."""
    found: dict[str, set[str]] = {module: set() for module in sources()}
    for module, text in sources().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                found[module] |= (targets & set(found)) - {module}
    return found


def depth(module: str) -> int:
    """The longest way down the imports of a module, itself counted."""
    return 1 + max(map(cached_depth, imports()[module]), default=0)


cached_depth = functools.cache(depth)


def small_files() -> int:
    """Files of at most 60 lines that are no command, integration or private touch."""
    return sum(
        text.count("\n") <= SMALL and module.split(".")[1] not in SMALL_BY_RULE for module, text in sources().items()
    )


def importers_of_one() -> float:
    """The share of modules that one other module imports."""
    counts = [sum(module in found for found in imports().values()) for module in sources()]
    return counts.count(1) / len(counts)


def private_words() -> float:
    """Words of a private language in a thousand lines."""
    text = "\n".join(sources().values())
    return 1000 * len(PRIVATE.findall(text)) / text.count("\n")


MEASURES = {
    # Four are what terminals and loggers show: the log, a run that is watched, completion, files of figures. Two are of
    # run folders in object stores: their copies, and what opens and reads them.
    # One is a trace for Perfetto. Four are of device memory profiles: their names, their format, its encoding, the command.
    # Six are of the memory page: a run over time, its reader while it goes on, the model, the page, the tab, and the peak without
    # a second compile. Five of chunks: maps of equations, their proof, their evaluation, the loops made
    # of them, and what a plan tries. Three of compiler options: a record, their candidates, and the
    # limit for which XLA plans. One compares the buffers of two peaks.
    # One is of a state on the host: what of it a compiled schedule has on the device.
    # One shows whether JAX traces, where the step of a loop without hooks is wrapped.
    # One moves cuts for a CPU, by what is alive along the whole loss. One is of segments, apart from where they are cut.
    "files": (lambda: len(sources()), 224),
    "small files": (small_files, 4),
    # The monitor alone has the copies of run folders and the profiles near OOM.
    "share of modules with one importer": (importers_of_one, 0.23),
    "import depth": (lambda: max(map(cached_depth, sources())), 15),
    "private words in a thousand lines": (private_words, 0.75),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_the_house_gets_no_harder_to_follow(measure):
    value, most = MEASURES[measure]
    assert value() <= most


def test_docstrings_of_modules_say_what_a_file_is():
    """A noun phrase or an imperative, and no account of what comes in and goes out."""
    opened = {module: ast.get_docstring(ast.parse(text)) or "" for module, text in sources().items()}
    assert [module for module, text in opened.items() if CONVEYOR.search(text.splitlines()[0])] == []
    assert all(opened.values())
