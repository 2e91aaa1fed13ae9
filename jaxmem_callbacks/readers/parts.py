"""The files of a run's lines: the one that is written now, the parts before it in their order, and other processes' events.

``memory.jsonl`` is always the newest; when it is full it becomes ``memory.000001.jsonl``, the next one ``memory.000002.jsonl``.
Beside them ``memory.process-3.jsonl`` has the events of process 3, where it had any.
"""

from __future__ import annotations

import re
from pathlib import Path

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
