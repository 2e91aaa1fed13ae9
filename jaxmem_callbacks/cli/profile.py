"""``jaxmem profile``: JAX's device memory profile by what allocations hold: a script's before its first step, or a file's."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from jaxmem_callbacks.cli.exit_codes import FAILED, OK
from jaxmem_callbacks.cli.script import Reached, ScriptFailedError, add_script_arguments, at_step, show_start
from jaxmem_callbacks.cli.source import source_of
from jaxmem_callbacks.cli.typed import place, whole
from jaxmem_callbacks.records.documents import Document, Side, Table, put_document
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.pprof import MemoryProfile, Sample, profile_bytes, profile_from
from jaxmem_callbacks.records.source_files import Owner, owner_of, short_path
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.records.units import format_bytes

_ENDING = ".pb.gz"
_NAME = f"memory{_ENDING}"
_LEFT: tuple[Side, ...] = ("left",) * 4


class _Row(NamedTuple):
    """What allocations have in common: what they are to the step, path, dtype and shape, device, and the user's line."""

    holds: str
    path: str
    shape: str
    device: str
    made_at: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=place,
        help=f"with a script: where the profile is written, which `go tool pprof` shows; {_NAME} by default",
    )
    parser.add_argument("--top", type=whole("rows"), default=20, metavar="N", help="rows to show (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every row instead of the table")
    add_script_arguments(parser, other=f"; or a profile, FILE{_ENDING}")


def run(args: argparse.Namespace) -> int:
    """Show a file, or run a script until it calls its step, and write and show what is alive then.

    Returns:
        0, or 1 where the script itself failed.

    Raises:
        JaxmemError: a file that is no profile, or as `at_step`; the command line turns it into exit code 2.
    """
    if args.script.endswith(_ENDING):
        path = Path(args.script)
        try:
            profile = profile_from(path.read_bytes())
        except (OSError, ValueError) as error:
            why = (error.strerror or error) if isinstance(error, OSError) else error
            msg = f"{path} cannot be read: {why}. Expected what MemoryMonitor, jaxmem profile or jax.profiler writes."
            raise RunFileError(msg) from error
        return _show(profile, args)
    source_of(args.script, "profile")
    show_start(args.script)
    from jaxmem_callbacks.cli.jit_hook import as_written  # which imports JAX: mistakes are reported before

    try:
        with as_written(args.script, step=args.step, target=None) as seen:
            return at_step(
                args.script,
                lambda reached: functools.partial(_write, _taken(reached), args),
                args.script_args,
                step=args.step,
                command="profile",
                seen=seen,
                script_to_stderr=args.json,
            )
    except ScriptFailedError as error:
        put(f"jaxmem: {error}\n", sys.stderr)
        return FAILED


def _taken(reached: Reached) -> MemoryProfile:
    """What is alive when the script calls its step, with the names of that call's arguments."""
    from jaxmem_callbacks.probes.memory_profile import memory_profile
    from jaxmem_callbacks.programs.steps.leaves import named_arguments, user_leaves

    function = getattr(reached.step, "__wrapped__", reached.step)
    arguments = named_arguments(function, reached.args, reached.kwargs)
    return memory_profile(leaves=[leaf for name, value in arguments for leaf in user_leaves(name, value)])


def _write(profile: MemoryProfile, args: argparse.Namespace) -> int:
    output = args.output or Path(_NAME)
    try:
        write_file(output, profile_bytes(profile), private=True)
    except OSError as error:
        msg = f"{output} cannot be written: {error.strerror or error}. Is its folder there?"
        raise RunFileError(msg) from error
    code = _show(profile, args)
    if not args.json:
        put(f"wrote {output}\n")
    return code


def _show(profile: MemoryProfile, args: argparse.Namespace) -> int:
    sizes: Counter[_Row] = Counter()
    counts: Counter[_Row] = Counter()
    for sample in profile.samples:
        if sample.labels.get("kind") == "buffer":
            row = _row(sample)
            sizes[row] += sample.bytes
            counts[row] += sample.count
    rows = sorted(sizes, key=lambda row: (-sizes[row], row))
    if args.json:
        listed = [{**row._asdict(), "count": counts[row], "bytes": sizes[row]} for row in rows]
        put(json.dumps({"bytes": sizes.total(), "rows": listed}, indent=1) + "\n", as_json=True)
        return OK
    kinds: Counter[str] = Counter()
    for row, size in sizes.items():
        kinds[row.holds] += size
    by_kind = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.most_common())
    head = f"{format_bytes(sizes.total())} are alive in {counts.total()} arrays" + (f": {by_kind}." if by_kind else ".")
    one_device = len({row.device for row in rows}) <= 1
    cells = [
        (
            format_bytes(sizes[row]),
            str(counts[row]),
            row.holds,
            " ".join(filter(None, (row.path, row.shape))),
            *(() if one_device else (row.device,)),
            row.made_at,
        )
        for row in rows[: args.top]
    ]
    columns = ("bytes", "arrays", "holds", "what", *(() if one_device else ("device",)), "made at")
    rest = sum(sizes[row] for row in rows[args.top :])
    left_out = [f"{len(rows) - args.top} more rows hold {format_bytes(rest)}: --top {len(rows)}."] if rest else []
    put_document(
        Document(
            [
                head,
                *([Table(columns, cells, ("right", "right", *_LEFT[: len(columns) - 2]))] if cells else []),
                *left_out,
            ]
        )
    )
    return OK


def _row(sample: Sample) -> _Row:
    named = {name: str(sample.labels.get(name, "")) for name in ("holds", "path", "shape", "device")}
    own = next((each for each in sample.frames if each.line and owner_of(each.file) is Owner.USER), None)
    made_at = "" if own is None else f"{short_path(own.file)}:{own.line} ({own.function})"
    return _Row(**{**named, "holds": named["holds"] or "not named"}, made_at=made_at)
