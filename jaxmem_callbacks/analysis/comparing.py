"""What grew between two accounts, or why they are not two accounts of one thing; and between two peaks of a step, by buffers.

Pure functions; both are documents too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxmem_callbacks.records.accounts import Account, Change
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Block, Bullets, Document, Side, Table
from jaxmem_callbacks.records.errors import ComparisonError
from jaxmem_callbacks.records.peaks import UNKNOWN, Buffer, short_shape
from jaxmem_callbacks.records.units import format_bytes

_SHOWN = 3  # entries that differ, in one message
# With an exponent of a hundred it is no share of a memory.
_NUMBER = re.compile(r"[\d_.+/-]{1,30}(?:[eE][+-]?\d{1,2})?")
# What two compiles of one buffer have in common, closest first: compilers fuse, name and lay out otherwise.
_ALIKE: tuple[Callable[[Buffer], object], ...] = (
    lambda each: (each.bytes, each.shape, each.operation, each.source),
    lambda each: (each.bytes, short_shape(each.shape), each.source),
    lambda each: (each.bytes, short_shape(each.shape), each.kind),
    lambda each: (each.bytes, each.group),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What differs between two accounts.

    Attributes:
        changes: Judged figures first, then those that explain.
        notes: Conditions that differ, and the accounts' own remarks, a sentence each.
        most: The share by which a judged figure may grow, or None where nothing is judged.
    """

    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    most: Fraction | None

    @property
    def too_much(self) -> tuple[Change, ...]:
        """The judged figures that grew more than allowed."""
        return tuple(change for change in self.changes if change.too_much)


def parse_share(text: str) -> Fraction:
    """``2%`` or ``0.5 %`` as an exact share.

    Raises:
        ComparisonError: no number with a percent sign, a negative one, or one out of all proportion.
    """
    number = text.strip().removesuffix("%").strip()
    try:
        share = Fraction(number) / 100 if _NUMBER.fullmatch(number) else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if share < 0 or not text.strip().endswith("%"):
        msg = (
            f"{text!r} is no share that memory may grow by. Expected a number with its percent sign, such as 2% or 0%."
        )
        raise ComparisonError(msg)
    return share


def growth(before: Account, after: Account, most: Fraction | None = None) -> Growth:
    """Compare two accounts of one thing.

    Args:
        before: What it needed.
        after: What it needs now.
        most: The share by which judged figures may grow; None judges nothing.

    Raises:
        ComparisonError: they are accounts of different things; the message names these.
    """
    _require_same(before, after)
    changes = [
        *_changes(before.judged, after.judged, judged=True, most=most),
        *_changes(before.shown, after.shown, judged=False, most=None),
    ]
    return Growth(changes=tuple(changes), notes=tuple(_notes(before, after)), most=most)


def _require_same(before: Account, after: Account) -> None:
    if before.form != after.form:
        _refuse(f"one is a {before.form}, the other a {after.form}", f"two of a kind, such as a {before.form} of today")
    if before.form != "run" and before.name != after.name:
        _refuse(f"one is of {before.name}, the other of {after.name}", "the same step twice")
    if before.hardware != after.hardware:
        _refuse(f"one is for {before.hardware}, the other for {after.hardware}", "the same hardware")
    if before.batch != after.batch:
        _refuse(f"the batches differ: {'; '.join(_differences(before.batch, after.batch))}", "the same batch")
    if not before.judged.keys() & after.judged.keys():
        first, second = (", ".join(each.judged) or "nothing" for each in (before, after))
        _refuse(f"one has {first}, the other {second}", "at least one figure that both have")


def _refuse(why: str, expected: str) -> None:
    msg = f"These cannot be compared: {why}. Expected {expected}: otherwise a difference in bytes means nothing."
    raise ComparisonError(msg)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A few of the entries that differ, in words."""
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    shown = [f"{path}: {before.get(path, 'none')} -> {after.get(path, 'none')}" for path in paths[:_SHOWN]]
    return shown + ([f"and {len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else [])


def _changes(
    before: Mapping[str, int], after: Mapping[str, int], *, judged: bool, most: Fraction | None
) -> Sequence[Change]:
    found: list[Change] = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        too_much = most is not None and old is not None and new is not None and new - old > most * old
        found.append(Change(name=name, before=old, after=new, judged=judged, too_much=too_much))
    return found


def _notes(before: Account, after: Account) -> Sequence[str]:
    notes = [f"{line}." for line in _differences(before.conditions, after.conditions)]
    alone = [name for name in {**before.judged, **after.judged} if (name in before.judged) != (name in after.judged)]
    notes += [f"{name}: in one of the two only, so it is not judged." for name in alone]
    return [*notes, *before.remarks, *(remark for remark in after.remarks if remark not in before.remarks)]


_HEAD = ("", "before", "after", "change", "share", "")
_WORTH = 0.001  # of the largest judged figure: alignment is no explanation
_SIDES: tuple[Side, ...] = ("left", "right", "right", "right", "right", "left")


def growth_document(found: Growth, after: Account) -> Document:
    """What grew, what explains it, notes, and one sentence on whether it is too much."""
    judged = [change for change in found.changes if change.judged]
    least = max((max(each.before or 0, each.after or 0) for each in judged), default=0) * _WORTH
    parts = [each for each in found.changes if not each.judged and (each.bytes is None or abs(each.bytes) > least)]
    blocks: list[Block] = [f"Bytes of {_what(after)}", _table(judged, found)]
    if parts:
        blocks += ["What it is made of, where that differs by more than a thousandth", _table(parts, found)]
    if found.notes:
        blocks.append(Bullets(found.notes, mark="!"))
    return Document([*blocks, verdict(found)])


def _table(changes: Sequence[Change], found: Growth) -> Table:
    return Table(_HEAD, [_row(each, found) for each in changes], _SIDES)


def verdict(found: Growth) -> str:
    """One sentence: what grew too much, that nothing did, or that nothing was judged."""
    if found.most is None:
        return f"Nothing was judged. Pass {advise('option.typed', option='max-regress', value='2%')} to fail on growth."
    most = f"{float(found.most):.3%}".rstrip("%").rstrip("0").rstrip(".") + "%"
    grown = [f"{change.name} by {format_bytes(change.bytes)} ({_share(change)})" for change in found.too_much]
    return f"Grew more than {most}: {'; '.join(grown)}." if grown else f"Nothing that is judged grew more than {most}."


def growth_json(found: Growth) -> str:
    """Every figure, bytes as integers."""
    content = {
        "changes": [{**dataclasses.asdict(change), "bytes": change.bytes} for change in found.changes],
        "notes": list(found.notes),
        "max_regress": None if found.most is None else float(found.most),
        "too_much": [change.name for change in found.too_much],
    }
    return json.dumps(content, indent=1)


def _what(account: Account) -> str:
    if account.form == "run":
        return f"a run on {account.hardware}; compiled needs and measured highs, of one device"
    return f"{account.name} on one device of {account.hardware}, by its compiler"


def _row(change: Change, found: Growth) -> Sequence[str]:
    grown = change.bytes
    sign = "" if grown is None else "-" if grown < 0 else "+"
    difference = "unknown" if grown is None else f"{sign}{format_bytes(abs(grown))}"
    mark = "too much" if change.too_much else "" if found.most is None or not change.judged or grown is None else "ok"
    return change.name, _size(change.before), _size(change.after), difference, _share(change), mark


def _size(count: int | None) -> str:
    return "none" if count is None else format_bytes(count)


def _share(change: Change) -> str:
    if change.bytes is None:
        return ""
    if not change.before:
        return "0.0%" if not change.after else "from nothing"
    return f"{change.bytes / change.before:+.1%}"


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


_BUFFERS_HEAD = ("buffers", "bytes", "what each is", "operation", "line")
_BUFFERS_SIDES: tuple[Side, ...] = ("right", "right", "left", "left", "left")


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
                Table(_BUFFERS_HEAD, rows[:top], _BUFFERS_SIDES),
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
