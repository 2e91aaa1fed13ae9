"""``jaxmem report RUN``: one self-contained HTML file of what a monitor wrote, and a sentence on the screen."""

from __future__ import annotations

import argparse

import jaxmem_callbacks
from jaxmem_callbacks.cli.exit_codes import OK
from jaxmem_callbacks.cli.typed import place
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.terminal import put

_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "place", metavar="RUN", type=place, help="a monitor's logdir, a folder of them, or a memory.jsonl"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=place, help=f"where to write; RUN/{_NAME} by default")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page.

    Returns:
        0.

    Raises:
        RunFileError: no run there, a line that is none, or a page that cannot be written.
    """
    stories = stories_of(args.place)
    from jaxmem_callbacks.writers.page import page_html
    from jaxmem_callbacks.writers.report import happened, report_model

    source = str(args.place) if args.place.name else str(args.place.resolve().name)
    page = page_html(report_model(stories, source=source, version=jaxmem_callbacks.__version__))
    output = args.output or (args.place if args.place.is_dir() else args.place.parent) / _NAME
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
    return OK
