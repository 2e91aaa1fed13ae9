"""Figures: what is shown of readings, under which TensorBoard tag, in which unit, from where; and their windows over time.

The one table of tags; docs/figures.md explains them to readers, and descriptions on the TensorBoard page come from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

from jaxmem_callbacks.analysis.timeseries import RateLimiter
from jaxmem_callbacks.records.runs import AcrossProcesses, Reading, Source, Unavailable
from jaxmem_callbacks.records.units import GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation:
    """How split the free memory of one device is.

    Attributes:
        share: 1 - largest free block / free bytes, in [0, 1].
        free_bytes: Free in the pool (GPU), or in the limit where there is no pool (TPU).
        largest_free_bytes: The largest block that could be given out.
    """

    share: float
    free_bytes: int
    largest_free_bytes: int


def fragmentation_of(reading: Reading) -> Fragmentation | Unavailable:
    """The fragmentation that one allocator reading shows.

    The denominator is the pool: on GPU the pool grows towards the limit, and what was never taken from the driver is not split.
    """
    if reading.in_use_bytes is None:
        return _no_fragmentation(reading, "the allocator does not report the bytes in use")
    whole = reading.pool_bytes if reading.pool_bytes is not None else reading.limit_bytes
    if whole is None:
        return _no_fragmentation(reading, "the allocator reports neither a pool nor a limit")
    if reading.largest_free_bytes is None:
        return _no_fragmentation(
            reading, "the runtime does not report the largest free block (GPU: jaxlib 0.11 or newer with BFC does)"
        )
    # The pool already holds everything; only without one is reserved memory taken from the same limit.
    reserved = (reading.reserved_bytes or 0) if reading.pool_bytes is None else 0
    free = whole - reading.in_use_bytes - reserved
    if free <= 0:
        return Fragmentation(share=0.0, free_bytes=0, largest_free_bytes=reading.largest_free_bytes)
    share = min(1.0, max(0.0, 1 - reading.largest_free_bytes / free))
    return Fragmentation(share=share, free_bytes=free, largest_free_bytes=reading.largest_free_bytes)


def _no_fragmentation(reading: Reading, reason: str) -> Unavailable:
    return Unavailable(figure="fragmentation", device=reading.device, reason=reason)


ByteUnit = Literal["GiB", "MiB"]
Unit = Literal["GiB", "MiB", "arrays", "share"]
_IN_UNITS: dict[Unit, int] = {"GiB": GIB, "MiB": MIB, "arrays": 1, "share": 1}
_FROM: dict[str, str] = {
    "allocator": "the allocator's statistics (Device.memory_stats)",
    "live_arrays": "jax.live_arrays()",
    "host": "the operating system",
    "driver": "NVIDIA's driver (NVML)",
    "compiler": "the compiler of the attached device",
    "plan": "the plan",
    "preset": "the preset",
}
_UNIT_WORDS: dict[Unit, str] = {"GiB": "in GiB", "MiB": "in MiB", "arrays": "a number", "share": "a share of 1"}
_MOMENT = "at the moment of reading"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        tag: TensorBoard tag; tags of bytes carry the unit. Inside the library it is GiB; what writers get may be in MiB.
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
        tag=PLANNED, source="plan", unit="GiB", meaning="what the plan predicted that the step needs", window=_ONE_STEP
    ),
    Figure(
        tag=ERROR, source="plan", unit="share", meaning="compiled bytes over planned bytes, less 1", window=_ONE_STEP
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


def in_unit(figure: Figure, unit: ByteUnit) -> Figure:
    """The same figure with its bytes in another unit; what is not in GiB stays."""
    if figure.unit != "GiB" or unit == "GiB":
        return figure
    return replace(figure, tag=figure.tag.replace("_gib", "_mib"), unit=unit)


_IN_GIB = (*FIGURES, *DERIVED, *map(over_processes, (*FIGURES, *DERIVED)), *NAMED)
_KNOWN = (*_IN_GIB, *(in_unit(figure, "MiB") for figure in _IN_GIB if figure.unit == "GiB"))


RANGE = "window/"  # the group of the lowest and the highest of each window


def range_tags(tag: str) -> tuple[str, str]:
    """The tags of the lowest and the highest of each window: in a group of their own, which TensorBoard shows after the figures.

    ``memory/in_use_gib`` has ``window/memory/in_use_gib/min`` and ``window/memory/in_use_gib/max``.
    """
    return f"{RANGE}{tag}/min", f"{RANGE}{tag}/max"


def end_of(tag: str) -> str:
    """``min`` or ``max``, where a tag is one of `range_tags`; else empty."""
    return tag.rpartition("/")[2] if tag.startswith(RANGE) else ""


def figure_of(tag: str) -> Figure | None:
    """The figure under a scalar's tag in either unit, lowest and highest included; None for what is not this library's."""
    plain = tag.removeprefix(RANGE).removesuffix(f"/{end_of(tag)}")
    for figure in _KNOWN:
        if plain == figure.tag or (figure.tag.endswith("/") and plain.startswith(figure.tag)):
            return figure
    return None


_ROOMY = 4 * GIB  # the smallest memory whose parts read well in GiB


def byte_unit(platform: str, limit_bytes: int | None) -> ByteUnit:
    """The unit of a whole run's tags.

    GPUs and TPUs have GiB whatever is run on them, so that runs of one project share their charts. On the CPU, where small
    models are tried, GiB would read 0.0003.

    Args:
        platform: Of JAX's devices, or of a plan's target.
        limit_bytes: What a device may hold, where that is known.
    """
    return "MiB" if platform == "cpu" and (limit_bytes or 0) < _ROOMY else "GiB"


def tag_in(tag: str, unit: ByteUnit) -> str:
    """The tag under which writers get what the library keeps under a tag in GiB."""
    figure = figure_of(tag)
    return tag if figure is None or in_unit(figure, unit) == figure else tag.replace("_gib", "_mib", 1)


_BYTES = {"GiB": "bytes", "MiB": "bytes", "arrays": "count", "share": "share"}


def across_name(figure: Figure) -> str:
    """A figure's name in records: ``memory/in_use_gib`` is ``in_use_bytes``."""
    plain = figure.tag.removeprefix("memory/").rpartition("_")[0]
    return f"{plain}_{_BYTES[figure.unit]}"


NAMES: Mapping[str, Figure] = {across_name(figure): figure for figure in (*FIGURES, *DERIVED)}
# Field of a reading -> the figure's name in records.
FIELDS: Mapping[str, str] = {figure.field: name for name, figure in NAMES.items() if figure.field is not None}


def across_scalars(across: AcrossProcesses) -> dict[str, float]:
    """Tags of the mean, and of the lowest and the highest."""
    flat: dict[str, float] = {}
    for name, each in across.figures.items():
        if (figure := NAMES.get(name)) is not None:  # another version of this library may know more
            tag = over_processes(figure).tag
            ends = zip((tag, *range_tags(tag)), (each.mean, each.low, each.high), strict=True)
            flat |= {place: value / figure.divisor for place, value in ends}
    return flat


_FINEST = 2000  # no window is shorter than this part of the run so far: more points than a page shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """What one tag did in one window, over all readings and devices: lowest, mean, highest, how many.

    ``high_at`` is the device that had the highest value, where several devices were read; else empty.
    """

    low: float
    mean: float
    high: float
    count: int
    high_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One time window of a run.

    Attributes:
        step: The last step in it.
        time_s: When it closed, in seconds since the epoch.
        spreads: Tag -> what it did; tags without a value in this window are absent.
        ranged: Tags that had different values in some window so far: only these have a range worth showing.
    """

    step: int
    time_s: float
    spreads: Mapping[str, Spread]
    ranged: frozenset[str] = frozenset()

    def scalars(self) -> dict[str, float]:
        """Flat tags: the mean under the tag itself, and under `range_tags` the lowest and the highest for tags that range."""
        flat: dict[str, float] = {}
        for tag, spread in self.spreads.items():
            flat[tag] = spread.mean
            if tag in self.ranged:
                flat |= zip(range_tags(tag), (spread.low, spread.high), strict=True)
        return flat


def window_in(window: Window, unit: ByteUnit) -> Window:
    """The window with its tags and values in a run's unit."""
    if unit == "GiB":
        return window
    shown = {tag: tag_in(tag, unit) for tag in (*window.spreads, *window.ranged)}
    scale = GIB // MIB
    spreads = {
        shown[tag]: spread
        if shown[tag] == tag
        else replace(spread, low=spread.low * scale, mean=spread.mean * scale, high=spread.high * scale)
        for tag, spread in window.spreads.items()
    }
    return replace(window, spreads=spreads, ranged=frozenset(shown[tag] for tag in window.ranged))


class _Sum:
    """What is known of one tag in the open window."""

    def __init__(self, value: float, device: str) -> None:
        self.low = self.high = value
        self.total, self.count = 0.0, 0
        self.device = self.high_at = device
        self.several = False

    def add(self, value: float, device: str) -> None:
        self.several = self.several or device != self.device
        if value > self.high:
            self.high, self.high_at = value, device
        self.low = min(self.low, value)
        self.total += value
        self.count += 1

    def spread(self) -> Spread:
        where = self.high_at if self.several else ""
        return Spread(low=self.low, mean=self.total / self.count, high=self.high, count=self.count, high_at=where)


@final
class Windows:
    """Collects values and closes windows.

    Args:
        span_s: Seconds of one window, until a two-thousandth of the run is longer.
    """

    def __init__(self, span_s: float) -> None:
        self._sums: dict[str, _Sum] = {}
        self._constants: dict[str, float] = {}
        self._ranged: set[str] = set()
        self._span = RateLimiter(span_s, _FINEST)
        self._closed_step: int | None = None

    def add(self, values: Mapping[str, float], device: str = "") -> None:
        """Count the values, of one device where it is named, into the open window."""
        for tag, value in values.items():
            self._sums.setdefault(tag, _Sum(value, device)).add(value, device)

    def keep(self, values: Mapping[str, float]) -> None:
        """Show these in every window from now on, such as limits: they have no spread."""
        self._constants.update(values)

    def close(self, step: int, time_s: float, *, force: bool = False) -> Window | None:
        """The window, if it is over (or ``force``) and has values; the first one is over at once."""
        if not self._sums or not (force or (self._span.is_over(time_s) and step != self._closed_step)):
            return None
        spreads = {tag: each.spread() for tag, each in self._sums.items()}
        self._ranged.update(tag for tag, each in spreads.items() if not math.isclose(each.low, each.high))
        spreads |= {tag: Spread(low=value, mean=value, high=value, count=1) for tag, value in self._constants.items()}
        self._span.begin(time_s)
        self._sums, self._closed_step = {}, step
        return Window(step=step, time_s=time_s, spreads=spreads, ranged=frozenset(self._ranged))


_KEPT_WINDOWS = 2000  # more points than a figure has pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The highest values of one stretch of a run.

    Attributes:
        step: Its last step.
        time_s: When it ended, in seconds since the epoch.
        highs: Tag -> highest value.
        places: Tag -> the device that had it, where several were read.
    """

    step: int
    time_s: float
    highs: Mapping[str, float]
    places: Mapping[str, str] = field(default_factory=dict)


@final
class History:
    """Keeps the highs of all windows; when full, neighbours are joined and keep the higher value, so no peak is lost."""

    def __init__(self, kept: int = _KEPT_WINDOWS) -> None:
        self._kept = kept
        self._points: list[Point] = []

    def add(self, window: Window) -> None:
        """Append one window."""
        highs = {tag: spread.high for tag, spread in window.spreads.items()}
        places = {tag: spread.high_at for tag, spread in window.spreads.items() if spread.high_at}
        self._points.append(Point(step=window.step, time_s=window.time_s, highs=highs, places=places))
        if len(self._points) > self._kept:
            pairs = [self._points[at : at + 2] for at in range(0, len(self._points), 2)]
            self._points = [_joined(pair) for pair in pairs]

    @property
    def points(self) -> Sequence[Point]:
        """Oldest first."""
        return tuple(self._points)


def _joined(pair: Sequence[Point]) -> Point:
    highs: dict[str, float] = {}
    places: dict[str, str] = {}
    for point in pair:
        for tag, value in point.highs.items():
            if tag not in highs or value > highs[tag]:
                highs[tag] = value
                places[tag] = point.places.get(tag, "")
    return Point(step=pair[-1].step, time_s=pair[-1].time_s, highs=highs, places=places)
