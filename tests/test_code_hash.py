"""The hash of what code does: the same under other names, places and words, another where something else is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.code_hash import Code, code_hash

BENCHMARK = """
import jaxmem_callbacks as jm
from jaxmem_callbacks.rows import total

def main():
    return jm.plan([1, 2]) + total([3])
"""
ROWS = '''
"""Rows."""
import math

SCALE = 2

def total(rows: list[int], start=0):
    """The sum of rows."""
    if not rows:
        raise ValueError(f"expected rows, got {rows}")
    return scaled(sum(rows)) + start

def scaled(value):
    return value * SCALE

def halved(value):
    return value / 3

def unused(value):
    return math.sqrt(value)
'''
PLAN = """
from dataclasses import dataclass
from jaxmem_callbacks import rows
from jaxmem_callbacks.rows import scaled

@dataclass
class Plan:
    rows: list[int]
    least: int = 4

    def bytes(self):
        return max(self.least, rows.total(self.rows, start=1), key=abs)

    def unused(self):
        return 1

def plan(values):
    name = "rows of a plan"
    return scaled(Plan(values).bytes()), f"a{len(values)}", name
"""


def hashed(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = Code(folder, Code.files(folder))
    reached = code.reached([folder / "benchmarks/a.py"])
    return code_hash(reached, reached)


def files(benchmark: str = BENCHMARK, rows: str = ROWS, plan: str = PLAN) -> dict[str, str]:
    return {"benchmarks/a.py": benchmark, "jaxmem_callbacks/rows.py": rows, "jaxmem_callbacks/plan.py": plan}


def edited(old: str, new: str, **given: str) -> dict[str, str]:
    """The files with one text in place of another, everywhere."""
    assert any(old in text for text in files(**given).values()), old
    return {name: text.replace(old, new) for name, text in files(**given).items()}


MOVED = (
    ROWS.replace("def scaled(value):\n    return value * SCALE\n", "").replace(
        "SCALE = 2", "from jaxmem_callbacks.scales import scaled"
    ),
    "SCALE = 2\n\ndef scaled(value):\n    return value * SCALE\n",
)
SAME = {
    "a comment": edited("SCALE = 2", "SCALE = 2  # of rows"),
    "another docstring": edited("The sum of rows.", "Add the rows."),
    "another annotation": edited("rows: list[int], start=0", "rows: list, start: int = 0"),
    "another text of an error": edited("expected rows, got {rows}", "rows are missing"),
    "a local variable's new name": edited("name", "label"),
    "a function's new name": edited("scaled", "weighted"),
    "a constant's new name": edited("SCALE", "WEIGHT"),
    "a parameter's new name": edited("start", "begin"),
    "a field's new name": edited("least", "smallest"),
    "a method's new name": edited("bytes", "size"),
    "a class's new name": edited("Plan", "Answer"),
    "another function that nothing uses": edited("math.sqrt(value)", "math.exp(value)"),
    "another method that nothing uses": edited("return 1\n", "return 2\n"),
    "an import inside a function": edited(
        "def plan(values):\n", "def plan(values):\n    from jaxmem_callbacks.rows import scaled\n\n"
    ),
    "a function's new place": files(rows=MOVED[0]) | {"jaxmem_callbacks/scales.py": MOVED[1]},
    "another import of it": edited(
        "from jaxmem_callbacks.rows import total", "from jaxmem_callbacks.rows import total as summed"
    )
    | {"benchmarks/a.py": BENCHMARK.replace("import total", "import total as summed").replace("+ total", "+ summed")},
}
OTHER = {
    "another operator": edited("value * SCALE", "value + SCALE"),
    "another constant": edited("SCALE = 2", "SCALE = 3"),
    "another default": edited("start=0", "start=7"),
    "another function of the library": edited("sum(rows)", "max(rows)"),
    "another function of its own": edited("return scaled(", "return halved("),
    "another key": edited('"rows of a plan"', '"bytes of a plan"'),
    "another default of a field": edited("least: int = 4", "least: int = 5"),
    "another argument": edited("key=abs", "key=len"),
    "another kind of error": edited("ValueError", "TypeError"),
    "a decorator more": edited("def scaled", "@staticmethod\ndef scaled"),
    "another call of the benchmark": edited("jm.plan([1, 2])", "jm.plan([1])"),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> str:
    return hashed(tmp_path_factory.mktemp("before"), files())


@pytest.mark.parametrize("what", SAME)
def test_a_hash_stays_where_the_same_is_computed(what: str, before: str, tmp_path: Path) -> None:
    assert SAME[what] != files()
    assert hashed(tmp_path, SAME[what]) == before


@pytest.mark.parametrize("what", OTHER)
def test_a_hash_is_another_where_something_else_is_computed(what: str, before: str, tmp_path: Path) -> None:
    assert hashed(tmp_path, OTHER[what]) != before


def test_a_program_in_a_text_reaches_what_it_names(tmp_path: Path) -> None:
    run = "SCRIPT = '''\nimport jaxmem_callbacks as jm\njm.plan([1])\n'''\n"
    there = hashed(tmp_path / "a", files(benchmark=run))
    assert hashed(tmp_path / "b", edited("value * SCALE", "value + SCALE", benchmark=run)) != there
    named = "MODULE = 'jaxmem_callbacks.rows'\n"
    there = hashed(tmp_path / "c", files(benchmark=named))
    assert hashed(tmp_path / "d", edited("math.sqrt(value)", "math.exp(value)", benchmark=named)) != there
