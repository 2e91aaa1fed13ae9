"""Log folders that are read while their runs go on: a little at a time, each line once, and no link followed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from jaxmem_callbacks.analysis.run_summary import RemoteEvents, RunSummary
from jaxmem_callbacks.readers.runs import (
    JSONL_NAME,
    add_other_processes,
    earlier_parts,
    learn_line,
    line_of,
    process_files,
)
from jaxmem_callbacks.records.errors import RunFileError

_MOST_FOLDERS, _DEEPEST = 20_000, 12
_HEAD = 64  # bytes by which a file is known again
_REMARKS = 20  # on lines that cannot be read, of one folder
_LINES_BETWEEN_LOOKS = 200  # at the clock


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFolder:
    """A folder that holds a run's lines.

    Attributes:
        name: Its path below the log folder, with ``/``; ``.`` for that itself.
        path: Where it is.
        changed_s: When its newest file was written, in seconds since the epoch.
    """

    name: str
    path: Path
    changed_s: float


def log_folders(root: Path) -> list[LogFolder]:
    """The folders with runs below a root, the one written last first. Links are passed over, and so is what cannot be read."""
    found: list[LogFolder] = []
    waiting = [(root, 0)]
    seen = 0
    while waiting and seen < _MOST_FOLDERS:
        folder, depth = waiting.pop()
        seen += 1
        newest = None
        for entry in _entries(folder):
            if entry.is_symlink():
                continue
            with contextlib.suppress(OSError):  # a run may be moved away meanwhile
                if entry.is_dir(follow_symlinks=False):
                    waiting += [(Path(entry.path), depth + 1)] if depth < _DEEPEST else []
                elif _is_of_a_run(entry.name):
                    newest = max(newest or 0.0, entry.stat(follow_symlinks=False).st_mtime)
        if newest is not None:
            name = folder.relative_to(root).as_posix()
            found.append(LogFolder(name=name, path=folder, changed_s=newest))
    return sorted(found, key=lambda each: (-each.changed_s, each.name))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_of_a_run(name: str) -> bool:
    newest = Path(JSONL_NAME)
    return name.startswith(newest.stem) and name.endswith(newest.suffix)


@final
@dataclass(kw_only=True, slots=True)
class _File:
    """One file of lines, and how far it was read."""

    path: Path
    head: bytes
    size: int = 0
    read_bytes: int = 0
    lines: int = 0


@final
class FollowedFolder:
    """The runs of one folder, as far as its files were read.

    Args:
        path: A folder that `log_folders` found.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._files: dict[tuple[int, int], _File] = {}
        self._runs: dict[str, RunSummary] = {}
        self._others: dict[int, dict[str, RunSummary]] = {}
        self._lines, self._is_done = 0, False
        self.remarks: list[str] = []

    @property
    def version(self) -> str:
        """Changes with every line that was read."""
        return str(self._lines)

    @property
    def share(self) -> float:
        """How much of the files was read, from 0 to 1, which a last line without its end does not hinder."""
        if self._is_done:
            return 1.0
        size = sum(each.size for each in self._files.values())
        return sum(each.read_bytes for each in self._files.values()) / size if size else 1.0

    def runs(self) -> list[RunSummary]:
        """The runs so far, in the order of their beginning, with what other processes reported."""
        found = sorted(self._runs.values(), key=lambda story: story.span.first_s or 0.0)
        for story in found:
            story.elsewhere = RemoteEvents()
        for process, others in sorted(self._others.items()):
            add_other_processes(found, process, list(others.values()))
        return found

    def advance(self, seconds: float) -> None:
        """Read on for about so long; what is damaged is remarked upon and passed over."""
        end_s, self._is_done = time.monotonic() + seconds, False
        for process, file in self._found():
            runs = self._runs if process == 0 else self._others.setdefault(process, {})
            newest = next(reversed(runs.values()), None)
            for number, text in _lines(file):
                newest = self._learn(runs, newest, file.path, number, text)
                self._lines += 1
                if self._lines % _LINES_BETWEEN_LOOKS == 0 and time.monotonic() > end_s:
                    return
        self._is_done = True

    def _learn(
        self, runs: dict[str, RunSummary], newest: RunSummary | None, path: Path, number: int, text: str
    ) -> RunSummary | None:
        try:
            line = line_of(path, number, text)
        except RunFileError as error:
            if len(self.remarks) < _REMARKS:
                self.remarks.append(str(error))
            return newest
        if line is None:
            return newest
        if line.run:
            newest = runs.setdefault(line.run, RunSummary(run=line.run))
        if newest is not None:
            learn_line(newest, line)
        return newest

    def _found(self) -> Sequence[tuple[int, _File]]:
        """The files by process, oldest part first; all of them again where one was cut, replaced or taken away."""
        first = self._path / JSONL_NAME
        paths = [(0, each) for each in (*earlier_parts(first), first)]
        paths += list(process_files(first).items())
        found = [(process, known) for process, path in paths if (known := self._known(path)) is not None]
        here = [id(file) for _, file in found]
        if any(id(file) not in here or file.size < file.read_bytes for file in self._files.values()):
            self._begin()
            return self._found()
        return found

    def _known(self, path: Path) -> _File | None:
        """A file by what it is, since its name changes when a part is full; None for a link, and where there is none."""
        opened = _opened(path)
        if opened is None:
            return None
        with opened:
            status = os.fstat(opened.fileno())
            head = opened.read(_HEAD)
        key = status.st_dev, status.st_ino
        known = self._files.get(key)
        if known is None:
            known = self._files[key] = _File(path=path, head=head)
        elif not head.startswith(known.head):  # another file, which has the number of one that was deleted
            known.read_bytes = status.st_size + 1
        known.path, known.size, known.head = path, status.st_size, head
        return known


def _lines(file: _File) -> Iterator[tuple[int, str]]:
    """Whole lines that were not read yet, each with its number; a last one without its end waits for that."""
    opened = _opened(file.path) if file.read_bytes < file.size else None
    if opened is None:
        return
    with opened:
        opened.seek(file.read_bytes)
        for data in opened:
            if not data.endswith(b"\n"):
                return
            file.lines += 1
            file.read_bytes += len(data)
            yield file.lines, data.decode("utf-8", errors="replace").strip()


def _opened(path: Path) -> BinaryIO | None:
    """A file that is no link, pipe or device; None for those, and where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    return None
