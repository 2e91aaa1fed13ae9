"""Checkpoint saves as a table for TensorBoard's Text page: records enter, one Table leaves."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmem_callbacks.analysis.saves import DURING
from jaxmem_callbacks.records.readings import CheckpointSave
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.protocol import Table

TAG = "memory/checkpoint_saves"
SHOWN = 20
_COLUMNS = {"in_use_bytes": "held by the allocator", "live_array_bytes": "live arrays", "resident_bytes": "host"}


def saves_table(saves: Sequence[CheckpointSave]) -> Table:
    """The latest saves, newest first: when, how long, and the highest values that were read during each.

    Args:
        saves: At least one, oldest first.
    """
    rows = [
        (_when(save), f"{save.time_s - save.began_s:.2f}", *(_high(save, name) for name in _COLUMNS))
        for save in reversed(saves[-SHOWN:])
    ]
    columns = (DURING, "seconds", *(f"{what}, highest" for what in _COLUMNS.values()))
    return Table(tag=TAG, step=saves[-1].step, time_s=saves[-1].time_s, columns=columns, rows=rows)


def _when(save: CheckpointSave) -> str:
    how = "in the background" if save.background else "while the training waited"
    return f"after step {save.first_step} to {save.step}, {how}"


def _high(save: CheckpointSave, name: str) -> str:
    high, before = save.highs.get(name), save.before.get(name)
    if high is None:
        return "unknown, because nothing was read meanwhile"
    return format_bytes(high) + ("" if before is None else f" ({format_bytes(before)} before)")
