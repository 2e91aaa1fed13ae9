"""Figures: which field of a Reading goes under which TensorBoard tag, in which unit. The one table of tags."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem_callbacks.analysis.fragmentation import Fragmentation, fragmentation_of
from jaxmem_callbacks.records.readings import Reading, Source
from jaxmem_callbacks.records.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of a reading.

    Attributes:
        tag: TensorBoard tag; tags of bytes carry the unit.
        source: Which probe knows it.
        field: The Reading's field.
        unit: What one unit of the tag is, in the field's own unit (bytes or a count).
        meaning: One line for the table of what is known here.
    """

    tag: str
    source: Source
    field: str
    unit: int
    meaning: str


FIGURES = (
    Figure(
        tag="memory/in_use_gib",
        source="allocator",
        field="in_use_bytes",
        unit=GIB,
        meaning="held at the moment of reading",
    ),
    Figure(
        tag="memory/reserved_gib", source="allocator", field="reserved_bytes", unit=GIB, meaning="for temporaries (TPU)"
    ),
    Figure(
        tag="memory/peak_since_start_gib",
        source="allocator",
        field="peak_bytes_since_start",
        unit=GIB,
        meaning="largest in use since the process began, not one step's peak",
    ),
    Figure(
        tag="memory/limit_gib", source="allocator", field="limit_bytes", unit=GIB, meaning="what the allocator may use"
    ),
    Figure(
        tag="memory/pool_gib", source="allocator", field="pool_bytes", unit=GIB, meaning="taken from the driver so far"
    ),
    Figure(
        tag="memory/largest_free_gib",
        source="allocator",
        field="largest_free_bytes",
        unit=GIB,
        meaning="largest block that could be given out",
    ),
    Figure(
        tag="memory/live_arrays_gib",
        source="live_arrays",
        field="live_array_bytes",
        unit=GIB,
        meaning="arrays that Python holds; no temporaries",
    ),
    Figure(
        tag="memory/live_arrays_count",
        source="live_arrays",
        field="live_array_count",
        unit=1,
        meaning="number of those arrays",
    ),
    Figure(
        tag="memory/host_gib", source="host", field="resident_bytes", unit=GIB, meaning="resident memory of the process"
    ),
)
FRAGMENTATION = "memory/fragmentation_share"
HEADROOM = "memory/headroom_gib"


def values_of(reading: Reading) -> dict[str, float]:
    """Tag -> value for every figure the reading has; what is unknown is absent."""
    values: dict[str, float] = {}
    for figure in FIGURES:
        count = getattr(reading, figure.field) if figure.source == reading.source else None
        if count is not None:
            values[figure.tag] = count / figure.unit
    if reading.source == "allocator":
        values |= _derived(reading)
    return values


def _derived(reading: Reading) -> dict[str, float]:
    values: dict[str, float] = {}
    found = fragmentation_of(reading)
    if isinstance(found, Fragmentation):
        values[FRAGMENTATION] = found.share
    if reading.limit_bytes is not None and reading.in_use_bytes is not None:
        values[HEADROOM] = (reading.limit_bytes - reading.in_use_bytes - (reading.reserved_bytes or 0)) / GIB
    return values
