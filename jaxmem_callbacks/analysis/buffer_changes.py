"""Which buffers of a step's peak are new in another compile of it, and which are gone. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxmem_callbacks.records.documents import Block, Document, Side, Table
from jaxmem_callbacks.records.peaks import UNKNOWN, Buffer, short_shape
from jaxmem_callbacks.records.units import format_bytes

# What two compiles of one buffer have in common, closest first: compilers fuse, name and lay out otherwise.
_ALIKE: tuple[Callable[[Buffer], object], ...] = (
    lambda each: (each.bytes, each.shape, each.operation, each.source),
    lambda each: (each.bytes, short_shape(each.shape), each.source),
    lambda each: (each.bytes, short_shape(each.shape), each.kind),
    lambda each: (each.bytes, each.group),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferChanges:
    """Two peaks of one step, buffer by buffer.

    Attributes:
        new: Alive at the second peak and like none of the first, largest first.
        gone: Alive at the first peak and like none of the second, largest first.
    """

    new: tuple[Buffer, ...]
    gone: tuple[Buffer, ...]

    @property
    def added_bytes(self) -> int:
        """By how much the second peak is larger; negative where it is smaller."""
        return _sum(self.new) - _sum(self.gone)

    @property
    def named_share(self) -> float | None:
        """Of the bytes of new buffers the share of which operation, line or argument is known; None where nothing is new."""
        named = [each for each in self.new if each.group != UNKNOWN and (each.operation or each.source)]
        return _sum(named) / _sum(self.new) if self.new else None


def buffer_changes(before: Sequence[Buffer], after: Sequence[Buffer]) -> BufferChanges:
    """Match the buffers of two peaks, each with one of the other that is most like it; what is left is new or gone."""
    old, new = list(before), list(after)
    for alike in _ALIKE:
        waiting: dict[object, list[Buffer]] = {}
        for each in old:
            waiting.setdefault(alike(each), []).append(each)
        left: list[Buffer] = []
        for each in new:
            partners = waiting.get(alike(each))
            if partners:
                partners.pop()
            else:
                left.append(each)
        old, new = [each for some in waiting.values() for each in some], left

    def largest_first(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(sorted(buffers, key=lambda each: -each.bytes))

    return BufferChanges(new=largest_first(new), gone=largest_first(old))


_HEAD = ("buffers", "bytes", "what each is", "operation", "line")
_SIDES: tuple[Side, ...] = ("right", "right", "left", "left", "left")


def changes_document(found: BufferChanges, first: str, second: str, top: int) -> Document:
    """The new and the gone buffers, those of one line together, and how much of what was added they name.

    Args:
        found: The changes.
        first: What the first compile is called, such as ``jax 0.10.2``.
        second: The second.
        top: Lines of each table.
    """
    blocks: list[Block] = []
    for words, buffers in ((f"New under {second}", found.new), (f"Gone, that {first} has", found.gone)):
        rows = _rows(buffers)
        if rows:
            rest = f"; the {top} largest of {len(rows)} lines" if len(rows) > top else ""
            blocks += [
                f"{words}: {format_bytes(_sum(buffers))} alive at the peak{rest}",
                Table(_HEAD, rows[:top], _SIDES),
            ]
    share = found.named_share
    if share is not None:
        blocks.append(f"Operation or line are known of {share:.1%} of the new bytes.")
    return Document(blocks or [f"No buffer of the peak is new under {second}, and none is gone."])


def _rows(buffers: Sequence[Buffer]) -> list[tuple[str, ...]]:
    """One row for buffers of one shape, operation and line, the most bytes first."""
    alike: dict[tuple[str, str, str], list[Buffer]] = {}
    for each in buffers:
        alike.setdefault((short_shape(each.shape), each.operation or each.kind, each.source or ""), []).append(each)
    ordered = sorted(alike.items(), key=lambda pair: -_sum(pair[1]))
    return [(str(len(several)), format_bytes(_sum(several)), *what) for what, several in ordered]


def _sum(buffers: Sequence[Buffer]) -> int:
    return sum(each.bytes for each in buffers)
