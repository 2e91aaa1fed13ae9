"""Story: what a report shows of one run, gathered record by record in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from jaxmem_callbacks.analysis.availability import KnownHere, KnownRow
from jaxmem_callbacks.analysis.figures import values_of
from jaxmem_callbacks.analysis.observation import Compiled, Metrics, Observation
from jaxmem_callbacks.analysis.processes import Elsewhere
from jaxmem_callbacks.analysis.timeseries import History, Windows
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.readings import AcrossProcesses, CheckpointSave, Reading, Unavailable
from jaxmem_callbacks.records.runs import Dropped, MemoryEvent, RunEnd, RunStart, Said

_WINDOW_S = 1.0
_CHANGES = 20  # recompilations told of one program
_SAVES = 1000  # checkpoint saves that are drawn, the latest


@dataclass(frozen=True, kw_only=True, slots=True)
class High:
    """The highest value of one figure in a run: how many bytes, on which device, after which step."""

    bytes: int
    device: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStory:
    """What became known of one program.

    Attributes:
        compiles: How often it was compiled.
        memory: Its largest compile's need, or None with the reason in ``unavailable``.
        signature: What its largest compile was for.
        changed: What differed at its recompilations, the first ones.
        unavailable: Why ``memory`` is None.
    """

    compiles: int = 0
    memory: ProgramMemory | None = None
    signature: tuple[tuple[str, str], ...] = ()
    changed: tuple[str, ...] = ()
    unavailable: str | None = None

    def after(self, compiled: Compilation) -> ProgramStory:
        """The same with one more compile; of several the one that needs most is kept, since all of them may run again."""
        changed = (*self.changed, *compiled.changed)[:_CHANGES]
        own, new = self.memory, compiled.memory
        if new is None or (own is not None and own.step_bytes >= new.step_bytes):
            reason = compiled.unavailable if own is None else None
            return replace(self, compiles=self.compiles + 1, changed=changed, unavailable=reason or self.unavailable)
        return ProgramStory(
            compiles=self.compiles + 1, memory=new, signature=compiled.signature, changed=changed, unavailable=None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricStory:
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
class Story:
    """One run, learnt from its records in their order.

    Attributes:
        run: Its id.
        start: Its first line, or None where that is missing.
        ended: Whether it was closed.
        span: First and last step and time.
        events: Oldest first.
        elsewhere: Events that other processes of the run told.
        programs: Name -> what became known of it.
        metrics: Name -> the user's metric over the run.
        plan: What it was told to expect, or None.
        highs: Figure such as ``in_use_bytes`` -> its highest value.
        limit_bytes: The lowest limit that a device or the preset had, or None.
        history: The highest values by time, for the figure.
        said: What the monitor said of itself.
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
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    programs: dict[str, ProgramStory] = field(default_factory=dict[str, ProgramStory])
    metrics: dict[str, MetricStory] = field(default_factory=dict[str, MetricStory])
    plan: PlanRecord | None = None
    highs: dict[str, High] = field(default_factory=dict[str, High])
    limit_bytes: int | None = None
    history: History = field(default_factory=History)
    said: list[str] = field(default_factory=list[str])
    known: KnownHere = field(default_factory=KnownHere)
    saves: deque[CheckpointSave] = field(default_factory=lambda: deque[CheckpointSave](maxlen=_SAVES))
    heap: HeapMap | None = None
    remarks: list[str] = field(default_factory=list[str])
    _windows: Windows = field(default_factory=lambda: Windows(_WINDOW_S))
    _step: int = -1
    _time_s: float = 0.0

    def learn(self, record: object) -> None:
        """Take in one record."""
        step, time_s = getattr(record, "step", None), getattr(record, "time_s", None)
        self.span.include(step if isinstance(step, int) else None, time_s)
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
                known = self.programs.get(record.program, ProgramStory())
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

    def finish(self) -> None:
        """Close the last window; to be called once, after the last record."""
        self._close(force=True)

    @property
    def needs(self) -> Mapping[str, int]:
        """Program -> bytes of its largest compile, of those that told any."""
        return {name: each.memory.step_bytes for name, each in self.programs.items() if each.memory is not None}

    @property
    def known_rows(self) -> tuple[KnownRow, ...]:
        """What was known and why others were not."""
        return self.known.rows()

    def _note(self, record: Unavailable | AcrossProcesses | HeapMap | Dropped | Said) -> None:
        """What only the table of what is known shows; and the last map."""
        self.heap = record if isinstance(record, HeapMap) else self.heap
        self.said += [record.message] if isinstance(record, Said) else []
        seen = Observation(
            step=self._step,
            time_s=self._time_s,
            unavailable=(record,) if isinstance(record, Unavailable) else (),
            processes=record if isinstance(record, AcrossProcesses) else None,
            heaps=(record,) if isinstance(record, HeapMap) else (),
            said=(record.message,) if isinstance(record, Said) else (),
            dropped=record.stamps if isinstance(record, Dropped) else 0,
        )
        self.known.learn(seen)

    def _begin(self, start: RunStart) -> None:
        if self.start is None:
            self.start = start
            window_s, limit = start.settings.get("window_s"), start.settings.get("limit_bytes")
            if isinstance(window_s, int | float) and window_s > 0:
                self._windows = Windows(window_s)
            if isinstance(limit, int):
                self.limit_bytes = limit
                self.known = KnownHere(limit)
            if start.part > 1:
                self.remarks.append(f"Its file begins with part {start.part}: the parts before it are not here.")

    def _read(self, reading: Reading) -> None:
        # A look's readings come device by device, each with its own steps; after a restore steps begin again from lower ones.
        forward = reading.step > self._step or reading.time_s > self._time_s
        if reading.step != self._step and forward:
            self._close()
            self._step, self._time_s = reading.step, reading.time_s
        self._windows.add(values_of(reading))
        self.known.learn(Observation(step=reading.step, time_s=reading.time_s, readings=(reading,)))
        for name in ("in_use_bytes", "peak_bytes_since_start", "live_array_bytes", "resident_bytes"):
            size = getattr(reading, name)
            if size is not None and (name not in self.highs or size > self.highs[name].bytes):
                self.highs[name] = High(bytes=size, device=reading.device, step=reading.step)
        if reading.limit_bytes is not None:
            self.limit_bytes = min(reading.limit_bytes, self.limit_bytes or reading.limit_bytes)

    def _measure(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            known = self.metrics.get(name) or MetricStory(first=value, last=value, low=value, high=value)
            low, high = _finite(min, known.low, value), _finite(max, known.high, value)
            self.metrics[name] = MetricStory(first=known.first, last=value, low=low, high=high)

    def _close(self, *, force: bool = False) -> None:
        window = self._windows.close(self._step, self._time_s, force=force)
        if window is not None:
            self.history.add(window)


def _finite(pick: Callable[[float, float], float], known: float, value: float) -> float:
    """The lower or higher of two, of which NaN is neither: a first one would else stand for all that come."""
    if math.isnan(known) or math.isnan(value):
        return value if math.isnan(known) else known
    return pick(known, value)
