"""Known here: which figures this platform reports, from where, and why the others are unknown; one row a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.figures import FIGURES, FRAGMENTATION
from jaxmem_callbacks.analysis.fragmentation import fragmentation_of
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.plan_check import plan_row
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import Reading, Unavailable
from jaxmem_callbacks.records.units import format_bytes

COLUMNS = ("figure", "latest", "from", "meaning, or why it is unknown")
_NOT_IN_STATISTICS = "unknown, because the allocator's statistics do not have it here"
_NOT_READ = "unknown, because nothing was read yet"


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
        self._dropped = 0

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
        self._dropped = observation.dropped

    def shape(self) -> tuple[tuple[str, bool], ...]:
        """What is known, without values: the table is worth writing again when this changes."""
        return tuple((row.figure, row.known) for row in self.rows())

    def rows(self) -> tuple[KnownRow, ...]:
        """All figures, known or not, then programs, then what the monitor itself lost."""
        return (
            *self._figures(),
            self._fragmentation(),
            *self._limit(),
            *self._needs(),
            *self._planned(),
            self._drops(),
        )

    def _figures(self) -> list[KnownRow]:
        rows: list[KnownRow] = []
        for figure in FIGURES:
            seen = [reading for (source, _), reading in self._latest.items() if source == figure.source]
            values = {reading.device: getattr(reading, figure.field) for reading in seen}
            known = {device: value for device, value in values.items() if value is not None}
            if known:
                latest = _spelled(known, in_bytes=figure.unit > 1)
                rows.append(_row(figure.tag, latest, figure.source, figure.meaning))
            else:
                missing = _NOT_IN_STATISTICS if seen else _NOT_READ
                why = self._why.get(figure.source)
                rows.append(
                    _unknown(figure.tag, figure.source, f"unknown, because {why}" if why and not seen else missing)
                )
        return rows

    def _fragmentation(self) -> KnownRow:
        found = {
            reading.device: fragmentation_of(reading)
            for (source, _), reading in self._latest.items()
            if source == "allocator"
        }
        shares = {device: each.share for device, each in found.items() if not isinstance(each, Unavailable)}
        if shares:
            device = max(shares, key=lambda name: shares[name])
            text = "share of free memory outside the largest free block"
            return _row(FRAGMENTATION, f"{shares[device]:.1%} ({device})", "allocator", text)
        reasons = [each.reason for each in found.values() if isinstance(each, Unavailable)]
        reason = reasons[0] if reasons else self._why.get("allocator", "nothing was read yet")
        return _unknown(FRAGMENTATION, "allocator", f"unknown, because {reason}")

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
        latest, text = plan_row(self._plan, None if program is None else program.step_bytes)
        return [_row(f"plan of {self._plan.step}", latest, "plan", text)]

    def _drops(self) -> KnownRow:
        return _row("stamps dropped by the monitor", str(self._dropped), "monitor", "the ring was full that often")


def _spelled(values: dict[str, int], *, in_bytes: bool) -> str:
    """One value, or lowest to highest with the devices that have them."""
    low, high = min(values, key=lambda name: values[name]), max(values, key=lambda name: values[name])
    spell = format_bytes if in_bytes else str
    if len(values) == 1 or values[low] == values[high]:
        where = low if len(values) == 1 else f"each of {len(values)} devices"
        return f"{spell(values[low])} ({where})"
    return f"{spell(values[low])} ({low}) to {spell(values[high])} ({high})"


def _row(figure: str, latest: str, source: str, text: str) -> KnownRow:
    return KnownRow(figure=figure, known=True, latest=latest, source=source, text=text)


def _unknown(figure: str, source: str, text: str) -> KnownRow:
    return KnownRow(figure=figure, known=False, latest="unknown", source=source, text=text)
