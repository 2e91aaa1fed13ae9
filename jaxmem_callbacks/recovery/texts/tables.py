"""The tables beside a failure: a piece of a log enters, the buffers and chunks that it lists leave, each with its place.

Two programs print tables of buffers, XLA's buffer assignment ("Peak buffers") and TPU's compiler ("Largest program allocations"),
and one allocator prints all of its chunks.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem_callbacks.recovery.texts.rule import size_of

# buffer_assignment.cc, ToVerboseString: `Buffer 1:` with its lines; libtpu: `  1. Size: 512.00M` with its own. Patterns begin
# with letters, which Python searches for fast, and what stands before these is looked at where they are found.
_ENTRY = re.compile(r"Size:\s+(?P<size>\d[\d.]{0,18}\s?(?:[KMGTP]i?)?B?)")
_BEFORE_ENTRY = re.compile(r"(?:Buffer\s+\d{1,4}:|\n\s{0,40}\d{1,4}\.)\s{1,60}\Z")
_ENTRY_END = re.compile(r"={10}|\n\s*(?:Buffer\s+\d{1,4}:|\d{1,4}\.\s+Size:)")
_LONGEST_ENTRY = 8_000
_SHAPE = re.compile(r"(?:Shape|Entry Parameter Subshape):\s+([^\n]{1,400})")
_OPERATOR = re.compile(r'op_name="([^"\n]{1,2000})"')
_SOURCE = re.compile(r'source_file="([^"\n]{1,500})"(?:\s+source_line=(\d{1,7}))?')
_LABEL = re.compile(r"XLA [Ll]abel:\s+([^\n]{1,4000})")

# bfc_allocator.cc, DumpMemoryLog: `InUse at 7f..00 of size 256 [tag lower] [by op x] [allocation_annotation y] next 3`, and
# `Chunk at 0x.. of size 256` before 2019.
_CHUNK = re.compile(
    r"at\s+(?:0x)?[0-9a-fA-F]{1,16}\s+of\s+size\s+(?P<size>\d{1,19})"
    r"(?:[^\n]{0,120}?(?:executable=|by op )(?P<holder>[\w./$<>-]{1,200}))?"
)
_STATE = re.compile(r"\b(InUse|Chunk|Free)\s{1,4}\Z")
_DUMP = re.compile(r"BFCAllocator dump for (?P<allocator>[\w.-]{1,80})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A buffer that a table lists, before its line is known.

    Attributes:
        start: Where it begins in the text.
        bytes: Its size.
        shape: Dtype and shape.
        operator: The operation.
        source: File and line.
        label: The compiler's name for it.
    """

    start: int
    bytes: int
    shape: str
    operator: str
    source: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A chunk of a pool, before its line is known; or the line that a dump begins with.

    Attributes:
        start: Where it begins in the text.
        allocator: The pool's name, on the line that a dump begins with; empty for a chunk.
        bytes: Its size.
        free: Whether nobody uses it.
        holder: The program or operation that it is annotated with, or empty.
    """

    start: int
    allocator: str = ""
    bytes: int = 0
    free: bool = False
    holder: str = ""


def entries(text: str, start: int, end: int) -> Iterator[Entry]:
    """The buffers of tables that begin between two places of a text."""
    for found in _ENTRY.finditer(text, start, min(len(text), end + 200)):
        if found.start() >= end:
            return
        if not _BEFORE_ENTRY.search(text, max(0, found.start() - 120), found.start()):
            continue
        size = size_of(found["size"])
        stop = _ENTRY_END.search(text, found.end(), found.end() + _LONGEST_ENTRY)
        told = text[found.end() : stop.start() if stop else found.end() + _LONGEST_ENTRY]
        if size is None:
            continue
        source = _SOURCE.search(told)
        yield Entry(
            start=found.start(),
            bytes=size,
            shape=_one(_SHAPE, told),
            operator=_one(_OPERATOR, told),
            source="" if source is None else source[1] + (f":{source[2]}" if source[2] else ""),
            label=_one(_LABEL, told).split(" = ")[0],
        )


def chunks(text: str, start: int, end: int) -> Iterator[Chunk]:
    """The chunks of dumps that begin between two places of a text, and the dumps' first lines."""
    dumps = (
        Chunk(start=found.start(), allocator=found["allocator"]) for found in _DUMP.finditer(text, start, end + 120)
    )
    listed = heapq.merge(dumps, _chunks(text, start, end), key=lambda chunk: chunk.start)
    return itertools.takewhile(lambda chunk: chunk.start < end, listed)


def _chunks(text: str, start: int, end: int) -> Iterator[Chunk]:
    for found in _CHUNK.finditer(text, start, end + 400):
        state = _STATE.search(text, max(0, found.start() - 9), found.start())
        if state is not None:
            free, holder = state[1] == "Free", found["holder"] or ""
            yield Chunk(start=found.start(), bytes=int(found["size"]), free=free, holder=holder)


def _one(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1].strip() if found else ""
