"""A log of any length: its first out-of-memory failure and the tables beside it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import LoggedBuffer, OomFacts, OomLog, PoolDump
from jaxmem_callbacks.recovery.texts.parsing import (
    continues,
    facts_of,
    failures,
    is_met_before,
    joined,
    places_of,
    plain_pieces,
)
from jaxmem_callbacks.recovery.texts.rule import size_of
from jaxmem_callbacks.recovery.texts.statements import Budget, Statement, statements

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
        details = text[found.end() : stop.start() if stop else found.end() + _LONGEST_ENTRY]
        if size is None:
            continue
        source = _SOURCE.search(details)
        yield Entry(
            start=found.start(),
            bytes=size,
            shape=_one(_SHAPE, details),
            operator=_one(_OPERATOR, details),
            source="" if source is None else source[1] + (f":{source[2]}" if source[2] else ""),
            label=_one(_LABEL, details).split(" = ")[0],
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


# What stays in memory behind the place that is read, and before it: rules look this far around a line.
_BEHIND, _AHEAD = 8_000, 40_000
_MOST_BUFFERS, _MOST_POOLS = 10, 16
_SAME_LINES = 200
_LEAST_SURE_STATUS = 1  # the rank of one that states only that memory ran out
_NAMES = tuple(field.name for field in dataclasses.fields(OomFacts))


def read_oom_log(pieces: Iterable[str]) -> OomLog | None:
    """The first failure in a log, with the tables beside it.

    Args:
        pieces: The log's text, cut anywhere.

    Returns:
        What the log states, or None where it shows no failure.
    """
    reader = _Reader()
    for piece in plain_pieces(pieces):
        reader.feed(piece)
    return reader.finish()


class _Pool:
    """A dump while the log is read."""

    def __init__(self, line: int, allocator: str = "") -> None:
        self.line, self.allocator = line, allocator
        self.in_use = self.free = self.in_use_count = self.free_count = self.largest_free = 0
        self.largest: list[tuple[int, int, str]] = []

    def add(self, chunk: Chunk, line: int) -> None:
        """One more chunk."""
        if chunk.free:
            self.free, self.free_count = self.free + chunk.bytes, self.free_count + 1
            self.largest_free = max(self.largest_free, chunk.bytes)
            return
        self.in_use, self.in_use_count = self.in_use + chunk.bytes, self.in_use_count + 1
        keep = heapq.heappush if len(self.largest) < _MOST_BUFFERS else heapq.heappushpop
        keep(self.largest, (chunk.bytes, -line, chunk.holder))

    def record(self) -> PoolDump:
        """What it came to."""
        return PoolDump(
            allocator=self.allocator,
            line=self.line,
            pool_bytes=self.in_use + self.free,
            in_use_bytes=self.in_use,
            in_use_count=self.in_use_count,
            free_count=self.free_count,
            largest_free_bytes=self.largest_free,
            largest=tuple(
                LoggedBuffer(bytes=size, line=-line, operator=holder)
                for size, line, holder in sorted(self.largest, reverse=True)
            ),
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class _Failure:
    """A failure while the log is read: where it stands, the text around it, and the tables after it."""

    line: int
    last_line: int
    text: str
    place: int
    quote: str
    facts: OomFacts
    ranks: set[int]
    lines: dict[str, int] = dataclasses.field(default_factory=dict)
    buffers: dict[tuple[object, ...], LoggedBuffer] = dataclasses.field(default_factory=dict)

    @property
    def rank(self) -> int:
        """How surely a program failed: 0 for a status that it met."""
        return min(self.ranks)


class _Reader:
    """Holds a window of the log, and what was found so far."""

    def __init__(self) -> None:
        self._text, self._done = "", 0
        self._line, self._counted = 1, 0
        self._first: _Failure | None = None
        self._current: _Failure | None = None
        self._failures, self._budget = 0, Budget()
        self._pools: dict[str, _Pool] = {}
        self._pool: _Pool | None = None

    def feed(self, piece: str) -> None:
        """Read what is far enough from the end to be whole."""
        self._text += piece
        if len(self._text) - self._done >= 2 * _AHEAD:
            self._advance(len(self._text) - _AHEAD)

    def finish(self) -> OomLog | None:
        """The log's first failure, or None."""
        self._advance(len(self._text))
        lines = self._line - (1 if self._text.endswith("\n") or not self._text else 0)
        return None if self._first is None else self._record(self._first, lines)

    def _advance(self, end: int) -> None:
        start, self._done = self._done, end
        found = statements(self._text, start, end, budget=self._budget)
        listed: list[Statement | Entry] = [*found, *entries(self._text, start, end)]
        for item in sorted(listed, key=lambda each: each.start):
            if isinstance(item, Statement):
                self._statement(item, self._line_at(item.start))
            else:
                self._entry(item, self._line_at(item.start))
        for chunk in chunks(self._text, start, end):
            self._chunk(chunk, self._line_at(chunk.start))
        self._line_at(end)
        drop = max(0, end - _BEHIND)
        self._text, self._done, self._counted = self._text[drop:], end - drop, self._counted - drop

    def _line_at(self, place: int) -> int:
        """The line of a place of the window; of one that is before the last that was asked for, too."""
        if place >= self._counted:
            self._line += self._text.count("\n", self._counted, place)
        else:
            self._line -= self._text.count("\n", place, self._counted)
        self._counted = place
        return self._line

    def _statement(self, item: Statement, line: int) -> None:
        current = self._current
        if current is None or not self._same(current, item, line):
            low = max(0, item.start - _BEHIND)
            current = self._current = _Failure(
                line=line,
                last_line=line,
                text=self._text[low : item.end + _AHEAD // 2],
                place=item.start - low,
                quote=" ".join(self._text[item.start : item.end].split()),
                facts=item.facts,
                ranks={item.rank},
            )
            self._failures += 1
        elif item.rank < current.rank:
            # The status speaks for the lines before it, and what stands around it is what is read.
            low = max(0, item.start - _BEHIND)
            current.text, current.place = self._text[low : item.end + _AHEAD // 2], item.start - low
            current.line, current.quote = line, " ".join(self._text[item.start : item.end].split())
        current.ranks.add(item.rank)
        for name, value in ((name, getattr(item.facts, name)) for name in _NAMES):
            if value is not None:
                current.lines.setdefault(name, line)
        current.facts = joined([current.facts, item.facts])
        current.last_line = line
        first = self._first
        if first is None or not is_met_before(first.rank, first.facts, current.rank, current.facts):
            self._first = current

    def _same(self, current: _Failure, item: Statement, line: int) -> bool:
        """Whether a statement goes on with the failure before it: allocators speak before the status, and repeat nothing."""
        if not continues(current.facts, item.facts):
            return False
        return current.rank > 0 or (item.rank <= _LEAST_SURE_STATUS and line - current.last_line <= _SAME_LINES)

    def _entry(self, entry: Entry, line: int) -> None:
        """Tables stand behind the failing line; they are printed again with the exception."""
        if self._current is None or self._current is not self._first:
            return
        buffers = self._current.buffers
        key = (entry.bytes, entry.shape, entry.operator, entry.label)
        buffers.setdefault(
            key,
            LoggedBuffer(
                bytes=entry.bytes,
                line=line,
                shape=entry.shape,
                operator=entry.operator,
                source=entry.source,
                label=entry.label,
            ),
        )
        if len(buffers) > _MOST_BUFFERS:
            del buffers[min(buffers, key=lambda each: buffers[each].bytes)]

    def _chunk(self, chunk: Chunk, line: int) -> None:
        if chunk.allocator or self._pool is None:
            self._pool = _Pool(line, chunk.allocator)
            if len(self._pools) < _MOST_POOLS:
                self._pools.setdefault(chunk.allocator, self._pool)
        if not chunk.allocator:
            self._pool.add(chunk, line)

    def _pool_of(self, facts: OomFacts) -> _Pool | None:
        """The one that is named, else the first; pinned memory's has it in its name, and other memory has none."""
        gpu = facts.platform in ("gpu", None)
        pools = {name: pool for name, pool in self._pools.items() if gpu or "host" in name}
        return pools.get(facts.allocator or "") or next(iter(pools.values()), None)

    def _record(self, failure: _Failure, lines: int) -> OomLog:
        groups = failures(statements(failure.text))
        near = [group for group in groups if group[0].start <= failure.place <= group[-1].start]
        group = near[0] if near else groups[0]
        facts = facts_of(failure.text, groups, group)
        begins = failure.line - failure.text.count("\n", 0, failure.place)
        near_lines = {
            name: begins + failure.text.count("\n", 0, place)
            for name, place in places_of(failure.text, groups, group).items()
        }
        # Lines before a long dump speak of the failure too.
        facts = joined([facts, failure.facts])
        stated = {name for name in _NAMES if getattr(facts, name) is not None}
        where = {name: line for name, line in (failure.lines | near_lines).items() if name in stated}
        found = self._pool_of(facts)
        pool = None if found is None or not found.in_use_count + found.free_count else found.record()
        if pool is not None and facts.requested_bytes is not None and pool.has_in_pieces(facts.requested_bytes):
            facts = dataclasses.replace(facts, fragmentation=True)
        return OomLog(
            facts=facts,
            line=failure.line,
            said=failure.quote,
            where=where,
            failures=self._failures,
            buffers=tuple(sorted(failure.buffers.values(), key=lambda each: -each.bytes)),
            pool=pool,
            line_count=lines,
        )
