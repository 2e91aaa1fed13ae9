"""``jaxmem compare A B``: what grew between two runs, plans or saved step memories, with an exit code that is a gate."""

from __future__ import annotations

import argparse

from jaxmem_callbacks.analysis.comparing import growth, growth_document, growth_json, parse_share
from jaxmem_callbacks.cli.exit_codes import GREW, OK
from jaxmem_callbacks.cli.typed import place
from jaxmem_callbacks.readers.accounts import read_account
from jaxmem_callbacks.records.documents import as_text
from jaxmem_callbacks.records.terminal import put


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "before", metavar="A", type=place, help="a logdir, a plan's JSON, or `jaxmem inspect --json` output"
    )
    parser.add_argument("after", metavar="B", type=place, help="the same of today")
    parser.add_argument(
        "--max-regress", metavar="N%", help="exit with 1 where judged bytes grew by more; without it nothing is judged"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Read both, compare, print.

    Returns:
        0, or 1 where something grew by more than ``--max-regress``.

    Raises:
        JaxmemError: two different things, or files that have no account; the command line turns it into exit code 2.
    """
    most = None if args.max_regress is None else parse_share(args.max_regress)
    before, after = read_account(args.before), read_account(args.after)
    found = growth(before, after, most)
    put((growth_json(found) if args.json else as_text(growth_document(found, after))) + "\n", as_json=args.json)
    return GREW if found.too_much else OK
