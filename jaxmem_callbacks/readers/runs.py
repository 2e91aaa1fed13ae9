"""The files of runs: their lines, their parts and the story that they hold."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.analysis.run_summary import RunSummary
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import (
    AcrossProcesses,
    CheckpointSave,
    Dropped,
    MemoryEvent,
    Reading,
    RunEnd,
    RunStart,
    Said,
    Unavailable,
)
from jaxmem_callbacks.records.secrets import without_secrets

JSONL_NAME = "memory.jsonl"
_PROCESS = ".process-"
_PART = re.compile(r"\.(\d{6,})$")


def earlier_parts(path: Path) -> list[Path]:
    """The full parts beside the newest file, oldest first."""
    found = [each for each in path.parent.glob(f"{_escaped(path.stem)}.*{path.suffix}") if _number(each) is not None]
    return sorted((each for each in found if _base(each) == path.stem), key=lambda each: _number(each) or 0)


def next_part(path: Path) -> Path:
    """The name that the newest file gets when it is full."""
    numbers = [_number(each) or 0 for each in earlier_parts(path)]
    return path.with_name(f"{path.stem}.{max(numbers, default=0) + 1:06}{path.suffix}")


def process_name(process: int) -> str:
    """The file of the events of a process that is not the first."""
    newest = Path(JSONL_NAME)
    return f"{newest.stem}{_PROCESS}{process}{newest.suffix}"


def process_files(path: Path) -> dict[int, Path]:
    """The files of the other processes by process, beside a run's newest file or a part of it; none beside one of themselves."""
    head = f"{_base(path)}{_PROCESS}"
    found = path.parent.glob(f"{_escaped(head)}*{path.suffix}")
    named = {each.stem.removeprefix(head): each for each in found}
    return dict(sorted((int(process), file) for process, file in named.items() if process.isdecimal()))


def _number(path: Path) -> int | None:
    match = _PART.search(path.stem)
    return None if match is None else int(match[1])


def _base(path: Path) -> str:
    return _PART.sub("", path.stem)


def _escaped(text: str) -> str:
    """The text as a pattern that matches itself only."""
    return re.sub(r"([*?[])", r"[\1]", text)


RunRecord = (
    RunStart
    | Reading
    | Unavailable
    | ArrayCensus
    | AcrossProcesses
    | HeapMap
    | Compilation
    | Metrics
    | MemoryEvent
    | CheckpointSave
    | PlanRecord
    | Dropped
    | Said
    | RunEnd
)

# Users look these up in JAX's documentation, so they are spelled as in Device.memory_stats().
JAX_NAMES = {
    "in_use_bytes": "bytes_in_use",
    "reserved_bytes": "bytes_reserved",
    "peak_bytes_since_start": "peak_bytes_in_use",
    "limit_bytes": "bytes_limit",
    "largest_free_bytes": "largest_free_block_bytes",
}
_OWN_NAMES = {theirs: ours for ours, theirs in JAX_NAMES.items()}
KINDS: dict[str, type[Any]] = {
    "run": RunStart,
    "reading": Reading,
    "unavailable": Unavailable,
    "arrays": ArrayCensus,
    "processes": AcrossProcesses,
    "heap_map": HeapMap,
    "compilation": Compilation,
    "metrics": Metrics,
    "event": MemoryEvent,
    "checkpoint_save": CheckpointSave,
    "plan": PlanRecord,
    "dropped": Dropped,
    "said": Said,
    "end": RunEnd,
}
_KIND_OF = {record: kind for kind, record in KINDS.items()}


def fields_of(record: object, time_s: float) -> dict[str, Any] | None:
    """What a line has of a record beside its run; None for records that have no line, such as windows and pictures.

    Args:
        record: Any record.
        time_s: Now, for records that do not know their time.
    """
    kind = _KIND_OF.get(type(record))
    if kind is None:
        return None
    if isinstance(record, HeapMap):
        return {"kind": kind, **_map_fields(record)}
    fields = dataclasses.asdict(record)  # pyright: ignore[reportArgumentType] - the kinds are records
    if kind == "event":
        fields["event"] = fields.pop("kind")
    elif kind == "reading":
        fields = {JAX_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    elif kind == "plan":
        fields = {"time_s": time_s, "plan": fields}  # its `step` is a name, where other lines have a number
    return {"kind": kind, **_plain(fields)}


def record_of(fields: Mapping[str, Any]) -> RunRecord | None:
    """The record of a line; None for a kind that this version does not know.

    Raises:
        ValueError: a field that is missing or of another type.
    """
    kind = fields.get("kind")
    if kind not in KINDS:
        return None
    given: Any = fields
    if kind == "event":
        given = {**fields, "kind": fields.get("event")}
    elif kind == "reading":
        given = {_OWN_NAMES.get(name, name): value for name, value in fields.items()}
    elif kind == "plan":
        given = fields.get("plan")
    elif kind == "heap_map":
        given = _map_given(fields)
    return record_from(KINDS[kind], given)


def _map_fields(heap: HeapMap) -> dict[str, Any]:
    """Thousands of buffers of few kinds: each label once, and each buffer as address, bytes and the number of its label."""
    numbers: dict[str, int] = {}
    rows = [[each.address, each.bytes, numbers.setdefault(each.label, len(numbers))] for each in heap.buffers]
    names = ("device", "step", "time_s", "left_out_count", "left_out_bytes")
    return {**{name: getattr(heap, name) for name in names}, "labels": list(numbers), "buffers": rows}


def _map_given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round.

    Raises:
        ValueError: buffers that are no rows of three numbers, or of a label that is not there.
    """
    try:
        labels = fields["labels"]
        rows = [{"address": at, "bytes": size, "label": labels[number]} for at, size, number in fields["buffers"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        msg = "`buffers` are not rows of an address, bytes and the number of one of its `labels`"
        raise ValueError(msg) from error
    return {**fields, "buffers": rows}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a run's file.

    Attributes:
        file: Where it stands.
        number: Its number in the file, from 1.
        run: Id of its run; empty for a line that was cut.
        record: What it holds, or None for a line that was cut and for kinds that only a newer version knows.
        remark: Why there is no record, else an empty text.
    """

    file: Path
    number: int
    run: str = ""
    record: RunRecord | None = None
    remark: str = ""


def run_files(path: Path) -> list[list[Path]]:
    """The files of each log folder under a path, full parts first.

    Where a folder has only what other processes than the first wrote, as on a disk of their machine's own, these, one by one.

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
            "logdir, with `jsonl: true` in its preset, as it is by default."
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


def line_of(file: Path, number: int, text: str) -> Line | None:
    """One line by itself; None for an empty one, and one that was cut is a line with that remark.

    Raises:
        RunFileError: a line that is none of a run's.
    """
    if not text:
        return None
    fields = _object(text)
    return _cut(file, number) if fields is None else _line(file, number, fields)


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


def stories_of(path: Path) -> list[RunSummary]:
    """The runs at a place, in the order of their beginning.

    Raises:
        RunFileError: no run there, or a line that is none.
    """
    stories: list[RunSummary] = []
    for files in run_files(path):
        found = _of_one_folder(files)
        for process, file in process_files(files[-1]).items():
            add_other_processes(found, process, _of_one_folder([file]))
        stories += found
    if not stories:
        msg = (
            f"{path} holds no line of a run. The monitor writes its first line at the first step that it is called for. Expected "
            f"its logdir, or the {JSONL_NAME} there."
        )
        raise RunFileError(msg)
    return sorted(stories, key=lambda story: story.span.first_s or 0.0)


def _of_one_folder(files: Sequence[Path]) -> list[RunSummary]:
    """The runs of one folder's files. A line that was cut belongs to the run before it."""
    found: dict[str, RunSummary] = {}
    newest: RunSummary | None = None
    for line in read_lines(files):
        if line.run:
            newest = found.setdefault(line.run, RunSummary(run=line.run))
        if newest is not None:
            learn_line(newest, line)
    return list(found.values())


def add_other_processes(stories: list[RunSummary], process: int, others: Sequence[RunSummary]) -> None:
    """Another process's reports go to the run that began next to its own: each process has a clock and run ids of its own."""
    for other in others:
        began_s = _began_s(other)
        nearest = min(stories, key=lambda story: abs(_began_s(story) - began_s), default=None)
        if nearest is None:  # the first process wrote nothing yet
            stories.append(other)
            continue
        for event in other.events:
            nearest.elsewhere.add(process, event)
        nearest.remarks += [remark for remark in other.remarks if remark not in nearest.remarks]


def _began_s(story: RunSummary) -> float:
    return story.start.time_s if story.start is not None else story.span.first_s or 0.0


def learn_line(story: RunSummary, line: Line) -> None:
    """Take a line's record into the story of its run; one without a record is a remark."""
    if line.record is not None:
        story.learn(line.record)
    else:
        story.remarks.append(f"{line.file.name}, line {line.number}, is left out: {line.remark}.")
