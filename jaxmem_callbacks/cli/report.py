"""``jaxmem report RUN``: one self-contained HTML file of what a monitor wrote, and a sentence on the screen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jaxmem_callbacks
from jaxmem_callbacks.analysis.run_summary import RunSummary
from jaxmem_callbacks.cli.exit_codes import OK
from jaxmem_callbacks.cli.typed import place, run_place
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.readers.stores import is_address, readable
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.terminal import put, shown

_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "place",
        metavar="RUN",
        type=run_place,
        help="a monitor's logdir, here or at an address such as gs://bucket/runs/a, a folder of them, or a memory.jsonl",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=place,
        help=f"where to write; RUN/{_NAME} by default, and {_NAME} here for an address",
    )

    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        type=place,
        help="also write each program's bytes within the step as a trace, which ui.perfetto.dev and chrome://tracing open",
    )


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, and the trace where it is asked for.

    Returns:
        0.

    Raises:
        RunFileError: no run there, a line that is none, or a page that cannot be written.
    """
    with readable(args.place) as folder:
        stories = stories_of(folder)
    from jaxmem_callbacks.records.page import page_html
    from jaxmem_callbacks.writers.report import happened, report_model

    source = shown(args.place) if args.place != "." else folder.resolve().name
    page = page_html(report_model(stories, source=source, version=jaxmem_callbacks.__version__))
    output = args.output or _beside(args.place)
    try:
        write_file(output, page, private=True)
    except OSError as error:
        msg = (
            f"{output} cannot be written: {error.strerror or error}. Name a file in a folder that is there: -o {_NAME}."
        )
        raise RunFileError(msg) from error
    for story in stories:
        put(f"{story.run}: {happened(story)}\n")
    put(f"wrote {output}\n")
    if args.perfetto is not None:
        _write_trace(args.perfetto, stories)
    return OK


def _write_trace(path: Path, stories: Sequence[RunSummary]) -> None:
    """The bytes within each program's step, of every run.

    Raises:
        RunFileError: no run has any, or the file cannot be written.
    """
    from jaxmem_callbacks.writers.perfetto import write_trace_of_steps

    schedules = {
        name if len(stories) == 1 else f"{name} of {story.run}": program.schedule
        for story in stories
        for name, program in story.programs.items()
        if program.schedule is not None
    }
    if not schedules:
        msg = (
            "No program of these runs has its bytes within the step recorded. They are of jm.jit_step, on CPUs and GPUs: a TPU's "
            "compiler hands over no buffer assignment."
        )
        raise RunFileError(msg)
    write_trace_of_steps(path, schedules)
    put(f"wrote {path}, of {', '.join(schedules)}\n")


def _beside(run: str) -> Path:
    """Where the page goes by default."""
    if is_address(run):
        return Path(_NAME)
    return (Path(run) if Path(run).is_dir() else Path(run).parent) / _NAME
