"""``jaxmem oom LOG``: the first out-of-memory failure of a log, with the line of each figure."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxmem_callbacks.cli.exit_codes import NOTHING_FOUND, OK
from jaxmem_callbacks.cli.typed import named
from jaxmem_callbacks.records.documents import Block, Bullets, Document, Section, Table, put_document
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
        put_document(_document(found))
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


def _document(log: OomLog) -> Document:
    failures = f"The log has {log.failures} failures; this is the first one that a program met."
    return Document(
        [
            sentence(log),
            f"line {log.line} of {log.line_count}: {_short(log.said)}",
            *([failures] if log.failures > 1 else []),
            Table((), [_figure(log, name, words) for name, words in _FIGURES.items()]),
            *([] if log.pool is None else _pool(log.pool)),
            *([Section("Largest buffers of the program:", [_buffers(log.buffers)])] if log.buffers else []),
            Section(
                "What can be tried (not compiled: what each saves is unknown until it is):",
                [Bullets([text for words, line in tries(log) for text in _hint(words, line)], mark=" ")],
            ),
        ]
    )


def _figure(log: OomLog, name: str, words: str) -> tuple[str, str, str]:
    value = getattr(log.facts, name)
    shown = format_bytes(value) if isinstance(value, int) else value
    return words, "unknown, because it is not in the log" if shown is None else shown, _line(log.where.get(name))


def _line(number: int | None) -> str:
    return "" if number is None else f"line {number}"


def _hint(words: str, line: str) -> Iterator[str]:
    yield f"{words}{':' if line else '' if words.endswith('?') else '.'}"
    if line:
        yield f"  {line}"


def _pool(pool: PoolDump) -> Iterator[Block]:
    share = "unknown, because nothing is free" if pool.fragmentation is None else f"{pool.fragmentation:.0%}"
    yield (
        f"Pool {pool.allocator or 'without a name'} (line {pool.line}): {format_bytes(pool.in_use_bytes)} in use in"
        f" {pool.in_use_count} chunks, {format_bytes(pool.free_bytes)} free in {pool.free_count}, the largest"
        f" {format_bytes(pool.largest_free_bytes)}; fragmentation {share}."
    )
    if pool.largest:
        yield Section("Largest chunks in use:", [_buffers(pool.largest)])


def _buffers(buffers: Iterable[LoggedBuffer]) -> Table:
    rows = [(format_bytes(each.bytes), _line(each.line), _short(_place(each))) for each in buffers]
    return Table((), rows, ("right", "left", "left"))


def _place(buffer: LoggedBuffer) -> str:
    return "  ".join(part for part in (buffer.shape, buffer.operator, buffer.source) if part) or buffer.label


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
