"""Figures: what is shown of readings, under which TensorBoard tag, in which unit, from where, and over which window.

The one table of tags; docs/figures.md tells it to readers, and descriptions on the TensorBoard page come from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jaxmem_callbacks.analysis.fragmentation import Fragmentation, fragmentation_of
from jaxmem_callbacks.records.readings import Reading, Source
from jaxmem_callbacks.records.units import GIB

Unit = Literal["GiB", "arrays", "share"]
_IN_UNITS: dict[Unit, int] = {"GiB": GIB, "arrays": 1, "share": 1}
_FROM: dict[str, str] = {
    "allocator": "the allocator's statistics (Device.memory_stats)",
    "live_arrays": "jax.live_arrays()",
    "host": "the operating system",
    "driver": "NVIDIA's driver (NVML)",
    "compiler": "the compiler of the attached device",
    "plan": "the plan",
    "preset": "the preset",
}
_UNIT_WORDS: dict[Unit, str] = {"GiB": "in GiB", "arrays": "a number", "share": "a share of 1"}
_MOMENT = "at the moment of reading"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        tag: TensorBoard tag; tags of bytes carry the unit.
        source: Which probe knows it, or ``compiler``, ``plan`` or ``preset``.
        unit: The tag's unit; fields of readings are in bytes or numbers.
        meaning: One line for the table of what is known here.
        field: The Reading's field, or None for what is computed from several.
        window: What time one value is about; the points of TensorBoard gather the values of a window of their own.
    """

    tag: str
    source: Source | Literal["compiler", "plan", "preset"]
    unit: Unit
    meaning: str
    field: str | None = None
    window: str = _MOMENT

    @property
    def divisor(self) -> int:
        """What one unit of the tag is in bytes, or 1."""
        return _IN_UNITS[self.unit]

    def described(self) -> str:
        """Meaning, unit, source and window, for the page of a logger."""
        return f"{self.meaning[0].upper()}{self.meaning[1:]}; {_UNIT_WORDS[self.unit]}, from {_FROM[self.source]}, {self.window}."


SINCE_START = "over the time since the process began"
FIGURES = (
    Figure(
        tag="memory/in_use_gib",
        source="allocator",
        unit="GiB",
        field="in_use_bytes",
        meaning="held by the allocator",
    ),
    Figure(
        tag="memory/reserved_gib",
        source="allocator",
        unit="GiB",
        field="reserved_bytes",
        meaning="for temporaries (TPU)",
    ),
    Figure(
        tag="memory/peak_since_start_gib",
        source="allocator",
        unit="GiB",
        field="peak_bytes_since_start",
        meaning="largest in use since the process began, not one step's peak",
        window=SINCE_START,
    ),
    Figure(
        tag="memory/limit_gib",
        source="allocator",
        unit="GiB",
        field="limit_bytes",
        meaning="what the allocator may use",
    ),
    Figure(
        tag="memory/pool_gib",
        source="allocator",
        unit="GiB",
        field="pool_bytes",
        meaning="taken from the driver so far",
    ),
    Figure(
        tag="memory/largest_free_gib",
        source="allocator",
        unit="GiB",
        field="largest_free_bytes",
        meaning="largest block that could be given out",
    ),
    Figure(
        tag="memory/live_arrays_gib",
        source="live_arrays",
        unit="GiB",
        field="live_array_bytes",
        meaning="arrays that Python holds; no temporaries",
    ),
    Figure(
        tag="memory/live_arrays_count",
        source="live_arrays",
        unit="arrays",
        field="live_array_count",
        meaning="number of those arrays",
    ),
    Figure(
        tag="memory/host_gib",
        source="host",
        unit="GiB",
        field="resident_bytes",
        meaning="resident memory of the process",
    ),
    Figure(
        tag="memory/device_used_gib",
        source="driver",
        unit="GiB",
        field="device_used_bytes",
        meaning="taken on the whole device, by this process and all others",
    ),
)
HEADROOM = Figure(
    tag="memory/headroom_gib",
    source="allocator",
    unit="GiB",
    meaning="limit less in use and reserved",
)
FRAGMENTATION = Figure(
    tag="memory/fragmentation_share",
    source="allocator",
    unit="share",
    meaning="share of the pool's free memory outside the largest free block",
)
UNATTRIBUTED = Figure(
    tag="memory/unattributed_gib",
    source="live_arrays",
    unit="GiB",
    meaning="in use, less live arrays, less the temporaries of the largest known program",
)
OUTSIDE_POOL = Figure(
    tag="memory/outside_pool_gib",
    source="driver",
    unit="GiB",
    meaning="taken on the device outside JAX's pool: CUDA context, NCCL, cuDNN, other processes",
)
DERIVED = (HEADROOM, FRAGMENTATION, UNATTRIBUTED, OUTSIDE_POOL)

PROGRAM, PLANNED, ERROR = "memory/program_gib/", "memory/planned_gib/", "memory/prediction_error_share/"
PROCESSES = "memory/processes/"
BUDGET, PRESET_LIMIT = "memory/plan_budget_gib", "memory/preset_limit_gib"
_ONE_STEP = "for one step on one device, from its compile on"
# Figures of programs and plans: a tag that ends with a slash is followed by a program's name.
NAMED = (
    Figure(
        tag=PROGRAM, source="compiler", unit="GiB", meaning="what the program needs, by its compiler", window=_ONE_STEP
    ),
    Figure(
        tag=PLANNED, source="plan", unit="GiB", meaning="what the plan foretold that the step needs", window=_ONE_STEP
    ),
    Figure(
        tag=ERROR, source="plan", unit="share", meaning="compiled bytes over foretold bytes, less 1", window=_ONE_STEP
    ),
    Figure(
        tag=BUDGET, source="plan", unit="GiB", meaning="the budget that was planned for", window="for the whole run"
    ),
    Figure(
        tag=PRESET_LIMIT,
        source="preset",
        unit="GiB",
        meaning="the limit that events are judged by",
        window="for the whole run",
    ),
)


def values_of(reading: Reading, allocator: Reading | None = None, *, temp_bytes: int = 0) -> dict[str, float]:
    """Tag -> value for every figure the reading has; what is unknown is absent.

    Args:
        reading: Of any probe.
        allocator: The latest reading of the same device's allocator, where there is one.
        temp_bytes: Temporaries of the largest program that is known.
    """
    values: dict[str, float] = {}
    for figure in FIGURES:
        count = getattr(reading, figure.field) if figure.field and figure.source == reading.source else None
        if count is not None:
            values[figure.tag] = count / figure.divisor
    derived = {
        HEADROOM: headroom_bytes(reading),
        UNATTRIBUTED: unattributed_bytes(reading, allocator, temp_bytes),
        OUTSIDE_POOL: outside_pool_bytes(reading, allocator),
    }
    values |= {figure.tag: count / GIB for figure, count in derived.items() if count is not None}
    found = fragmentation_of(reading) if reading.source == "allocator" else None
    if isinstance(found, Fragmentation):
        values[FRAGMENTATION.tag] = found.share
    return values


def headroom_bytes(reading: Reading) -> int | None:
    """What the allocator may still give out."""
    if reading.source != "allocator" or reading.limit_bytes is None or reading.in_use_bytes is None:
        return None
    return reading.limit_bytes - reading.in_use_bytes - (reading.reserved_bytes or 0)


def unattributed_bytes(live: Reading, allocator: Reading | None, temp_bytes: int) -> int | None:
    """What neither live arrays nor a known program explain; the allocator's rounding is in it.

    A TPU's temporaries are reserved beside ``in_use_bytes``, so nothing of them is taken off there.
    """
    if live.source != "live_arrays" or live.live_array_bytes is None or allocator is None:
        return None
    if allocator.in_use_bytes is None:
        return None
    programs = temp_bytes if allocator.reserved_bytes is None else 0
    return max(allocator.in_use_bytes - live.live_array_bytes - programs, 0)


def outside_pool_bytes(driver: Reading, allocator: Reading | None) -> int | None:
    """What is taken on the device and is not JAX's pool."""
    if (
        driver.source != "driver"
        or driver.device_used_bytes is None
        or allocator is None
        or allocator.pool_bytes is None
    ):
        return None
    return max(driver.device_used_bytes - allocator.pool_bytes, 0)


def over_processes(figure: Figure) -> Figure:
    """The same figure over all processes of a run."""
    return replace(
        figure,
        tag=PROCESSES + figure.tag.removeprefix("memory/"),
        meaning=f"{figure.meaning}; over all processes",
        window="in the time between two exchanges",
    )


def figure_of(tag: str) -> Figure | None:
    """The figure under a scalar's tag, ``/min`` and ``/max`` included; None for what is not this library's."""
    plain = tag.removesuffix("/min").removesuffix("/max")
    if plain.startswith(PROCESSES):
        known = [over_processes(figure) for figure in (*FIGURES, *DERIVED)]
        return next((figure for figure in known if figure.tag == plain), None)
    for figure in (*FIGURES, *DERIVED, *NAMED):
        if plain == figure.tag or (figure.tag.endswith("/") and tag.startswith(figure.tag)):
            return figure
    return None
