"""A run so far, in bounded memory: which figures are available, what each checkpoint save held, and what a report shows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from jaxmem_callbacks.analysis.figures import (
    DERIVED,
    FIGURES,
    FRAGMENTATION,
    HEADROOM,
    NAMES,
    OUTSIDE_POOL,
    PROCESSES,
    ByteUnit,
    Figure,
    byte_unit,
    fragmentation_of,
    over_processes,
    tag_in,
    values_of,
)
from jaxmem_callbacks.analysis.observation import Compiled, Metrics, Observation
from jaxmem_callbacks.analysis.timeline import Timeline
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.peaks import Peak, StepSchedule
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import (
    AcrossFigure,
    AcrossProcesses,
    CheckpointSave,
    Dropped,
    MemoryEvent,
    Reading,
    RunEnd,
    RunStart,
    Said,
    SaveSpan,
    Unavailable,
)
from jaxmem_callbacks.records.units import format_bytes


def plan_row(plan: PlanRecord, compiled_bytes: int | None, measured_bytes: int | None) -> tuple[str, str]:
    """Predicted beside compiled and measured, for a table: the sizes, and by how much they differ.

    Args:
        plan: What was planned.
        compiled_bytes: By the compiler of the step that runs; None before, and where it reports none.
        measured_bytes: The highest peak of the devices' allocators so far; None where they report none.
    """
    predicted = plan.candidates[plan.chosen].step_bytes
    if compiled_bytes is None or predicted is None:
        return f"{format_bytes(predicted)} predicted", "the step was not compiled yet, or its bytes are unknown here"
    sizes = f"{format_bytes(predicted)} predicted, {format_bytes(compiled_bytes)} compiled"
    text = f"{compiled_bytes / predicted - 1:+.1%}"
    if measured_bytes is None:
        return sizes, text
    measured = f"{measured_bytes / predicted - 1:+.1%} measured: the allocator's peak since the process began, whatever made it"
    return f"{sizes}, {format_bytes(measured_bytes)} measured", f"{text} compiled, {measured}"


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
class AvailabilityRow:
    """One row of the table; ``known`` is whether the figure has a value here."""

    figure: str
    known: bool
    latest: str
    source: str
    text: str


@final
class MetricAvailability:
    """The figures that are known so far, learnt from observations, and why the others are not.

    ``unit`` is that of the run's tags.
    """

    def __init__(self, limit_bytes: int | None = None, plan: PlanRecord | None = None) -> None:
        self.unit: ByteUnit = "GiB"
        self._limit_bytes = limit_bytes
        self._plan = plan
        self._latest: dict[tuple[str, str], Reading] = {}
        self._why: dict[str, str] = {}
        self._programs: dict[str, ProgramMemory] = {}
        self._unknown_programs: dict[str, str] = {}
        self._heaps: Sequence[HeapMap] = ()
        self._across: AcrossProcesses | None = None
        self._dropped = 0
        self._messages: list[str] = []

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
        self._messages += observation.messages
        self._dropped = max(self._dropped, observation.dropped)

    @staticmethod
    def may_change_by(observation: Observation) -> bool:
        """Whether an observation brings anything that the table shows."""
        seen = observation.readings or observation.unavailable or observation.compilations or observation.heaps
        return bool(seen or observation.processes or observation.messages or observation.dropped)

    def shape(self) -> tuple[tuple[str, bool], ...]:
        """What is known, without values, and whether anything was lost: the table is worth writing again when this changes."""
        return (*((row.figure, row.known) for row in self.rows()), ("dropped", self._dropped > 0))

    def rows(self) -> tuple[AvailabilityRow, ...]:
        """All figures, known or not, then programs, then what the monitor itself lost and reported."""
        return (
            *map(self._figure, FIGURES),
            *map(self._derived, DERIVED),
            self._heap_map(),
            *self._of_processes(),
            *self._limit(),
            *self._needs(),
            *self._planned(),
            self._drops(),
            *(
                _row(f"message of the monitor, {n}", "", "monitor", text)
                for n, text in enumerate(self._messages, start=1)
            ),
        )

    def _figure(self, figure: Figure) -> AvailabilityRow:
        seen = self._of(figure.source)
        values = {reading.device: getattr(reading, figure.field or "") for reading in seen}
        known = {device: value for device, value in values.items() if value is not None}
        if known:
            return _row(tag_in(figure.tag, self.unit), _spelled(known, figure), figure.source, figure.meaning)
        why = self._why.get(figure.source)
        if why and not seen:
            return _unknown(tag_in(figure.tag, self.unit), figure.source, f"unknown, because {why}")
        return _unknown(tag_in(figure.tag, self.unit), figure.source, _NOT_IN_STATISTICS if seen else _NOT_READ)

    def _derived(self, figure: Figure) -> AvailabilityRow:
        known: dict[str, float] = {}
        for reading in self._of(figure.source):
            value = values_of(reading, self._latest.get(("allocator", reading.device)), temp_bytes=self.temp_bytes)
            if figure.tag in value:
                known[reading.device] = value[figure.tag] * figure.divisor
        if known:
            return _row(tag_in(figure.tag, self.unit), _spelled(known, figure), figure.source, figure.meaning)
        return _unknown(tag_in(figure.tag, self.unit), figure.source, f"unknown, because {self._why_not(figure)}")

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

    def _heap_map(self) -> AvailabilityRow:
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

    def _of_processes(self) -> list[AvailabilityRow]:
        """Where a preset asks for them: each figure with the processes that have the ends, or why there is none."""
        if self._across is None:
            why = self._why.get("processes")
            return [_unknown(f"{PROCESSES}...", "processes", f"unknown, because {why}")] if why else []
        silent = ", ".join(map(str, self._across.silent))
        text = f"of {self._across.heard} of {self._across.processes} processes" + (
            f"; silent: {silent}" if silent else ""
        )
        return [
            _row(
                tag_in(over_processes(NAMES[name]).tag, self.unit),
                _across_spelled(each, NAMES[name]),
                "processes",
                text,
            )
            for name, each in self._across.figures.items()
            if name in NAMES
        ]

    def _limit(self) -> list[AvailabilityRow]:
        if self._limit_bytes is None:
            return []
        text = "the lower of it and the allocator's limit is what a device is judged by"
        return [_row("limit_bytes of the preset", format_bytes(self._limit_bytes), "preset", text)]

    def _needs(self) -> list[AvailabilityRow]:
        rows = [
            _row(f"need of {name}", format_bytes(program.step_bytes), "compiler", "bytes of one step on one device")
            for name, program in self._programs.items()
        ]
        unknown = {name: why for name, why in self._unknown_programs.items() if name not in self._programs}
        return rows + [_unknown(f"need of {name}", "compiler", why) for name, why in unknown.items()]

    def _planned(self) -> list[AvailabilityRow]:
        if self._plan is None:
            return []
        program = self._programs.get(self._plan.step)
        peaks = [reading.peak_bytes_since_start or 0 for reading in self._of("allocator")]
        latest, text = plan_row(
            self._plan, None if program is None else program.step_bytes, max(peaks, default=0) or None
        )
        return [_row(f"plan of {self._plan.step}", latest, "plan", text)]

    def _drops(self) -> AvailabilityRow:
        return _row(
            "steps that the monitor missed",
            str(self._dropped),
            "monitor",
            "steps whose time was lost, because more of them ended than are kept between two looks",
        )


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


def _row(figure: str, latest: str, source: str, text: str) -> AvailabilityRow:
    return AvailabilityRow(figure=figure, known=True, latest=latest, source=source, text=text)


def _unknown(figure: str, source: str, text: str) -> AvailabilityRow:
    return AvailabilityRow(figure=figure, known=False, latest="unknown", source=source, text=text)


DURING = "during a checkpoint save"
_SAVE_FIGURES = ("in_use_bytes", "live_array_bytes", "resident_bytes")


@dataclass(kw_only=True, slots=True)
class _Held:
    """What is known of a save so far."""

    before: dict[str, int]
    highs: dict[str, int] = field(default_factory=dict[str, int])


@final
class Saves:
    """Follows the saves of a run."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], int] = {}  # figure and device -> its latest value outside of saves
        self._held: dict[float, _Held] = {}  # by the save's begin
        self._spans: Sequence[SaveSpan] = ()

    def learn(self, observation: Observation) -> list[CheckpointSave]:
        """Take in one observation; the saves that ended in it."""
        self._spans = observation.saves
        for reading in observation.readings:
            if not any(span.began_s <= reading.time_s for span in self._spans):
                self._levels.update({(name, reading.device): size for name, size in _sizes(reading)})
        for span in self._spans:
            held = self._held.setdefault(span.began_s, _Held(before=self._highest_levels()))
            for reading in observation.readings:
                if span.includes(reading.time_s):
                    held.highs.update({name: max(size, held.highs.get(name, 0)) for name, size in _sizes(reading)})
        ended = [self._ended(span, observation.step) for span in self._spans if span.ended_s is not None]
        self._held = {span.began_s: self._held[span.began_s] for span in self._spans if span.ended_s is None}
        return ended

    def labelled(self, event: MemoryEvent) -> MemoryEvent:
        """The event, with a word on the save that it fell into."""
        inside = event.kind == "near_oom" and any(span.includes(event.time_s) for span in self._spans)
        if not inside:
            return event
        return replace(event, message=f"{event.message} It was {DURING}.", figures={**event.figures, "when": DURING})

    def _ended(self, span: SaveSpan, step: int) -> CheckpointSave:
        held = self._held[span.began_s]
        return CheckpointSave(
            step=step,
            time_s=span.ended_s or span.began_s,
            first_step=span.first_step,
            began_s=span.began_s,
            background=span.background,
            before=held.before,
            highs=held.highs,
        )

    def _highest_levels(self) -> dict[str, int]:
        levels = {name: [size for (of, _), size in self._levels.items() if of == name] for name in _SAVE_FIGURES}
        return {name: max(sizes) for name, sizes in levels.items() if sizes}


def _sizes(reading: Reading) -> Iterator[tuple[str, int]]:
    for name in _SAVE_FIGURES:
        size = getattr(reading, name)
        if size is not None:
            yield name, size


_EACH = 3  # processes that are named one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteEvent:
    """An event, as the first of ``processes`` reported it; the others reported it in the same words."""

    event: MemoryEvent
    processes: tuple[int, ...]

    @property
    def where(self) -> str:
        """``process 3``, ``processes 1, 2`` or ``7 processes: 1 to 9``."""
        first, *rest = self.processes
        if not rest:
            return f"process {first}"
        if len(self.processes) <= _EACH:
            return f"processes {', '.join(map(str, self.processes))}"
        return f"{len(self.processes)} processes: {first} to {rest[-1]}"


@final
class RemoteEvents:
    """Gathers them. Processes of one program mostly meet the same at the same step, a thousand of them too."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], MemoryEvent] = {}
        self._processes: dict[tuple[str, str], set[int]] = {}

    def add(self, process: int, event: MemoryEvent) -> None:
        """Take in one event of one process."""
        key = event.kind, event.message
        self._events.setdefault(key, event)
        self._processes.setdefault(key, set()).add(process)

    @property
    def events(self) -> Sequence[RemoteEvent]:
        """Each event once, by its step."""
        found = [
            RemoteEvent(event=event, processes=tuple(sorted(self._processes[key])))
            for key, event in self._events.items()
        ]
        return sorted(found, key=lambda each: (each.event.step, each.processes))


_CHANGES = 20  # recompilations kept of one program
_MOST_SAVES = 1000  # checkpoint saves that are drawn, the latest


@dataclass(frozen=True, kw_only=True, slots=True)
class High:
    """The highest value of one figure in a run: how many bytes, on which device, after which step."""

    bytes: int
    device: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSummary:
    """What became known of one program.

    Attributes:
        compiles: How often it was compiled.
        memory: Its largest compile's need, or None with the reason in ``unavailable``.
        signature: What its largest compile was for.
        changed: What differed at its recompilations, the first ones.
        unavailable: Why ``memory`` is None.
        peak: What makes the peak of its largest compile, or None.
        schedule: Bytes over the step of its largest compile, or None.
    """

    compiles: int = 0
    memory: ProgramMemory | None = None
    signature: tuple[tuple[str, str], ...] = ()
    changed: tuple[str, ...] = ()
    unavailable: str | None = None
    peak: Peak | None = None
    schedule: StepSchedule | None = None

    def after(self, compiled: Compilation) -> ProgramSummary:
        """The same with one more compile; of several the one that needs most is kept, since all of them may run again."""
        changed = (*self.changed, *compiled.changed)[:_CHANGES]
        own, new = self.memory, compiled.memory
        if new is None or (own is not None and own.step_bytes >= new.step_bytes):
            reason = compiled.unavailable if own is None else None
            return replace(self, compiles=self.compiles + 1, changed=changed, unavailable=reason or self.unavailable)
        return ProgramSummary(
            compiles=self.compiles + 1,
            memory=new,
            signature=compiled.signature,
            changed=changed,
            peak=compiled.peak,
            schedule=compiled.schedule,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSummary:
    """One of the user's metrics over a run."""

    first: float
    last: float
    low: float
    high: float


@dataclass(kw_only=True, slots=True)
class _Span:
    """First and last of what every record has."""

    first_s: float | None = None
    last_s: float | None = None
    first_step: int | None = None
    last_step: int | None = None

    def include(self, step: int | None, time_s: float | None) -> None:
        if time_s is not None:
            self.first_s = time_s if self.first_s is None else min(self.first_s, time_s)
            self.last_s = time_s if self.last_s is None else max(self.last_s, time_s)
        if step is not None and step >= 0:
            self.first_step = step if self.first_step is None else min(self.first_step, step)
            self.last_step = step if self.last_step is None else max(self.last_step, step)


@final
@dataclass(kw_only=True)
class RunSummary:
    """One run, learnt from its records in their order.

    Attributes:
        run: Its id.
        start: Its first line, or None where that is missing.
        ended: Whether it was closed.
        span: First and last step and time.
        events: Oldest first.
        elsewhere: Events that other processes of the run reported.
        programs: Name -> what became known of it.
        metrics: Name -> the user's metric over the run.
        plan: What the step was expected to need, or None.
        highs: Figure such as ``in_use_bytes`` -> its highest value.
        limit_bytes: The lowest limit that a device or the preset had, or None.
        timeline: Curves, live arrays and heap maps over time.
        messages: What the monitor reported of itself.
        known: Which figures were known, and why others were not.
        saves: Checkpoint saves.
        heap: The last map of live arrays, of the device that held most, or None.
        remarks: What is worth knowing of its files, a sentence each.
    """

    run: str
    start: RunStart | None = None
    ended: bool = False
    span: _Span = field(default_factory=_Span)
    events: list[MemoryEvent] = field(default_factory=list[MemoryEvent])
    elsewhere: RemoteEvents = field(default_factory=RemoteEvents)
    programs: dict[str, ProgramSummary] = field(default_factory=dict[str, ProgramSummary])
    metrics: dict[str, MetricSummary] = field(default_factory=dict[str, MetricSummary])
    plan: PlanRecord | None = None
    highs: dict[str, High] = field(default_factory=dict[str, High])
    limit_bytes: int | None = None
    timeline: Timeline = field(default_factory=Timeline)
    messages: list[str] = field(default_factory=list[str])
    known: MetricAvailability = field(default_factory=MetricAvailability)
    saves: deque[CheckpointSave] = field(default_factory=lambda: deque[CheckpointSave](maxlen=_MOST_SAVES))
    heap: HeapMap | None = None
    remarks: list[str] = field(default_factory=list[str])
    _step: int = -1
    _time_s: float = 0.0

    def learn(self, record: object) -> None:
        """Take in one record."""
        step, time_s = getattr(record, "step", None), getattr(record, "time_s", None)
        self.span.include(step if isinstance(step, int) else None, time_s)
        self.timeline.learn(record)
        match record:
            case RunStart():
                self._begin(record)
            case RunEnd():
                self.ended = True
            case Reading():
                self._read(record)
            case Unavailable() | AcrossProcesses() | HeapMap() | Dropped() | Said():
                self._note(record)
            case Compilation():
                known = self.programs.get(record.program, ProgramSummary())
                self.programs[record.program] = known.after(record)
                compiled = Compiled(step=self._step, compilation=record)
                self.known.learn(Observation(step=self._step, time_s=record.time_s, compilations=(compiled,)))
            case Metrics():
                self._measure(record.values)
            case MemoryEvent():
                self.events.append(record)
            case CheckpointSave():
                self.saves.append(record)
            case PlanRecord():
                self.plan = record
            case _:
                pass

    @property
    def needs(self) -> Mapping[str, int]:
        """Program -> bytes of its largest compile, of those that reported any."""
        return {name: each.memory.step_bytes for name, each in self.programs.items() if each.memory is not None}

    @property
    def known_rows(self) -> tuple[AvailabilityRow, ...]:
        """What was known and why others were not."""
        platform = self.start.devices.get("platform") if self.start is not None else None
        self.known.unit = byte_unit(str(platform), self.limit_bytes)
        return self.known.rows()

    def _note(self, record: Unavailable | AcrossProcesses | HeapMap | Dropped | Said) -> None:
        """What only the table of what is known shows; and the last map."""
        self.heap = record if isinstance(record, HeapMap) else self.heap
        self.messages += [record.message] if isinstance(record, Said) else []
        seen = Observation(
            step=self._step,
            time_s=self._time_s,
            unavailable=(record,) if isinstance(record, Unavailable) else (),
            processes=record if isinstance(record, AcrossProcesses) else None,
            heaps=(record,) if isinstance(record, HeapMap) else (),
            messages=(record.message,) if isinstance(record, Said) else (),
            dropped=record.stamps if isinstance(record, Dropped) else 0,
        )
        self.known.learn(seen)

    def _begin(self, start: RunStart) -> None:
        if self.start is None:
            self.start = start
            limit = start.settings.get("limit_bytes")
            if isinstance(limit, int):
                self.limit_bytes = limit
                self.known = MetricAvailability(limit)
            if start.part > 1:
                self.remarks.append(f"Its file begins with part {start.part}: the parts before it are not here.")

    def _read(self, reading: Reading) -> None:
        # A look's readings come device by device, each with its own steps; after a restore steps begin again from lower ones.
        forward = reading.step > self._step or reading.time_s > self._time_s
        if reading.step != self._step and forward:
            self._step, self._time_s = reading.step, reading.time_s
        self.known.learn(Observation(step=reading.step, time_s=reading.time_s, readings=(reading,)))
        for name in ("in_use_bytes", "peak_bytes_since_start", "live_array_bytes", "resident_bytes"):
            size = getattr(reading, name)
            if size is not None and (name not in self.highs or size > self.highs[name].bytes):
                self.highs[name] = High(bytes=size, device=reading.device, step=reading.step)
        if reading.limit_bytes is not None:
            self.limit_bytes = min(reading.limit_bytes, self.limit_bytes or reading.limit_bytes)

    def _measure(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            known = self.metrics.get(name) or MetricSummary(first=value, last=value, low=value, high=value)
            low, high = _finite(min, known.low, value), _finite(max, known.high, value)
            self.metrics[name] = MetricSummary(first=known.first, last=value, low=low, high=high)


def _finite(pick: Callable[[float, float], float], known: float, value: float) -> float:
    """The lower or higher of two, of which NaN is neither: a first one would else stand for all that come."""
    if math.isnan(known) or math.isnan(value):
        return value if math.isnan(known) else known
    return pick(known, value)
