"""``jaxmem completion SHELL``: the script by which a shell completes commands, options and paths. The package shtab writes it."""

from __future__ import annotations

import argparse
import importlib

from jaxmem_callbacks.cli.exit_codes import OK
from jaxmem_callbacks.cli.typed import place
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.terminal import put


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("shell", choices=["bash", "tcsh", "zsh"], help="which shell")


def run(args: argparse.Namespace) -> int:
    """Print the script.

    Returns:
        0.

    Raises:
        JaxmemError: shtab is not installed; the command line turns it into exit code 2.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ModuleNotFoundError as error:
        msg = "the package shtab, which writes such scripts, is not installed here. pip installs it by that name."
        raise JaxmemError(msg) from error
    parser, _ = args.parser_of_all()
    (commands,) = (each for each in parser._actions if isinstance(each.choices, dict))  # noqa: SLF001 - no other way
    for command in commands.choices.values():
        for action in command._actions:  # noqa: SLF001
            if action.type is place or action.dest == "script":
                action.complete = shtab.FILE
    put(shtab.complete(parser, shell=args.shell) + "\n")
    return OK
