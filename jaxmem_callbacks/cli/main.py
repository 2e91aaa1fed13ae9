"""``jaxmem``: arguments in, an exit code out. A table has the module of each command; only the one asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jaxmem_callbacks
from jaxmem_callbacks.cli.exit_codes import OK, Leaving, code_of, exit_codes_text, leave, refused
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import did_you_mean
from jaxmem_callbacks.records.terminal import put, quietly

# Command -> (module, one line of help). The module has `add_arguments(parser)` and `run(args) -> exit code`.
COMMANDS: dict[str, tuple[str, str]] = {
    "compare": (
        "jaxmem_callbacks.cli.compare",
        "what grew between two runs, plans or saved step memories; a gate with --max-regress",
    ),
    "completion": ("jaxmem_callbacks.cli.completion", "a shell's script that completes jaxmem's commands and options"),
    "doctor": (
        "jaxmem_callbacks.cli.doctor",
        "this machine's memory settings, what is wrong with them, and which figures exist here",
    ),
    "inspect": (
        "jaxmem_callbacks.cli.inspect",
        "what a training script's step needs, by argument, and what is donated",
    ),
    "oom": (
        "jaxmem_callbacks.cli.oom",
        "what a log shows of memory that ran out: how much, where, why, and what to try",
    ),
    "plan": ("jaxmem_callbacks.cli.plan", "the cheapest way to make a training script's step fit, on any hardware"),
    "presets": ("jaxmem_callbacks.cli.presets", "list the shipped presets, show a composition, check a file"),
    "profile": (
        "jaxmem_callbacks.cli.profile",
        "what is alive when a script calls its step, or in a device memory profile, by what it holds",
    ),
    "report": ("jaxmem_callbacks.cli.report", "the story of a run as one self-contained HTML file"),
    "simulate": ("jaxmem_callbacks.cli.simulate", "under which allocator settings a recorded run would have survived"),
    "targets": (
        "jaxmem_callbacks.cli.targets",
        "compilers of hardware that is not here: which there are, and fetching them",
    ),
    "watch": ("jaxmem_callbacks.cli.watch", "a run in the terminal while it goes on"),
}

_RUN_SCRIPTS = {"inspect", "plan", "profile"}  # and hand arguments on to them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None for the process's own.

    Returns:
        0; 1 where a script or an installation failed, memory grew more than allowed, `jaxmem doctor` found something, `jaxmem
        oom` nothing or no settings survive a trace; 2 where the library refused or stdout takes nothing, with the reason on
        stderr and no traceback; 3 where nothing of a plan fits; 130 at Ctrl-C; 143 at SIGTERM while a step is planned or
        inspected; 141 where the output's reader went away.

    Raises:
        SystemExit: argparse's own, for ``--help``, ``--version`` and wrong options.
    """
    if sys.stderr is None:  # closed before Python began: a file that is opened now would be taken for it
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    if sys.stdout is None:
        return refused("stdout is closed, so nothing could be shown. Is the output not wanted? Send it to /dev/null.")
    given = list(sys.argv[1:] if argv is None else argv)
    Leaving.in_own_process = argv is None
    code = code_of(lambda: _run(given))
    return leave(code) if argv is None and _command(given) in _RUN_SCRIPTS else code


def _command(given: Sequence[str]) -> str | None:
    return next((word for word in given if not word.startswith("-")), None)


def _run(given: list[str]) -> int:
    """Run the command that was typed."""
    command = _command(given)
    if command is not None and command not in COMMANDS:
        return refused(
            f"unknown command {command!r}.{did_you_mean(command, COMMANDS)} Commands: {', '.join(sorted(COMMANDS))}."
        )
    parser, asked = _parsers(command)
    typed, own = _apart(given) if command in _RUN_SCRIPTS else (given, None)
    args, unknown = parser.parse_known_args(typed)
    if unknown:
        words = " ".join(unknown)
        meant = _option_meant(unknown, asked)
        last = f" A script's own come last: {_own_last(typed, unknown, own or [])}" if command in _RUN_SCRIPTS else ""
        parser.error(f"unrecognized arguments: {words}{meant or (last and '.')}{last}")
    if command in _RUN_SCRIPTS:
        args.script_args = args.script_args if own is None else own
        args.script = _script(args, command, parser)
    if command is None:
        parser.print_help()
        return OK
    with quietly(args.quiet):
        return int(args.run(args))


class _Parser(argparse.ArgumentParser):
    """argparse's, without control characters of what was typed, and with an error where stdout takes no more."""

    def _print_message(self, message: str, file: Any = None) -> None:
        put(message, sys.stderr if file is None else file)


def _apart(given: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What was typed for the command, and after a bare ``--`` for the script; None where there is no such mark."""
    mark = next((word for word in given if word in ("--", "--args")), None)
    if mark != "--":  # what follows --args is the script's, a -- too
        return list(given), None
    at = list(given).index(mark)
    return list(given[:at]), list(given[at + 1 :])


def _option_meant(unknown: Sequence[str], asked: argparse.ArgumentParser) -> str:
    """``. Did you mean `--step`?`` of the first option that the command does not know; empty where none is near it."""
    given = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    meant = did_you_mean(given, re.findall(r"--[\w-]+", asked.format_usage()), cutoff=0.7)
    return meant and f".{meant}"


def _own_last(given: Sequence[str], unknown: Sequence[str], own: Sequence[str]) -> str:
    """What was typed, with what the command does not know as arguments of the script."""
    words = list(given)
    for word in unknown:
        words.remove(word)
    return shlex.join(["jaxmem", *words, "--", *unknown, *own])


def _script(args: argparse.Namespace, command: str, parser: argparse.ArgumentParser) -> str:
    """The script, or the module as ``-m MODULE``: one of the two is there, or argparse's own exit."""
    if args.module is None and args.script is None:
        parser.error(f"expected SCRIPT or -m MODULE. Type {advise('script.either', command=command)}.")
    if args.module is not None and args.script is not None:
        parser.error(
            f"expected one of SCRIPT and -m MODULE, got {args.script} and -m {args.module}. Arguments of the module come last: "
            f"jaxmem {command} -m {args.module} -- {args.script}"
        )
    return str(args.script) if args.module is None else f"-m {args.module}"


def _parsers(command: str | None, *, every: bool = False) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, with the options of the one command that was asked for, or of each; and that command's own, else the same."""
    parser = _Parser(prog="jaxmem", description="Plan, apply and watch the memory of JAX training.")
    parser.add_argument("--version", action="version", version=f"jaxmem_callbacks {jaxmem_callbacks.__version__}")
    rows = parser.add_subparsers(title="commands", metavar="COMMAND")
    asked: argparse.ArgumentParser = parser
    for name, (module, words) in COMMANDS.items():
        row = rows.add_parser(
            name,
            help=words,
            description=f"{words[0].upper()}{words[1:]}.",
            epilog=exit_codes_text(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if every or name == command:
            loaded = importlib.import_module(module)
            row.add_argument(
                "--quiet", action="store_true", help="print errors only, and the JSON that --json asks for"
            )
            loaded.add_arguments(row)
            row.set_defaults(run=loaded.run, parser_of_all=partial(_parsers, None, every=True))
            asked = row
    return parser, asked


if __name__ == "__main__":
    sys.exit(main())
