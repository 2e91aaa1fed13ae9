"""``jaxmem report RUN``: what a monitor wrote enters, one self-contained HTML file leaves, and its sentence on the screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxmem_callbacks
from jaxmem_callbacks.analysis.story import Story
from jaxmem_callbacks.cli.exits import OK
from jaxmem_callbacks.readers.runs import Line, read_lines, run_files
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.writers.report_words import happened

_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "place", metavar="RUN", type=Path, help="a monitor's logdir, a folder of them, or a memory.jsonl"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=f"where to write; RUN/{_NAME} unless said")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page.

    Returns:
        0.

    Raises:
        RunFileError: no run there, a line that is none, or a page that cannot be written.
    """
    from jaxmem_callbacks.planning.search import pareto
    from jaxmem_callbacks.writers.report_page import report_html

    stories = stories_of(args.place)
    source = str(args.place) if args.place.name else str(args.place.resolve().name)
    page = report_html(stories, source=source, version=jaxmem_callbacks.__version__, frontier=pareto)
    output = args.output or (args.place if args.place.is_dir() else args.place.parent) / _NAME
    try:
        output.write_text(page, "utf-8")
    except OSError as error:
        msg = (
            f"{output} cannot be written: {error.strerror or error}. Name a file in a folder that is there: -o {_NAME}."
        )
        raise RunFileError(msg) from error
    for story in stories:
        sys.stdout.write(f"{story.run}: {happened(story)}\n")
    sys.stdout.write(f"wrote {output}\n")
    return OK


def stories_of(path: Path) -> list[Story]:
    """The runs at a place, in the order of their beginning.

    Raises:
        RunFileError: no run there, or a line that is none.
    """
    stories: list[Story] = []
    for files in run_files(path):
        stories += _of_one_folder(files)
    if not stories:
        msg = f"{path} holds no line of a run. The monitor writes its first line at the first step that it is told of."
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


def _tell(story: Story, line: Line) -> None:
    if line.record is not None:
        story.learn(line.record)
    else:
        story.remarks.append(f"{line.file.name}, line {line.number}, is left out: {line.remark}.")
