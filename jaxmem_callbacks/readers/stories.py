"""A place where monitors wrote enters; the stories of its runs leave, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxmem_callbacks.analysis.story import Story
from jaxmem_callbacks.readers.parts import JSONL_NAME, process_files
from jaxmem_callbacks.readers.runs import Line, read_lines, run_files
from jaxmem_callbacks.records.errors import RunFileError


def stories_of(path: Path) -> list[Story]:
    """The runs at a place, in the order of their beginning.

    Raises:
        RunFileError: no run there, or a line that is none.
    """
    stories: list[Story] = []
    for files in run_files(path):
        found = _of_one_folder(files)
        for process, file in process_files(files[-1]).items():
            _join(found, process, _of_one_folder([file]))
        stories += found
    if not stories:
        msg = (
            f"{path} holds no line of a run. The monitor writes its first line at the first step that it is told of. Expected "
            f"its logdir, or the {JSONL_NAME} there."
        )
        raise RunFileError(msg)
    return sorted(stories, key=lambda story: story.span.first_s or 0.0)


def _of_one_folder(files: Sequence[Path]) -> list[Story]:
    """The runs of one folder's files. A line that was cut belongs to the run before it."""
    found: dict[str, Story] = {}
    newest: Story | None = None
    for line in read_lines(files):
        if line.run:
            newest = found.setdefault(line.run, Story(run=line.run))
        if newest is not None:
            _tell(newest, line)
    for story in found.values():
        story.finish()
    return list(found.values())


def _join(stories: list[Story], process: int, others: Sequence[Story]) -> None:
    """What another process told goes to the run that began next to its own: each process has a clock and run ids of its own."""
    for other in others:
        began_s = _began_s(other)
        nearest = min(stories, key=lambda story: abs(_began_s(story) - began_s), default=None)
        if nearest is None:  # the first process wrote nothing yet
            stories.append(other)
            continue
        for event in other.events:
            nearest.elsewhere.add(process, event)
        nearest.remarks += other.remarks


def _began_s(story: Story) -> float:
    return story.start.time_s if story.start is not None else story.span.first_s or 0.0


def _tell(story: Story, line: Line) -> None:
    if line.record is not None:
        story.learn(line.record)
    else:
        story.remarks.append(f"{line.file.name}, line {line.number}, is left out: {line.remark}.")
