"""Availability: which figures this platform reports, from where, and why the others are unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.figures import (
    DERIVED,
    FIGURES,
    FRAGMENTATION,
    HEADROOM,
    OUTSIDE_POOL,
    PROCESSES,
    Figure,
    over_processes,
    values_of,
)
from jaxmem_callbacks.analysis.fragmentation import fragmentation_of
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.plan_check import plan_row
from jaxmem_callbacks.analysis.processes import NAMES
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import AcrossFigure, AcrossProcesses, Reading, Unavailable
from jaxmem_callbacks.records.units import format_bytes

COLUMNS = ("figure", "latest", "from", "meaning, or why it is unknown")
_NOT_IN_STATISTICS = "unknown, because the allocator's statistics do not have it here"
_NOT_READ = "unknown, because nothing was read yet"
HEAP_MAP = "memory/heap_map"
_NOT_COMPUTED = "nothing that it is computed from was read yet"
_MISSING_PARTS = {
    HEADROOM.tag: "the allocator reports no limit",
    OUTSIDE_POOL.tag: "the allocator reports no pool",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRow:
    """One row of the table; ``known`` is whether the figure has a value here."""

    figure: str
    known: bool
    latest: str
    source: str
    text: str


@final
class KnownHere:
    """Follows observations and tells what is known so far."""

    def __init__(self, limit_bytes: int | None = None, plan: PlanRecord | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._plan = plan
        self._latest: dict[tuple[str, str], Reading] = {}
        self._why: dict[str, str] = {}
        self._programs: dict[str, ProgramMemory] = {}
        self._unknown_programs: dict[str, str] = {}
        self._heaps: Sequence[HeapMap] = ()
        self._across: AcrossProcesses | None = None
        self._dropped = 0
        self._said: list[str] = []

    def learn(self, observation: Observation) -> None:
        """Take in one observation."""
        for reading in observation.readings:
            self._latest[reading.source, reading.device] = reading
        for unavailable in observation.unavailable:
            self._why[unavailable.figure] = unavailable.reason
        for compilation in (compiled.compilation for compiled in observation.compilations):
            known = self._programs.get(compilation.program)
            if compilation.memory is not None:
                larger = max(compilation.memory, known or compilation.memory, key=lambda memory: memory.step_bytes)
                self._programs[compilation.program] = larger
            elif compilation.program not in self._programs:
                self._unknown_programs[compilation.program] = compilation.unavailable or "unknown"
        self._heaps = observation.heaps or self._heaps
        self._across = observation.processes or self._across
        self._said += observation.said
        self._dropped = max(self._dropped, observation.dropped)

    @staticmethod
    def may_change_by(observation: Observation) -> bool:
        """Whether an observation brings anything of which the table tells."""
        seen = observation.readings or observation.unavailable or observation.compilations or observation.heaps
        return bool(seen or observation.processes or observation.said or observation.dropped)

    def shape(self) -> tuple[tuple[str, bool], ...]:
        """What is known, without values, and whether anything was lost: the table is worth writing again when this changes."""
        return (*((row.figure, row.known) for row in self.rows()), ("dropped", self._dropped > 0))

    def rows(self) -> tuple[KnownRow, ...]:
        """All figures, known or not, then programs, then what the monitor itself lost and said."""
        return (
            *map(self._figure, FIGURES),
            *map(self._derived, DERIVED),
            self._heap_map(),
            *self._of_processes(),
            *self._limit(),
            *self._needs(),
            *self._planned(),
            self._drops(),
            *(_row(f"said by the monitor, {n}", "", "monitor", said) for n, said in enumerate(self._said, start=1)),
        )

    def _figure(self, figure: Figure) -> KnownRow:
        seen = self._of(figure.source)
        values = {reading.device: getattr(reading, figure.field or "") for reading in seen}
        known = {device: value for device, value in values.items() if value is not None}
        if known:
            return _row(figure.tag, _spelled(known, figure), figure.source, figure.meaning)
        why = self._why.get(figure.source)
        if why and not seen:
            return _unknown(figure.tag, figure.source, f"unknown, because {why}")
        return _unknown(figure.tag, figure.source, _NOT_IN_STATISTICS if seen else _NOT_READ)

    def _derived(self, figure: Figure) -> KnownRow:
        known: dict[str, float] = {}
        for reading in self._of(figure.source):
            value = values_of(reading, self._latest.get(("allocator", reading.device)), temp_bytes=self.temp_bytes)
            if figure.tag in value:
                known[reading.device] = value[figure.tag] * figure.divisor
        if known:
            return _row(figure.tag, _spelled(known, figure), figure.source, figure.meaning)
        return _unknown(figure.tag, figure.source, f"unknown, because {self._why_not(figure)}")

    def _why_not(self, figure: Figure) -> str:
        """Why a figure that is computed from others has no value."""
        if figure == OUTSIDE_POOL and "driver" in self._why:
            return self._why["driver"]
        allocators = self._of("allocator")
        if not allocators:
            return self._why.get("allocator", "nothing was read yet")
        if figure == FRAGMENTATION:
            found = fragmentation_of(allocators[0])
            return found.reason if isinstance(found, Unavailable) else _NOT_COMPUTED
        return _MISSING_PARTS.get(figure.tag, _NOT_COMPUTED)

    def _of(self, source: str) -> list[Reading]:
        return [reading for (of, _), reading in self._latest.items() if of == source]

    @property
    def temp_bytes(self) -> int:
        """Temporaries of the largest program that is known."""
        # `monitor.sample` asks on the training thread, while the monitor's own may learn of another program.
        return max((program.temp_bytes for program in tuple(self._programs.values())), default=0)

    def _heap_map(self) -> KnownRow:
        held = {heap.device: sum(buffer.bytes for buffer in heap.buffers) for heap in self._heaps}
        if held:
            device = max(held, key=lambda name: held[name])
            return _row(
                HEAP_MAP,
                f"{format_bytes(held[device])} ({device})",
                "live_arrays",
                "addresses of arrays that are ready",
            )
        why = self._why.get("heap_map", "none was taken yet; the first comes after heap_map_s seconds, or at the end")
        return _unknown(HEAP_MAP, "live_arrays", f"unknown, because {why}")

    def _of_processes(self) -> list[KnownRow]:
        """Where a preset asks for them: each figure with the processes that have the ends, or why there is none."""
        if self._across is None:
            why = self._why.get("processes")
            return [_unknown(f"{PROCESSES}...", "processes", f"unknown, because {why}")] if why else []
        silent = ", ".join(map(str, self._across.silent))
        text = f"of {self._across.heard} of {self._across.processes} processes" + (
            f"; silent: {silent}" if silent else ""
        )
        return [
            _row(over_processes(NAMES[name]).tag, _across_spelled(each, NAMES[name]), "processes", text)
            for name, each in self._across.figures.items()
            if name in NAMES
        ]

    def _limit(self) -> list[KnownRow]:
        if self._limit_bytes is None:
            return []
        text = "judged against, a device, beside what the allocator reports"
        return [_row("limit_bytes of the preset", format_bytes(self._limit_bytes), "preset", text)]

    def _needs(self) -> list[KnownRow]:
        rows = [
            _row(f"need of {name}", format_bytes(program.step_bytes), "compiler", "bytes of one step on one device")
            for name, program in self._programs.items()
        ]
        unknown = {name: why for name, why in self._unknown_programs.items() if name not in self._programs}
        return rows + [_unknown(f"need of {name}", "compiler", why) for name, why in unknown.items()]

    def _planned(self) -> list[KnownRow]:
        if self._plan is None:
            return []
        program = self._programs.get(self._plan.step)
        peaks = [reading.peak_bytes_since_start or 0 for reading in self._of("allocator")]
        latest, text = plan_row(
            self._plan, None if program is None else program.step_bytes, max(peaks, default=0) or None
        )
        return [_row(f"plan of {self._plan.step}", latest, "plan", text)]

    def _drops(self) -> KnownRow:
        return _row("stamps dropped by the monitor", str(self._dropped), "monitor", "the ring was full that often")


def _spelled(values: Mapping[str, float], figure: Figure) -> str:
    """One value, or lowest, mean and highest with the devices that have the ends."""
    low, high = min(values, key=lambda name: values[name]), max(values, key=lambda name: values[name])
    if len(values) == 1 or values[low] == values[high]:
        where = low if len(values) == 1 else f"each of {len(values)} devices"
        return f"{_spell(values[low], figure)} ({where})"
    mean = sum(values.values()) / len(values)
    ends = f"min {_spell(values[low], figure)} ({low})", f"max {_spell(values[high], figure)} ({high})"
    return f"{ends[0]}, mean {_spell(mean, figure)}, {ends[1]}"


def _across_spelled(each: AcrossFigure, figure: Figure) -> str:
    low, mean, high = (_spell(value, figure) for value in (each.low, each.mean, each.high))
    where = f"process {each.high_process}" + (f", {each.high_device}" if each.high_device else "")
    return f"min {low} (process {each.low_process}), mean {mean}, max {high} ({where})"


def _spell(value: float, figure: Figure) -> str:
    if figure.unit == "GiB":
        return format_bytes(round(value))
    return f"{value:.1%}" if figure.unit == "share" else f"{value:,.0f}"


def _row(figure: str, latest: str, source: str, text: str) -> KnownRow:
    return KnownRow(figure=figure, known=True, latest=latest, source=source, text=text)


def _unknown(figure: str, source: str, text: str) -> KnownRow:
    return KnownRow(figure=figure, known=False, latest="unknown", source=source, text=text)
