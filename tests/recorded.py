"""Compilers' answers that are kept in tests/answers/: a test of what a planner makes of them compiles nothing.

An answer is known by its program's fingerprint, so a program that changed has none: its test fails and names
`make record-answers`, which asks the compilers anew. They are asked as well where JAX, or what makes the programs, has another
version than in the recording.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import threading
from pathlib import Path
from typing import Any, final

import pytest

from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.targets import compile as compiles
from jaxmem_callbacks.programs.targets.cache import program_fingerprint
from jaxmem_callbacks.programs.targets.compile import TargetCompilation
from jaxmem_callbacks.programs.targets.exporting import PortableProgram, export_program
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.programs import ProgramMemory

FOLDER = Path(__file__).parent / "answers"
RECORDS = "JAXMEM_RECORD_ANSWERS" in os.environ
_MAKE_PROGRAMS = ("jax", "flax", "optax", "equinox")
_KEPT = ("fits", "needed_bytes", "limit_bytes", "host_temp_bytes", "refusal")


@functools.cache
def answers_of(name: str) -> Answers:
    """The answers of one test file, by its name."""
    return Answers(FOLDER / f"{name}.json")


def versions() -> dict[str, str]:
    """What decides which programs the tests make, besides this repository."""
    return {name: importlib.metadata.version(name) for name in _MAKE_PROGRAMS}


@final
class Answers:
    """Answers of one test file: figures, without the compiled program's text and buffers.

    Args:
        path: Where they are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        held = {} if RECORDS else json.loads(path.read_text("utf-8"))
        self._versions: dict[str, str] = held.get("versions", versions())
        self._answers: dict[str, Any] = held.get("answers", {})

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Answer where compilers of absent hardware would; with the variable set, keep what they answer."""
        if RECORDS or self._versions == versions():
            patch.setattr(compiles, "_lowered_there", functools.partial(self._lowered, compiles._lowered_there))

    def _lowered(self, ask: Any, job: Any, timeout_s: float) -> Any:
        program = export_program(job.flat, job.target.platform)
        key, title = _key(program, job), f"{job.flat.name} for {job.target.name}"
        if not RECORDS:
            answer = self._recorded(key, title, program, job)
            return lambda _folder: answer
        compile_really = ask(job, timeout_s)

        def compiled(folder: Path) -> TargetCompilation:
            answer = compile_really(folder)
            _refuse_what_needs_the_text(answer, program, job, title)
            with self._lock:
                self._answers[key] = {"title": title} | _figures(answer)
                self._write()
            return answer

        return compiled

    def _recorded(self, key: str, title: str, program: PortableProgram, job: Any) -> TargetCompilation:
        if key not in self._answers:
            pytest.fail(
                f"{self._path.name} has no answer for this program: {title}, {key}. Expected the programs of the recording: "
                "the step, or what the library makes of it, changed. Type: make record-answers"
            )
        figures = {name: value for name, value in self._answers[key].items() if name != "title"}
        memory = figures.pop("memory", None)
        return TargetCompilation(
            target=job.target,
            memory=memory and record_from(ProgramMemory, memory),
            module=memory and parse_module(None),
            compile_seconds=0.0,
            compiler_options=job.options,
            paths=job.flat.paths,
            left_out=program.left_out,
            **dict.fromkeys(("fits", "needed_bytes", "limit_bytes")) | figures,
        )

    def _write(self) -> None:
        """One answer a line, so that a difference shows which one changed."""
        lines = [f"  {json.dumps(key)}: {json.dumps(self._answers[key])}" for key in sorted(self._answers)]
        rows = ",\n".join(lines)
        text = f'{{\n "versions": {json.dumps(self._versions)},\n "answers": {{\n{rows}\n }}\n}}\n'
        self._path.write_text(text, "utf-8")


def _key(program: PortableProgram, job: Any) -> str:
    """What an answer depends on, besides versions and the process's settings."""
    asked = (
        program_fingerprint(program.blob).program,
        job.target.name,
        program.donated,
        program.shardings,
        program.out_shardings,
        job.options,
    )
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _figures(answer: TargetCompilation) -> dict[str, Any]:
    memory = None if answer.memory is None else dataclasses.asdict(answer.memory)
    kept = {"memory": memory} | {name: getattr(answer, name) for name in _KEPT}
    return {name: value for name, value in kept.items() if value is not None}


def _refuse_what_needs_the_text(answer: TargetCompilation, program: PortableProgram, job: Any, title: str) -> None:
    """Operations that a compiler repeats, and bytes between devices, are counted in a text that is not kept."""
    recomputes = answer.memory is not None and answer.memory.compiler_remat > 0
    if job.keep_hlo and (recomputes or program.device_count > 1):
        pytest.fail(
            f"{title}: expected a program for one device whose compiler recomputes nothing, since figures are kept and no "
            "text. Ask its compiler: take the mark `recorded` from this test."
        )
