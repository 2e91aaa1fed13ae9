"""A folder or file of runs enters; each record leaves in order, with its run, file and line.

What a kill leaves behind (a last line that is cut) is remarked upon; anything else that is no line of a run is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.readers.parts import JSONL_NAME, earlier_parts, process_files
from jaxmem_callbacks.readers.run_lines import RunRecord, record_of
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.secrets import without_secrets

_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a run's file.

    Attributes:
        file: Where it stands.
        number: Its number in the file, from 1.
        run: Id of its run; empty for a line that was cut.
        record: What it says, or None for a line that was cut and for kinds that only a newer version knows.
        remark: Why there is no record, else an empty text.
    """

    file: Path
    number: int
    run: str = ""
    record: RunRecord | None = None
    remark: str = ""


def run_files(path: Path) -> list[list[Path]]:
    """The files of each log folder under a path, full parts first.

    Where a folder has only what other processes than the first told, as on a disk of their machine's own, these, one by one.

    Args:
        path: A folder in which a monitor wrote, one that holds such folders, or a file of JSON lines, whose parts come along.

    Raises:
        RunFileError: nothing there, or no JSON lines in it.
    """
    if not path.exists():
        msg = (
            f"{path} does not exist. Expected the folder that MemoryMonitor(logdir=...) was given, or its {JSONL_NAME}."
        )
        raise RunFileError(msg)
    if path.is_file():
        return [[*earlier_parts(path), path]]
    newest = {file for file in path.rglob(f"{Path(JSONL_NAME).stem}*{Path(JSONL_NAME).suffix}") if file.is_file()}
    folders = sorted({file.parent for file in newest})
    found: list[list[Path]] = []
    for folder in folders:
        files = [*earlier_parts(folder / JSONL_NAME), folder / JSONL_NAME]
        # A run that was killed just after a file became a part has no newest one yet.
        files = [file for file in files if file.exists()]
        found += [files] if files else [[file] for file in process_files(folder / JSONL_NAME).values()]
    if not found:
        msg = (
            f"{path} holds no {JSONL_NAME}. Expected a folder in which a monitor wrote, its "
            "logdir, with `jsonl: true` in its preset, as it is unless said otherwise."
        )
        raise RunFileError(msg)
    return found


def read_lines(files: Sequence[Path]) -> Iterator[Line]:
    """Every line of a folder's files, oldest first.

    Raises:
        RunFileError: a line that is none of a run's; the message gives file, line and what is wrong.
    """
    for file in files:
        cut: tuple[int, str] | None = None
        for number, text in _numbered(file):
            fields = _object(text)
            if cut is not None and (fields is None or fields.get("kind") != "run"):
                raise RunFileError(_not_a_line(file, *cut))
            if cut is not None:
                yield _cut(file, cut[0])
            cut = (number, text) if fields is None else None
            if fields is not None:
                yield _line(file, number, fields)
        if cut is not None:
            yield _cut(file, cut[0])


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open("rb") as lines:
            for number, data in enumerate(lines, start=1):
                text = data.decode("utf-8", errors="replace").strip()
                if text:
                    yield number, text
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror or error}. Expected the JSON lines of a monitor."
        raise RunFileError(msg) from error


def _object(text: str) -> dict[str, Any] | None:
    """The line as an object, or None: cut, or no line at all."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else None


def _line(file: Path, number: int, fields: dict[str, Any]) -> Line:
    run, kind = fields.get("run"), fields.get("kind")
    if not isinstance(run, str) or not isinstance(kind, str):
        raise RunFileError(_not_a_line(file, number, json.dumps(fields)))
    try:
        record = record_of(fields)
    except ValueError as error:
        msg = (
            f"{file}:{number}: a line of kind {kind!r} whose {error}. Expected what MemoryMonitor writes; take the line out, "
            "or read it with the version that wrote it."
        )
        raise RunFileError(msg) from error
    remark = "" if record is not None else f"of kind {kind!r}, which only a newer version knows"
    return Line(file=file, number=number, run=run, record=record, remark=remark)


def _cut(file: Path, number: int) -> Line:
    return Line(file=file, number=number, remark="cut in the middle: the run was killed while it was written")


def _not_a_line(file: Path, number: int, text: str) -> str:
    text = without_secrets(text)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return (
        f"{file}:{number}: {shown!r} is no line of a run. Expected an object with `run` and `kind`, as MemoryMonitor writes "
        f"them into {JSONL_NAME}. Name the run's folder, or take the line out."
    )
