"""Tables of growth and of checkpoint saves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxmem_callbacks.analysis.comparing import Growth
from jaxmem_callbacks.analysis.run_summary import DURING
from jaxmem_callbacks.records.accounts import Account, Change
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Block, Bullets, Document, Side, Table
from jaxmem_callbacks.records.readings import CheckpointSave
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.protocol import LoggedTable

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


TAG = "memory/checkpoint_saves"
SHOWN = 20
_COLUMNS = {"in_use_bytes": "held by the allocator", "live_array_bytes": "live arrays", "resident_bytes": "host"}


def saves_table(saves: Sequence[CheckpointSave]) -> LoggedTable:
    """The latest saves, newest first: when, how long, and the highest values that were read during each.

    Args:
        saves: At least one, oldest first.
    """
    rows = [
        (_when(save), f"{save.time_s - save.began_s:.2f}", *(_high(save, name) for name in _COLUMNS))
        for save in reversed(saves[-SHOWN:])
    ]
    columns = (DURING, "seconds", *(f"{what}, highest" for what in _COLUMNS.values()))
    return LoggedTable(tag=TAG, step=saves[-1].step, time_s=saves[-1].time_s, columns=columns, rows=rows)


def _when(save: CheckpointSave) -> str:
    how = "in the background" if save.background else "while the training waited"
    return f"after step {save.first_step} to {save.step}, {how}"


def _high(save: CheckpointSave, name: str) -> str:
    high, before = save.highs.get(name), save.before.get(name)
    if high is None:
        return "unknown, because nothing was read meanwhile"
    return format_bytes(high) + ("" if before is None else f" ({format_bytes(before)} before)")
