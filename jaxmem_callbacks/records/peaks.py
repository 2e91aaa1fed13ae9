"""What makes a program's peak: its bytes by group, and the largest buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxmem_callbacks.records.units import format_bytes

if TYPE_CHECKING:  # a peak is printed seldom, and is a part of other records
    from jaxmem_callbacks.records.documents import Document, Table

_LAYOUT, _INDEX = re.compile(r"\{[^{}]*\}"), re.compile(r"/\*.*?\*/")
_LONGEST_TUPLE = 32


def short_shape(shape: str) -> str:
    """A shape without its layout; of a long tuple the number of its parts.

    Args:
        shape: Such as ``f32[256,64]{1,0}`` or ``(s32[], f32[8]{0})``.
    """
    plain = _INDEX.sub("", _LAYOUT.sub("", shape))
    if not plain.startswith("(") or len(plain) <= _LONGEST_TUPLE:
        return plain
    return f"(...) of {len(_split(plain[1:-1], ','))} parts"


def short_operation(operation: str, room: int) -> str:
    """An operation's first and last parts, as many as ``room`` letters hold, and at least one of each.

    Args:
        operation: Such as ``jit(step)/while/body/Block_3/exp``, which in 24 letters is ``jit(step)/.../Block_3/exp``. What
            has no parts, such as the path of an argument, stays whole: cut, it would name nothing.
        room: Letters in the row.
    """
    first, *rest = _split(operation, "/")
    if len(operation) <= room or len(rest) < 2:  # noqa: PLR2004 - nothing between the first and the last
        return operation
    shorter = ("/".join([first, "...", *rest[start:]]) for start in range(1, len(rest)))
    return next((text for text in shorter if len(text) <= room), f"{first}/.../{rest[-1]}")


def _split(text: str, mark: str) -> list[str]:
    """The text's parts between marks that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "saved activations",
    "temporaries",
)
RESULTS, CONSTANTS, GAPS, UNKNOWN = "results", "constants", "gaps", "unknown"
# Group -> what it holds.
GROUPS = {
    PARAMETERS: "arguments that are trained or frozen weights",
    OPTIMIZER: "arguments of the optimizer: moments, counters, master copies",
    GRADIENTS: "made by the backward pass, as large as a parameter, on the way to the optimizer",
    SAVED: "made by the forward pass and read by the backward pass",
    TEMPORARIES: "everything else that is alive there: work of the moment, recomputed activations",
    "batch": "arguments that are data",
    "state": "arguments that are neither and are returned updated, such as running statistics",
    "other": "all other arguments",
    RESULTS: "what the step returns in memory of its own",
    CONSTANTS: "arrays that are part of the program",
    GAPS: "left between the temporaries, which do not fit together more closely",
    UNKNOWN: "nothing names what it is; each buffer has the reason",
}
AT_THE_PEAK = "alive at the peak"
WHOLE_HEAP = "every temporary of the heap, not only those alive at the peak: the compiler wrote no live ranges"
BY_TOTALS = "one sum for all temporaries: the compiler handed over no buffer assignment with the program"
REFUSED = "arguments by their shapes; the compiler refused the program before it placed its buffers"
UNPLACED = "the compiler counts it in its total and gives it no place in its buffer assignment"
_SHOWN = 40  # buffers of one group on a page
_SMALL = 0.005  # shares below are named together in one line of words
_FOLDERS = re.compile(r"\([^()]*/(?=[^()/]+\)$)")  # before the file at the end, as in "dot (runs/train.py:29)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer alive at the peak of a program's temporaries.

    Attributes:
        bytes: Its size.
        shape: Dtype, shape and layout as the compiler prints them.
        operation: The JAX operation with its module path, such as ``jit(step)/Block_3/dot_general``, or None.
        source: ``file.py:line`` of the user's code, or None where the compiler kept none.
        kind: ``temporary``, ``argument``, ``output``, ``constant``, or ``gap``: memory that the plan leaves between the
            temporaries alive at the peak; ``unplaced`` is what the compiler counts and has no place for in its plan.
        group: What it is to the step, one of `records.peaks.GROUPS`.
        unpadded_bytes: Bytes of its elements side by side, or None where the shape does not show it.
        memory_space: ``device`` or, for what is beside the peak, ``host`` or ``on-chip``.
        why: Why its group is ``unknown``, else None.
    """

    bytes: int
    shape: str
    kind: str
    operation: str | None = None
    source: str | None = None
    group: str = "unknown"
    unpadded_bytes: int | None = None
    memory_space: str = "device"
    why: str | None = None

    @property
    def waste_bytes(self) -> int | None:
        """Bytes that hold no element: what tiles are padded with on a TPU; None where unknown."""
        return None if self.unpadded_bytes is None else max(self.bytes - self.unpadded_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakGroup:
    """One group's part of a peak.

    Attributes:
        name: One of `GROUPS`.
        bytes: What it takes, padding included.
        waste_bytes: What of it is padding, as far as shapes show.
        count: Number of buffers.
    """

    name: str
    bytes: int
    waste_bytes: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What makes a program's peak. ``print`` it for a table.

    Attributes:
        bytes: All groups together.
        groups: Those that are not empty, in the order of `GROUPS`.
        buffers: The largest buffers first; all of them, or the largest of each group in a plan.
        basis: What the temporaries are: those alive at the peak, or more where the compiler reports less.
        moment: The operation at which it is reached, with its source line, or None.
        elsewhere: What is alive then in the host's memory or in a TPU's on-chip memory and is no part of ``bytes``.
    """

    bytes: int
    groups: tuple[PeakGroup, ...]
    buffers: tuple[Buffer, ...]
    basis: str = AT_THE_PEAK
    moment: str | None = None
    elsewhere: tuple[Buffer, ...] = ()

    @property
    def waste_bytes(self) -> int:
        """Padding in all groups."""
        return sum(group.waste_bytes for group in self.groups)

    def bytes_of(self, group: str) -> int:
        """Bytes of one group; 0 where it is empty.

        Raises:
            ValueError: there is no such group.
        """
        if group not in GROUPS:
            msg = f"There is no group {group!r} in a peak. Expected one of {', '.join(sorted(GROUPS))}."
            raise ValueError(msg)
        return sum(each.bytes for each in self.groups if each.name == group)

    def largest(self, count: int) -> Peak:
        """The same peak with the ``count`` largest buffers of each group only; its figures stay."""
        kept: dict[str, int] = {}
        shown: list[Buffer] = []
        for buffer in self.buffers:
            kept[buffer.group] = kept.get(buffer.group, 0) + 1
            if kept[buffer.group] <= count:
                shown.append(buffer)
        return replace(self, buffers=tuple(shown))

    @property
    def words(self) -> str:
        """The groups in one line, largest first: ``saved activations 812 MiB (70%), parameters ...``."""
        ordered = sorted(self.groups, key=lambda group: -group.bytes)
        shown = [group for group in ordered if group.bytes >= _SMALL * self.bytes]
        rest = sum(group.bytes for group in ordered) - sum(group.bytes for group in shown)
        parts = [f"{group.name} {format_bytes(group.bytes)} ({_share(group.bytes, self.bytes)})" for group in shown]
        return ", ".join([*parts, *([f"all else {format_bytes(rest)}"] if rest else [])])

    def __str__(self) -> str:
        from jaxmem_callbacks.records.documents import as_text

        return as_text(self.document())

    def _repr_html_(self) -> str:
        from jaxmem_callbacks.records.page import framed, program_page

        document = self.document()
        program = {"name": "the peak", "bytes": self.bytes, "peak": peak_model(self)}
        page = program_page(f"{self._head}.", "", program, [document.blocks[1], *self._remarks()])
        return framed(page, height=620, table=document)

    @property
    def _head(self) -> str:
        by = _SOURCES.get(self.basis, "the compiler's buffer assignment")
        return f"The peak of {format_bytes(self.bytes)} on one device, by {by}"

    def document(self) -> Document:
        """What ``print`` shows."""
        from jaxmem_callbacks.records.documents import Document

        return Document([self._head, self._table(), *self._remarks()])

    def _table(self) -> Table:
        """Lines no longer than the console's, as far as the operations can be shortened to that."""
        from jaxmem_callbacks.records.documents import Table, aligned
        from jaxmem_callbacks.records.terminal import console_width

        columns = ("group", "size", "of the peak", "padding", "buffers")
        rows = [self._row(group) for group in self.groups]
        room = console_width() - max(map(len, aligned(Table(columns, rows)))) - 2
        largest = [(*row, self._largest(group, room)) for row, group in zip(rows, self.groups, strict=True)]
        return Table((*columns, "the largest"), largest, ("left", "right", "right", "right", "right", "left"))

    def _remarks(self) -> list[str]:
        lines = [f"Temporaries, gradients and saved activations are {_basis_words(self.basis)}."]
        if self.moment:
            lines.append(f"It is reached at {self.moment}.")
        for space in sorted({buffer.memory_space for buffer in self.elsewhere}):
            size = sum(buffer.bytes for buffer in self.elsewhere if buffer.memory_space == space)
            lines.append(f"In {space} memory meanwhile, no part of it: {format_bytes(size)}.")
        reasons = dict.fromkeys(buffer.why for buffer in self.buffers if buffer.why)
        return [*lines, *(f"unknown: {reason}." for reason in reasons)]

    def _row(self, group: PeakGroup) -> tuple[str, ...]:
        return (
            group.name,
            format_bytes(group.bytes),
            _share(group.bytes, self.bytes),
            format_bytes(group.waste_bytes) if group.waste_bytes else "none",
            str(group.count),
        )

    def _largest(self, group: PeakGroup, room: int) -> str:
        """Shape and operation of a group's largest buffer, in so many letters if that can be."""
        first = next((buffer for buffer in self.buffers if buffer.group == group.name), None)
        if first is None:
            return ""
        shape = short_shape(first.shape)
        return f"{shape} {short_operation(first.operation or '', room - len(shape) - 1)}".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock:
    """One stretch of memory from where its value is made to that value's last use.

    Attributes:
        first: Position in the flattened schedule where it begins to live; loop bodies stand there once.
        last: Position of its last use.
        base: Where it is: bytes below it, what is held throughout among them.
        buffer: What it holds.
    """

    first: int
    last: int
    base: int
    buffer: Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSchedule:
    """A program's bytes over its schedule.

    Attributes:
        length: Positions in the schedule.
        peak_at: The one where its temporaries take most.
        held_bytes: Arguments, results and constants, which are held throughout.
        curve: Position -> bytes from there on, the highest of each stretch.
        blocks: The largest by bytes and time.
    """

    length: int
    peak_at: int
    held_bytes: int
    curve: tuple[tuple[int, int], ...]
    blocks: tuple[StepBlock, ...] = ()


def peak_of(buffers: Iterable[Buffer], *, basis: str = AT_THE_PEAK, moment: str | None = None) -> Peak:
    """The record of a peak from all its buffers; those outside the device's memory are no part of the sum."""
    every = sorted(buffers, key=lambda buffer: -buffer.bytes)
    here = [buffer for buffer in every if buffer.memory_space == "device"]
    groups: list[PeakGroup] = []
    for name in GROUPS:
        held = [buffer for buffer in here if buffer.group == name]
        if held:
            waste = sum(buffer.waste_bytes or 0 for buffer in held)
            size = sum(buffer.bytes for buffer in held)
            groups.append(PeakGroup(name=name, bytes=size, waste_bytes=waste, count=len(held)))
    return Peak(
        bytes=sum(group.bytes for group in groups),
        groups=tuple(groups),
        buffers=tuple(here),
        basis=basis,
        moment=moment,
        elsewhere=tuple(buffer for buffer in every if buffer.memory_space != "device"),
    )


def with_total(peak: Peak, total_bytes: int | None, why: str) -> Peak:
    """A peak whose bytes are a known total: what the buffers do not explain is unknown, because of ``why``."""
    missing = 0 if total_bytes is None else total_bytes - peak.bytes
    if missing <= 0:
        return peak
    unplaced = Buffer(bytes=missing, shape="unknown", kind="unplaced", group=UNKNOWN, why=why)
    return peak_of([*peak.buffers, *peak.elsewhere, unplaced], basis=peak.basis, moment=peak.moment)


_SOURCES = {
    REFUSED: "the step's arguments and the compiler's refusal",
    BY_TOTALS: "the step's arguments and the compiler's totals",
}


def _basis_words(basis: str) -> str:
    return "those alive at the peak" if basis == AT_THE_PEAK else basis


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.0%}"


# As the memory page reads them


def schedule_model(schedule: StepSchedule) -> dict[str, Any]:
    """Bytes over the schedule, and its blocks.

    Args:
        schedule: The record.
    """
    return {
        "length": schedule.length,
        "peak_at": schedule.peak_at,
        "held_bytes": schedule.held_bytes,
        "curve": schedule.curve,
        "blocks": [
            {"first": each.first, "last": each.last, "base": each.base, **_buffer_model(each.buffer)}
            for each in schedule.blocks
        ],
    }


def _buffer_model(each: Buffer) -> dict[str, Any]:
    return {
        "group": each.group,
        "bytes": each.bytes,
        "shape": each.shape,
        "operation": each.operation,
        "source": each.source,
        **({"why": each.why} if each.why else {}),
    }


def peak_model(peak: Peak, source: str = "") -> dict[str, Any]:
    """What makes a peak: all of each group, and its largest buffers; what is not named of a group is the rest.

    Args:
        peak: The record.
        source: Where it is from, for the page's words.
    """
    largest = peak.largest(_SHOWN)
    return {
        "bytes": peak.bytes,
        "basis": peak.basis,
        "moment": peak.moment and _FOLDERS.sub("(", peak.moment),
        "source": source,
        "groups": [
            {"name": each.name, "bytes": each.bytes, "padding": each.waste_bytes, "count": each.count}
            for each in peak.groups
        ],
        "buffers": [_buffer_model(each) for each in largest.buffers],
    }
