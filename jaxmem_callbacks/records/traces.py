"""Traces of allocations, and simulations of an allocator on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxmem_callbacks.records.errors import SimulationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Alloc:
    """Memory that an array takes beside any program, such as a batch's.

    Attributes:
        id: Names it from here to its `Free`; never used again.
        bytes: What was asked for, before any rounding.
        step: The step in which it was seen first.
        name: Dtype and shape, such as ``float32[8,128]``, or a word.
        site: Line of the user's code that made it; empty where it was not asked for.
    """

    id: int
    bytes: int
    step: int
    name: str = ""
    site: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Memory that is given back.

    Attributes:
        id: Of an `Alloc` or of a program's output.
        step: The step in which it was missed first.
    """

    id: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """One result of a program.

    Attributes:
        id: As an `Alloc`'s.
        bytes: As an `Alloc`'s.
        reuses: The donated array whose memory it takes over, which ends there without a `Free`; None for memory of its own.
        name: As an `Alloc`'s.
    """

    id: int
    bytes: int
    reuses: int | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStart:
    """A program is dispatched: results get their memory in this order, then the temporaries, in one piece.

    Attributes:
        run: Names this run of the program up to its `ProgramEnd`.
        program: Its name.
        step: The step it belongs to.
        temp_bytes: Its temporaries by its compiler, or None with the reason in ``unknown``.
        outputs: Its results.
        unknown: Why ``temp_bytes`` is None.
    """

    run: int
    program: str
    step: int
    temp_bytes: int | None
    outputs: tuple[ProgramOutput, ...] = ()
    unknown: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramEnd:
    """The temporaries of a run are given back; its results stay.

    Attributes:
        run: Of its `ProgramStart`.
        step: The step it belongs to.
    """

    run: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMark:
    """A step is over.

    Attributes:
        step: Its number.
        live_bytes: Bytes of live arrays that were counted at that moment; None where nobody counted. What the events before it
            add up to must be the same.
    """

    step: int
    live_bytes: int | None = None


TraceEvent = Alloc | Free | ProgramStart | ProgramEnd | StepMark


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHead:
    """What a trace is of.

    Attributes:
        name: A word for tables and figures.
        source: ``recorded`` by a monitor, or ``modelled``.
        device: Label of the device, such as ``gpu:0``; empty for a modelled one.
        device_bytes: Memory of the device it is about, or None.
        tells: What it shows, or where it comes from, one sentence each.
        blind: What it cannot show, one sentence each.
        versions: Package and version, where it was recorded.
    """

    name: str
    source: str = "recorded"
    device: str = ""
    device_bytes: int | None = None
    tells: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A whole trace.

    Attributes:
        head: What it is of.
        events: In order.
    """

    head: TraceHead
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePart:
    """Events on their way to a run's trace file, which holds the head already.

    Attributes:
        events: In order, after those of the parts before.
    """

    events: tuple[TraceEvent, ...]


Allocators = Literal["bfc", "platform", "cuda_async"]
DEFAULT_FRACTION = 0.75  # of a GPU's memory, where JAX is given nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """An allocator, and how much it may have.

    Attributes:
        device_bytes: Memory of the device.
        allocator: ``bfc`` is XLA's own pool and JAX's default; ``platform`` and ``cuda_async`` are modelled.
        preallocate: Whether the pool is taken whole at the first allocation, or grows.
        fraction: The share of the device that a ``bfc`` pool may have, and that a ``cuda_async`` pool keeps.
        partitioned: Whether a preallocated pool serves small requests from its holes before its open end, as it does from
            jaxlib 0.11 on.
        outside_bytes: What others hold of the device: CUDA's context, libraries, other processes.
        defragment: ``when_needed`` moves all arrays together before what does not fit; ``never`` does not.
        defragment_steps: Steps after which they are moved in any case.

    Raises:
        SimulationError: numbers that no device has.
    """

    device_bytes: int
    allocator: Allocators = "bfc"
    preallocate: bool = True
    fraction: float = DEFAULT_FRACTION
    partitioned: bool = True
    outside_bytes: int = 0
    defragment: Literal["never", "when_needed"] = "never"
    defragment_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r} (expected {expected})"
            for name, value, expected, right in (
                ("device_bytes", self.device_bytes, "more than 0 bytes", self.device_bytes > 0),
                ("fraction", self.fraction, "a share above 0, at most 1", 0 < self.fraction <= 1),
                (
                    "outside_bytes",
                    self.outside_bytes,
                    "at least 0 and less than the device has",
                    0 <= self.outside_bytes < self.device_bytes,
                ),
                ("allocator", self.allocator, "bfc, platform or cuda_async", self.allocator in _ALLOCATORS),
            )
            if not right
        ]
        if wrong:
            msg = f"AllocatorSettings: {'; '.join(wrong)}. For example AllocatorSettings(device_bytes=80 * 2**30)."
            raise SimulationError(msg)


_ALLOCATORS = ("bfc", "platform", "cuda_async")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """The memory at the end of one step of a trace.

    Attributes:
        step: The step.
        live_bytes: Bytes of live arrays as they were asked for.
        in_use_bytes: What the allocator has given out, roundings included.
        peak_in_use_bytes: The most of it within the step.
        largest_free_bytes: The largest free block of the pool, as jaxlib reports it; None without a pool.
        least_block_bytes: The largest block that could be had when it was smallest within the step: a free one, or what the
            pool may still grow by.
        pool_bytes: What the allocator has taken of the device; None without a pool.
        fragmentation: Share of the pool's free bytes outside its largest free block; None where the pool is full or absent.
    """

    step: int
    live_bytes: int
    in_use_bytes: int
    peak_in_use_bytes: int
    largest_free_bytes: int | None
    least_block_bytes: int
    pool_bytes: int | None
    fragmentation: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationFailure:
    """The first request that could not be met.

    Attributes:
        step: Its step.
        event: Its place among the trace's events, from 0.
        what: What asked: a program and which of its memory, or an array.
        asked_bytes: For how much.
        free_bytes: What was free in all, the pool's growth included.
        largest_block_bytes: The largest block that could be had.
        why: ``capacity`` where all free memory in one piece would have been too little, else ``fragmentation``.
    """

    step: int
    event: int
    what: str
    asked_bytes: int
    free_bytes: int
    largest_block_bytes: int
    why: Literal["capacity", "fragmentation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A trace under one allocator, up to its end or to the first failure.

    Attributes:
        settings: The allocator.
        points: One for each step that was marked, and one for the last moment.
        failure: What could not be met, or None: the run survived.
        allocations: How many there were.
        peak_in_use_bytes: The most that was given out.
        defragmented: Steps at which arrays were moved together.
        unknown_temporaries: Programs whose temporaries nobody knows and that are left out.
    """

    settings: AllocatorSettings
    points: tuple[TimelinePoint, ...]
    failure: AllocationFailure | None
    allocations: int
    peak_in_use_bytes: int
    defragmented: tuple[int, ...] = ()
    unknown_temporaries: tuple[str, ...] = ()

    @property
    def survived(self) -> bool:
        """Whether every request was met."""
        return self.failure is None

    @property
    def least_block_bytes(self) -> int:
        """The largest block that could be had, when it was smallest."""
        return min((point.least_block_bytes for point in self.points), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One way to take the device's memory, and what came of a trace under it.

    Attributes:
        name: What it is called in tables: a preset's name, or JAX's default.
        line: What to type for it.
        timeline: What came of it.
        modelled: Whether its allocator is modelled without its source.
    """

    name: str
    line: str
    timeline: Timeline
    modelled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A trace under every way to take the device's memory.

    Attributes:
        head: What the trace is of.
        device_bytes: Memory of the device.
        rows: The ways, the least change to a run first.
    """

    head: TraceHead
    device_bytes: int
    rows: tuple[Simulated, ...]

    @property
    def advised(self) -> Simulated | None:
        """The first way that survives; None where none does."""
        return next((row for row in self.rows if row.timeline.survived), None)
