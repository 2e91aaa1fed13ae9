"""Answers of compilers that are kept beside the tests: found by their program, and missed with what to type."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxmem_callbacks.programs.targets import compile as compiles
from jaxmem_callbacks.programs.targets.compile import TargetCompilation, compile_for_target
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.programs import ProgramMemory
from tests import recorded
from tests.recorded import FOLDER, Answers
from tests.target_step import SMALL_ARGS, shape, small_step

TARGET = resolve_target("h100_sxm", require_installed=False)
MEMORY = ProgramMemory(
    name="small_step", platform="gpu", target=TARGET.name, argument_bytes=3, output_bytes=2, alias_bytes=0, temp_bytes=5
)
ANSWER = TargetCompilation(target=TARGET, memory=MEMORY, fits=True, needed_bytes=10, limit_bytes=99)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """One answer, recorded of a compiler that is not there."""
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "RECORDS", True)
        patch.setattr(compiles, "_lowered_there", lambda _job, _timeout_s: lambda _folder: ANSWER)
        Answers(tmp_path / "test_some.json").stand_in(patch)
        compile_for_target(small_step, SMALL_ARGS, target=TARGET)
    return Answers(tmp_path / "test_some.json")


def test_a_recorded_answer_stands_in_for_the_compiler(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    answers.stand_in(monkeypatch)
    found = compile_for_target(small_step, SMALL_ARGS, target=TARGET)
    assert (found.memory, found.fits, found.needed_bytes, found.limit_bytes) == (MEMORY, True, 10, 99)
    assert not found.hlo_text


@pytest.mark.parametrize(
    ("step", "args", "options"),
    [
        (lambda w, x: small_step(w, 2 * x), SMALL_ARGS, {}),
        (small_step, (SMALL_ARGS[0], shape(8, 32)), {}),
        (small_step, SMALL_ARGS, {"donate_argnums": 0}),
        (small_step, SMALL_ARGS, {"target": resolve_target("t4", require_installed=False)}),
    ],
    ids=["operation", "shape", "donation", "target"],
)
def test_a_program_that_changed_has_no_answer_and_the_failure_names_what_to_type(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, step: Any, args: Any, options: Any
) -> None:
    answers.stand_in(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match=r"test_some\.json has no answer .*Type: make record-answers"):
        compile_for_target(step, args, **{"target": TARGET} | options)


def test_programs_of_other_versions_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test_some.json"
    path.write_text(json.dumps({"versions": recorded.versions() | {"optax": "0.1"}, "answers": {}}))
    asked = compiles._lowered_there
    Answers(path).stand_in(monkeypatch)
    assert compiles._lowered_there is asked


def test_what_is_counted_in_the_programs_text_is_not_recorded() -> None:
    program, job = SimpleNamespace(device_count=2), SimpleNamespace(keep_hlo=True)
    with pytest.raises(pytest.fail.Exception, match="expected a program for one device"):
        recorded._refuse_what_needs_the_text(ANSWER, program, job, "step for h100_sxm:2")


def test_every_file_of_answers_belongs_to_a_test_file_with_the_mark() -> None:
    def has_the_mark(path: Path) -> bool:
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.recorded" for node in nodes)

    marked = {path.stem for path in Path(__file__).parent.glob("test_*.py") if has_the_mark(path)}
    assert {path.stem for path in FOLDER.iterdir()} == marked
