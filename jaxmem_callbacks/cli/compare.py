"""``jaxmem compare A B``: what grew between two runs, plans or saved step memories, with an exit code that is a gate.

``jaxmem compare --jax PYTHON_A --jax PYTHON_B SCRIPT``: which buffers of one step are new under another JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxmem_callbacks.analysis.comparing import (
    BufferChanges,
    Growth,
    buffer_changes,
    changes_document,
    growth,
    growth_document,
    growth_json,
    parse_share,
)
from jaxmem_callbacks.cli.exit_codes import GREW, OK
from jaxmem_callbacks.cli.typed import place, run_place, whole
from jaxmem_callbacks.readers.accounts import account_from, read_account
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.accounts import Account
from jaxmem_callbacks.records.documents import Block, Document, Section, as_markdown, put_document
from jaxmem_callbacks.records.errors import ComparisonError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.peaks import Buffer
from jaxmem_callbacks.records.terminal import put

_TWO = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "before",
        metavar="A",
        type=run_place,
        help="a logdir or its address, a plan's JSON, or `jaxmem inspect --json` output; with --jax the script",
    )
    parser.add_argument("after", metavar="B", type=run_place, nargs="?", help="the same of today; nothing with --jax")
    parser.add_argument(
        "--max-regress", metavar="N%", help="exit with 1 where judged bytes grew by more; without it nothing is judged"
    )
    parser.add_argument(
        "--jax",
        metavar="PYTHON",
        action="append",
        default=[],
        help="an interpreter, given twice: which buffers of a script's step are new under the JAX of the second",
    )
    parser.add_argument(
        "--target", metavar="T", help="with --jax: compile for hardware that is not here, such as h100_sxm"
    )
    parser.add_argument(
        "--top", type=whole("lines"), default=10, metavar="N", help="with --jax: lines of new buffers to show (10)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request's comment")
    parser.add_argument("--html", metavar="FILE", type=place, help="also write the comparison as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Read both, compare, print.

    Returns:
        0, or 1 where something grew by more than ``--max-regress``.

    Raises:
        JaxmemError: two different things, or files that have no account; the command line turns it into exit code 2.
    """
    most = None if args.max_regress is None else parse_share(args.max_regress)
    if args.jax:
        return _between_versions(args, most)
    if args.after is None:
        msg = f"There is nothing to compare {args.before} with. Expected two paths, or a script and two interpreters."
        raise ComparisonError(msg)
    if args.target is not None:
        msg = "A target belongs to a comparison of two interpreters: what is in files was compiled already."
        raise ComparisonError(msg)
    before, after = read_account(args.before), read_account(args.after)
    found = growth(before, after, most)
    document = growth_document(found, after)
    _write_page(args.html, document)
    if args.json:
        put(growth_json(found) + "\n", as_json=True)
    else:
        _put(document, args)
    return _exit_code(found)


def _put(document: Document, args: argparse.Namespace) -> None:
    """In the form that was asked for; in Markdown below a heading, the verdict first."""
    if args.markdown:
        put(as_markdown(Document([Section("Device memory", _verdict_first(document), level=4)])) + "\n")
    else:
        put_document(document)


def _verdict_first(document: Document) -> list[Block]:
    """The blocks for a page. A console has the verdict last, where one looks."""
    *blocks, judgement = document.blocks
    return [judgement, *blocks]


def _write_page(path: Path | None, growth: Document, *documents: Document) -> None:
    """The comparison as a page.

    Raises:
        ComparisonError: it cannot be written.
    """
    if path is None:
        return
    from jaxmem_callbacks.records.page import document_html

    blocks = [*_verdict_first(growth), *(block for each in documents for block in each.blocks)]
    try:
        write_file(path, document_html(Document(blocks, title="Device memory, compared")), private=False)
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}. Is its folder there?"
        raise ComparisonError(msg) from error


def _exit_code(found: Growth) -> int:
    return GREW if found.too_much else OK


def _between_versions(args: argparse.Namespace, most: Fraction | None) -> int:
    """Inspect one script by two interpreters, compare, print."""
    if len(args.jax) != _TWO or args.after is not None:
        given = (
            f"{len(args.jax)} interpreter{'s' if len(args.jax) > 1 else ''} and {1 + (args.after is not None)} paths"
        )
        msg = f"Expected one script and two interpreters, got {given}."
        raise ComparisonError(msg)
    first, second = (inspect_by(python, str(args.before), args.target) for python in args.jax)
    found = growth(first.account, second.account, most)
    buffers = buffer_changes(first.buffers, second.buffers)
    names = version_words(first.account), version_words(second.account)
    bytes_grown, new_buffers = growth_document(found, second.account), changes_document(buffers, *names, args.top)
    _write_page(args.html, bytes_grown, new_buffers)
    if args.json:
        put(json.dumps(_as_json(found, buffers), indent=1) + "\n", as_json=True)
    else:
        _put(bytes_grown, args)
        put("\n")
        if args.markdown:
            put(as_markdown(new_buffers) + "\n")
        else:
            put_document(new_buffers)
    return _exit_code(found)


def _as_json(found: Growth, buffers: BufferChanges) -> dict[str, Any]:
    return {
        **json.loads(growth_json(found)),
        "added_bytes": buffers.added_bytes,
        "named_share": buffers.named_share,
        "new_buffers": [dataclasses.asdict(each) for each in buffers.new],
        "gone_buffers": [dataclasses.asdict(each) for each in buffers.gone],
    }


_PACKAGE = pathlib.Path(__file__).parents[1]
_EVERY = 10**9  # buffers: more than any program has
_TAIL_LINES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedStep:
    """What one interpreter's JAX makes of a step.

    Attributes:
        account: Its bytes, with versions.
        buffers: All buffers of its peak.
    """

    account: Account
    buffers: tuple[Buffer, ...]


def inspect_by(python: str, script: str, target: str | None) -> InspectedStep:
    """Run ``jaxmem inspect`` by an interpreter, with this library and that interpreter's packages.

    Args:
        python: The interpreter.
        script: As ``jaxmem inspect`` takes it.
        target: Hardware that is not there, or None.

    Raises:
        ComparisonError: it cannot be run, lacks a package, or fails; the message has the end of what it wrote.
    """
    command = [python, "-m", "jaxmem_callbacks", "inspect", script, "--json", "--top", str(_EVERY)]
    command += [] if target is None else ["--target", target]
    try:
        # The folder that holds this library may hold a JAX too, which must not come before the interpreter's own.
        with tempfile.TemporaryDirectory() as alone:
            (pathlib.Path(alone) / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
            path = os.pathsep.join(filter(None, [alone, os.environ.get("PYTHONPATH")]))
            done = subprocess.run(  # noqa: S603 - the interpreter that was asked for
                command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
            )
    except OSError as error:
        msg = f"{python} cannot be run: {error.strerror or error}. Expected a Python interpreter whose JAX is to be compared."
        raise ComparisonError(msg) from error
    if done.returncode == 0:
        try:
            found: dict[str, Any] = json.loads(done.stdout)
            buffers = tuple(record_from(Buffer, each, "top_buffers") for each in found["top_buffers"])
            return InspectedStep(account=account_from(found, python), buffers=buffers)
        except (ValueError, KeyError, TypeError) as error:
            msg = f"What {python} printed is no step's memory: {error}. Expected the JSON of jaxmem inspect."
            raise ComparisonError(msg) from error
    tail = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()][-_TAIL_LINES:]
    msg = (
        f"{python} could not inspect {script}. Expected an interpreter with JAX and what this library needs of packages; nothing "
        "is installed into it. The end of what it wrote:\n  " + "\n  ".join(tail)
    )
    raise ComparisonError(msg)


def version_words(account: Account) -> str:
    """Its JAX, such as ``jax 0.12.0.1``."""
    return f"jax {account.conditions['jax']}"
