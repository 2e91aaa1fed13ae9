"""Traces of allocations: what was asked of one device's memory and given back, in order. Bytes are ints, as they were asked for.

A trace says nothing of addresses: it is replayed under any allocator, which gives its own.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        blind: What it cannot tell, one sentence each.
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
