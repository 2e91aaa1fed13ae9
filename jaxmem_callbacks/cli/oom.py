"""``jaxmem oom LOG``: the first out-of-memory failure of a log, with the line of each figure."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxmem_callbacks.cli.exit_codes import NOTHING_FOUND, OK
from jaxmem_callbacks.cli.typed import named
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.oom import LoggedBuffer, OomLog, PoolDump
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.texts.explain import sentence, tries, why
from jaxmem_callbacks.recovery.texts.log import read_oom_log
from jaxmem_callbacks.recovery.texts.parsing import encoding_of

_PIECE = 2**20
_FIGURES = {
    "requested_bytes": "asked for",
    "free_bytes": "free",
    "largest_free_bytes": "largest free piece",
    "used_bytes": "used",
    "limit_bytes": "limit",
    "program": "program",
    "allocator": "allocator",
    "phase": "phase",
}
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "log", metavar="LOG", type=named, help="a file of what a program printed, or - for standard input"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.epilog = "Exit code: 0 where the log has a failure, 1 where it has none, 2 where it cannot be read."


def run(args: argparse.Namespace) -> int:
    """Read the log, print its first failure.

    Returns:
        0, or 1 where the log has no failure.

    Raises:
        RunFileError: no such file, or one that cannot be read.
    """
    found = read_oom_log(_pieces(args.log))
    if args.json:
        put(json.dumps(_as_json(found), indent=2) + "\n", as_json=True)
    elif found is None:
        name = "standard input" if args.log == "-" else args.log
        put(f"{name} has no failure for want of memory.\n")
    else:
        put("\n".join(_lines(found)) + "\n")
    return NOTHING_FOUND if found is None else OK


def _pieces(name: str) -> Iterator[str]:
    """The log's text, a piece at a time. Bytes that are no text stand for one character each."""
    if name == "-":
        yield from _decoded(sys.stdin.buffer)
        return
    try:
        with Path(name).open("rb") as file:
            yield from _decoded(file)
    except OSError as error:
        msg = (
            f"{name} cannot be read: {error.strerror or error}. Expected a file of what a program printed, or - for standard "
            "input: python train.py 2>&1 | tee train.log; jaxmem oom train.log"
        )
        raise RunFileError(msg) from error


def _decoded(file: BinaryIO) -> Iterator[str]:
    piece = file.read(_PIECE)
    decoder = codecs.getincrementaldecoder(encoding_of(piece))(errors="replace")
    while piece:
        yield decoder.decode(piece)
        piece = file.read(_PIECE)
    yield decoder.decode(b"", final=True)


def _lines(log: OomLog) -> Iterator[str]:
    yield sentence(log)
    yield ""
    yield f"line {log.line} of {log.line_count}: {_short(log.said)}"
    if log.failures > 1:
        yield f"The log has {log.failures} failures; this is the first one that a program met."
    yield ""
    for name, words in _FIGURES.items():
        value = getattr(log.facts, name)
        text = format_bytes(value) if isinstance(value, int) else value
        place = f"line {log.where[name]}" if name in log.where else ""
        yield f"  {words:<20}{text if text is not None else 'unknown, because it is not in the log':<24}{place}".rstrip()
    if log.pool is not None:
        yield from _pool(log.pool)
    if log.buffers:
        yield ""
        yield "Largest buffers of the program:"
        yield from (f"  {line}" for buffer in log.buffers for line in _buffer(buffer))
    yield ""
    yield "What can be tried (not compiled: what each saves is unknown until it is):"
    for words, line in tries(log):
        yield f"  {words}{':' if line else '' if words.endswith('?') else '.'}"
        yield from (f"    {line}",) if line else ()


def _pool(pool: PoolDump) -> Iterator[str]:
    yield ""
    share = "unknown, because nothing is free" if pool.fragmentation is None else f"{pool.fragmentation:.0%}"
    yield (
        f"Pool {pool.allocator or 'without a name'} (line {pool.line}): {format_bytes(pool.in_use_bytes)} in use in"
        f" {pool.in_use_count} chunks, {format_bytes(pool.free_bytes)} free in {pool.free_count}, the largest"
        f" {format_bytes(pool.largest_free_bytes)}; fragmentation {share}."
    )
    if pool.largest:
        yield "Largest chunks in use:"
        yield from (f"  {line}" for chunk in pool.largest for line in _buffer(chunk))


def _buffer(buffer: LoggedBuffer) -> Iterator[str]:
    described = "  ".join(part for part in (buffer.shape, buffer.operator, buffer.source) if part) or buffer.label
    yield f"{format_bytes(buffer.bytes):>10}  line {buffer.line:<8}{_short(described)}".rstrip()


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _as_json(log: OomLog | None) -> dict[str, object]:
    if log is None:
        return {"found": False}
    cause, because = why(log)
    pool = None
    if log.pool is not None:
        extra = {"free_bytes": log.pool.free_bytes, "fragmentation": log.pool.fragmentation}
        pool = dataclasses.asdict(log.pool) | extra
    return {
        "found": True,
        "sentence": sentence(log),
        "cause": cause,
        "because": because,
        **dataclasses.asdict(log),
        "pool": pool,
        "tries": [{"what": words, "line": line or None, "compiled": False} for words, line in tries(log)],
    }
