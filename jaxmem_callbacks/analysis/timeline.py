"""A run over time, in bounded memory: curves of every figure and device, live arrays by line, type and kind, and heap maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from jaxmem_callbacks.analysis.figures import FIELDS
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap, with_changes
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import AcrossProcesses, Reading

CURVES = (
    "in_use_bytes",
    "reserved_bytes",
    "peak_bytes_since_start",
    "limit_bytes",
    "pool_bytes",
    "largest_free_bytes",
    "live_array_bytes",
    "resident_bytes",
    "device_used_bytes",
)
ALL_PROCESSES, _PROCESS = "all processes", "process "
_STRETCHES = 1000  # of one curve: more than a page has pixels
_CENSUSES = 300
_HEAPS = 10
_COMPILES = 500
OTHER_ARRAYS = "other arrays"  # than a step's arguments


class Stretch(NamedTuple):
    """Values of one stretch of a run; step and time are those of the highest.

    Attributes:
        step: Or -1 before the first.
        time_s: Seconds since the epoch.
        low: The lowest value.
        high: The highest.
    """

    step: int
    time_s: float
    low: float
    high: float


def thinned(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most so many stretches: neighbours are joined and keep the lowest and the highest value, so no peak is lost."""
    size = -(-len(stretches) // max(most, 1))
    return [_joined(stretches[at : at + size]) for at in range(0, len(stretches), max(size, 1))]


def _joined(several: Sequence[Stretch]) -> Stretch:
    highest = max(several, key=lambda each: each.high)
    return highest._replace(low=min(each.low for each in several))


@final
@dataclass(kw_only=True, slots=True)
class Curve:
    """One figure of one device.

    Attributes:
        figure: One of `CURVES`.
        device: Its label, or `ALL_PROCESSES`, or another process such as ``process 3``: the highest of its devices.
        stretches: Oldest first.
    """

    figure: str
    device: str
    stretches: list[Stretch] = field(default_factory=list[Stretch])

    def add(self, stretch: Stretch) -> None:
        """Append one; when there are too many, pairs of them are joined."""
        self.stretches.append(stretch)
        if len(self.stretches) > 2 * _STRETCHES:
            self.stretches = thinned(self.stretches, _STRETCHES)


@dataclass(frozen=True, slots=True)
class Held:
    """Live arrays that are alike.

    Attributes:
        bytes: Of all of them, on one device.
        count: How many they are.
    """

    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraysAt:
    """The live arrays of the device that held most of them, at one moment.

    Attributes:
        step: Or -1 before the first.
        time_s: Seconds since the epoch.
        device: Its label.
        held: Line that made them and their type -> what they are together.
        rest_bytes: Of smaller groups.
    """

    step: int
    time_s: float
    device: str
    held: dict[tuple[str, str], Held]
    rest_bytes: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.rest_bytes + sum(held.bytes for held in self.held.values())


def divided(held: Held, kinds: Mapping[str, int]) -> dict[str, int]:
    """Bytes of like arrays by what they hold, where a step takes so many of each kind.

    A step's arguments are alive while it is trained, so what is there besides is something else. Where some of them are missing,
    as before they are made, it is not known which.
    """
    wanted = sum(kinds.values())
    if not wanted:
        return {OTHER_ARRAYS: held.bytes}
    if held.count < wanted:
        return {" or ".join(kinds): held.bytes}
    others = held.count - wanted
    parts = {**kinds, OTHER_ARRAYS: others} if others else kinds
    ends = [held.bytes * upto // held.count for upto in accumulate(parts.values(), initial=0)]
    return {kind: end - begin for kind, (begin, end) in zip(parts, pairwise(ends), strict=True)}


class CompiledAt(NamedTuple):
    """One compile of a registered program.

    Attributes:
        program: Its name.
        step: The training step, or None.
        time_s: Seconds since the epoch.
        bytes: What one step needs; None where that is unknown.
        changed: What differs from the compile before.
    """

    program: str
    step: int | None
    time_s: float
    bytes: int | None
    changed: tuple[str, ...]


def _order(device: str) -> tuple[int, int, str]:
    """``gpu:2`` before ``gpu:10``, and what is no device of this process after these."""
    number = re.search(r"\d+$", device)
    rank = 1 if device == ALL_PROCESSES else 2 if device.startswith(_PROCESS) else 0
    return rank, int(number[0]) if number else -1, device


@final
class Timeline:
    """Learns a run's records in their order."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}
        self._census: ArrayCensus | None = None
        self.arrays: list[ArraysAt] = []
        self.heaps: list[HeapMap] = []
        self.compiles: list[CompiledAt] = []
        self.kinds: dict[str, dict[str, int]] = {}

    @property
    def curves(self) -> Sequence[Curve]:
        """In the order of `CURVES`, then this process's devices, then all processes and each other one."""
        return sorted(self._curves.values(), key=lambda each: (CURVES.index(each.figure), *_order(each.device)))

    def learn(self, record: object) -> None:
        """Take in one record; what is no part of a timeline is passed over."""
        match record:
            case Reading():
                for figure in CURVES:
                    value = getattr(record, figure)
                    if value is not None:
                        self._curve(figure, record.device).add(Stretch(record.step, record.time_s, value, value))
            case AcrossProcesses():
                self._of_processes(record)
            case ArrayCensus():
                self._count(record)
            case HeapMap():
                self._keep(record)
            case Compilation():
                self._compiled(record)
            case _:
                pass

    def _of_processes(self, record: AcrossProcesses) -> None:
        """The range of all, and of each other process its highest: the devices of process 0 have curves of their own."""
        for figure in CURVES:
            across = record.figures.get(FIELDS[figure])
            if across is not None:
                self._curve(figure, ALL_PROCESSES).add(Stretch(record.step, record.time_s, across.low, across.high))
                for process, high in across.highs.items():
                    if process != "0":
                        self._curve(figure, f"{_PROCESS}{process}").add(Stretch(record.step, record.time_s, high, high))

    def _compiled(self, record: Compilation) -> None:
        size = record.memory and record.memory.step_bytes
        at = CompiledAt(record.program, record.step, record.time_s, size, record.changed)
        self.compiles = [*self.compiles, at][-_COMPILES:]
        for type_text, kinds in record.kinds.items():
            known = self.kinds.setdefault(type_text, {})
            known |= {kind: max(count, known.get(kind, 0)) for kind, count in kinds.items()}

    def _curve(self, figure: str, device: str) -> Curve:
        return self._curves.setdefault((figure, device), Curve(figure=figure, device=device))

    def _count(self, written: ArrayCensus) -> None:
        self._census = census = with_changes(self._census, written)
        held: dict[str, int] = {}
        for group in census.groups:
            for device in group.devices:
                held[device] = held.get(device, 0) + group.bytes
        fullest = max(held, key=lambda device: held[device], default="")
        by_line: dict[tuple[str, str], Held] = {}
        for group in census.groups:
            if fullest in group.devices:
                key = group.site, group.type_text
                known = by_line.get(key, Held(0, 0))
                by_line[key] = Held(known.bytes + group.bytes, known.count + group.count)
        now = ArraysAt(
            step=census.step, time_s=census.time_s, device=fullest, held=by_line, rest_bytes=census.left_out_bytes
        )
        self.arrays.append(now)
        if len(self.arrays) > 2 * _CENSUSES:
            pairs = [self.arrays[at : at + 2] for at in range(0, len(self.arrays), 2)]
            self.arrays = [max(pair, key=lambda each: each.bytes) for pair in pairs]

    def _keep(self, heap: HeapMap) -> None:
        """First, last, the fullest, and some between them as evenly over time as may be."""
        self.heaps.append(heap)
        if len(self.heaps) <= _HEAPS:
            return
        fullest = max(range(len(self.heaps)), key=lambda at: sum(each.bytes for each in self.heaps[at].buffers))
        between = [at for at in range(1, len(self.heaps) - 1) if at != fullest]
        closest = min(between, key=lambda at: self.heaps[at + 1].time_s - self.heaps[at - 1].time_s)
        del self.heaps[closest]
