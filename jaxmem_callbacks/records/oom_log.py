"""What a log says of failures for want of memory: what its lines state, and what the tables and dumps beside them list."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem_callbacks.records.oom import OomFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedBuffer:
    """A large buffer or chunk that a log lists.

    Attributes:
        bytes: Its size.
        line: The line of the log that it was read at, from 1.
        shape: Its dtype and shape as printed, padding and layout included; empty where none is told.
        operator: The operation that makes it, by the user's names, or the program that holds it; empty where none is told.
        source: File and line of the user's code; empty where none is told.
        label: The compiler's own name for it; empty where none is told.
    """

    bytes: int
    line: int
    shape: str = ""
    operator: str = ""
    source: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolDump:
    """A pool as its allocator listed it when it refused: all chunks, in use and free.

    Attributes:
        allocator: The pool's name; empty where the log does not tell it.
        line: The line of the log that the dump begins at, from 1.
        pool_bytes: What the pool holds, the chunks together.
        in_use_bytes: Of it, in use.
        in_use_count: Chunks in use.
        free_count: Free chunks.
        largest_free_bytes: The largest free chunk, or 0 where nothing is free.
        largest: The largest chunks in use, largest first.
    """

    allocator: str
    line: int
    pool_bytes: int
    in_use_bytes: int
    in_use_count: int
    free_count: int
    largest_free_bytes: int
    largest: tuple[LoggedBuffer, ...]

    @property
    def free_bytes(self) -> int:
        """What the pool holds and nobody uses."""
        return self.pool_bytes - self.in_use_bytes

    def has_in_pieces(self, size: int) -> bool:
        """Whether so much is free, but not in one chunk."""
        return self.largest_free_bytes < size <= self.free_bytes

    @property
    def fragmentation(self) -> float | None:
        """The share of free memory that lies outside the largest free chunk; None where nothing is free."""
        return (self.free_bytes - self.largest_free_bytes) / self.free_bytes if self.free_bytes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class OomLog:
    """The first failure that a log tells.

    Attributes:
        facts: What its lines state.
        line: The line that it is told at, from 1.
        said: Those words, in one line.
        where: Name of a fact to the line that it was read at.
        failures: How many failures the log tells. The same figures again within 200 lines are the same failure.
        buffers: The largest buffers of the failing program, largest first.
        pool: The pool's dump, or None where the log has none.
        line_count: Lines of the log.
    """

    facts: OomFacts
    line: int
    said: str
    where: dict[str, int]
    failures: int
    buffers: tuple[LoggedBuffer, ...]
    pool: PoolDump | None
    line_count: int
