"""``jaxmem presets``: names in, a table, a resolved composition as YAML, or a verdict on files out. Imports no JAX."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxmem_callbacks.cli.exit_codes import OK, REFUSED
from jaxmem_callbacks.config.documents import is_path, read_text, require_shipped, shipped_names
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Document, Section, Table, put_document
from jaxmem_callbacks.records.errors import PresetError
from jaxmem_callbacks.records.terminal import console_width, put

_COLUMNS = 80  # prose in wider lines is hard to read
_BOTH = '"donate", "full_remat"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``jaxmem presets``."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="shipped names or YAML files; shows their settings together, composed from left to right",
    )
    parser.add_argument("--check", nargs="+", metavar="FILE", default=[], help="validate YAML files, each by itself")


def run(args: argparse.Namespace) -> int:
    """List, show or check.

    Returns:
        0, or 2 where a checked file is no preset.

    Raises:
        PresetError: a name or file to show is wrong.
    """
    for name in args.names:  # before what checks YAML is imported
        _ = read_text(name) if is_path(name) else require_shipped(name)
    if args.check:
        return _check(args.check)
    if args.names:
        _show(args.names)
    else:
        _list()
    return OK


def _list() -> None:
    from jaxmem_callbacks.config.presets import load_preset

    presets = [Section(name, [Table((), [[load_preset(name).description]], folded=True)]) for name in shipped_names()]
    put_document(Document(presets), width=min(console_width(), _COLUMNS))
    put(f"\nThey compose, later keys win: `{advise('command.typed', typed='presets donate full_remat')}` shows how,\n")
    put(f"and {advise('preset.load', names=_BOTH)} loads it.\n")


def _show(names: list[str]) -> None:
    from jaxmem_callbacks.config.presets import load_preset, preset_to_yaml

    preset = load_preset(*names)
    put(f"# {preset.name}\n{preset_to_yaml(preset, defaults='show')}")


def _check(files: list[str]) -> int:
    """One line a good file, all problems of a bad one; every file is looked at."""
    from jaxmem_callbacks.config.presets import load_preset

    code = OK
    for file in files:
        try:
            preset = load_preset(Path(file))
        except PresetError as error:
            put(f"{error}\n", sys.stderr)
            code = REFUSED
        else:
            put(f"{file}: ok, sets {', '.join(preset.said) or 'nothing'}\n")
    return code
