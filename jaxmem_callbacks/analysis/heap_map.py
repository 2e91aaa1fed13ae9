"""Heap map: groups, stretches and holes by address, and cells to draw, from one device's rows of (address, bytes, label)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmem_callbacks.records.arrays import LiveBuffer

_MOST_REGIONS = 40
HOLE, BREAK = -1, -2  # what a cell shows that shows no group


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Arrays of one label; the last one of a layout may gather the rest."""

    label: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A run of addresses that belongs to one group, or to none (``HOLE``)."""

    begin: int
    end: int
    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeapLayout:
    """Where live arrays are.

    Attributes:
        groups: Largest first.
        regions: Stretches side by side, by address; between two regions is more than a hole.
        held_bytes: Memory of live arrays, each byte once.
        hole_bytes: Memory between them, in the regions.
        largest_hole_bytes: The largest of those holes.
        buffers: How many buffers there are, those that share memory counted once.
    """

    groups: Sequence[Group]
    regions: Sequence[Sequence[Stretch]]
    held_bytes: int
    hole_bytes: int
    largest_hole_bytes: int
    buffers: int


def layout_of(rows: Sequence[LiveBuffer], *, most_groups: int = 9, apart_bytes: int | None = None) -> HeapLayout:
    """Order buffers by address, group them by label and find the holes.

    Args:
        rows: In any order; of rows that share memory the first and longest counts, with what others reach beyond it.
        most_groups: Labels with a group of their own; the others share one more.
        apart_bytes: A hole larger than this parts two regions; None finds one that leaves at most forty.
    """
    solid = _solid(rows)
    groups, number_of = _grouped(solid, most_groups)
    stretches = [Stretch(begin=row.address, end=row.address + row.bytes, group=number_of[row.label]) for row in solid]
    held = sum(row.bytes for row in solid)
    apart = _apart(stretches, held) if apart_bytes is None else apart_bytes
    regions: list[list[Stretch]] = []
    holes: list[int] = []
    for stretch in stretches:
        gap = stretch.begin - regions[-1][-1].end if regions else apart + 1
        if gap > apart:
            regions.append([stretch])
            continue
        if gap > 0:
            regions[-1].append(Stretch(begin=stretch.begin - gap, end=stretch.begin, group=HOLE))
            holes.append(gap)
        regions[-1].append(stretch)
    return HeapLayout(
        groups=groups,
        regions=regions,
        held_bytes=held,
        hole_bytes=sum(holes),
        largest_hole_bytes=max(holes, default=0),
        buffers=len(solid),
    )


def cells_of(layout: HeapLayout, count: int) -> tuple[list[int], float]:
    """The regions one after another as about ``count`` cells, each with the group that has most of it; and a cell's bytes.

    Regions begin in a cell of their own, with one ``BREAK`` before all but the first.
    """
    sizes = [region[-1].end - region[0].begin for region in layout.regions]
    room = max(count - 2 * len(sizes), len(sizes), 1)
    width = max(sum(sizes) / room, 1.0)
    cells: list[int] = []
    for region, size in zip(layout.regions, sizes, strict=True):
        if cells:
            cells.append(BREAK)
        covered = np.zeros((len(layout.groups) + 1, max(int(np.ceil(size / width)), 1)))
        for stretch in region:
            begin, end = ((at - region[0].begin) / width for at in (stretch.begin, stretch.end))
            _cover(covered[stretch.group], begin, end)  # HOLE is -1: the last row
        shown = covered.argmax(axis=0)
        cells.extend(HOLE if each == len(layout.groups) else int(each) for each in shown)
    return cells, width


def _cover(row: np.ndarray, begin: float, end: float) -> None:
    """Add a stretch, in cells, to the share of each cell that it covers."""
    edges = np.arange(int(begin), min(int(np.ceil(end)), len(row)))
    row[edges] += np.minimum(edges + 1, end) - np.maximum(edges, begin)


def _solid(rows: Sequence[LiveBuffer]) -> list[LiveBuffer]:
    """By address, without overlap: arrays that share memory are one buffer."""
    found: list[LiveBuffer] = []
    for row in sorted(rows, key=lambda each: (each.address, -each.bytes)):
        end = found[-1].address + found[-1].bytes if found else row.address
        begin = max(row.address, end)
        if row.address + row.bytes > begin:
            found.append(LiveBuffer(address=begin, bytes=row.address + row.bytes - begin, label=row.label))
    return found


def _grouped(rows: Sequence[LiveBuffer], most: int) -> tuple[list[Group], dict[str, int]]:
    """Groups, largest first, and label -> number of its group."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, size = sums.get(row.label, (0, 0))
        sums[row.label] = (count + 1, size + row.bytes)
    order = sorted(sums, key=lambda label: (-sums[label][1], label))
    own, rest = (order, []) if len(order) <= most + 1 else (order[:most], order[most:])
    groups = [Group(label=label, count=sums[label][0], bytes=sums[label][1]) for label in own]
    if rest:
        totals = [sum(each) for each in zip(*(sums[label] for label in rest), strict=True)]
        groups.append(Group(label=f"{len(rest)} other kinds", count=totals[0], bytes=totals[1]))
    return groups, {label: min(number, len(own)) for number, label in enumerate(order)}


def _apart(stretches: Sequence[Stretch], held: int) -> int:
    """The hole that still belongs to a region: a twentieth of what is held, or more where that leaves too many regions."""
    gaps = sorted((after.begin - before.end for before, after in itertools.pairwise(stretches)), reverse=True)
    return max(held // 20, *gaps[_MOST_REGIONS - 1 : _MOST_REGIONS], 4096)
