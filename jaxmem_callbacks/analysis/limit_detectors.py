"""Detectors of little room: near OOM, now or at a program's next run, and free memory in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.figures import Fragmentation, fragmentation_of
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.timeseries import HysteresisTrigger, Rise, Trend
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.records.units import format_bytes

_SMALLER = advise("preset.load", names="'donate', 'full_remat'")
NEED_LESS = (
    f"Lower what the step needs: {advise('step.under', step='train_step', policy=_SMALLER)}; or free arrays that "
    "are held in addition to the state; or take a smaller batch."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one device holds, or will hold, against its limit.

    Attributes:
        reading: Where this was read.
        bytes: What is held, with the program's need where one is named.
        limit_bytes: The device's limit.
        program: The program whose next run needs so much, or None for what is held now.
    """

    reading: Reading
    bytes: int
    limit_bytes: int
    program: ProgramMemory | None = None

    @property
    def share(self) -> float:
        """The share of the limit."""
        return self.bytes / self.limit_bytes


def near_event(demand: Demand) -> MemoryEvent:
    """Little is left, or nothing."""
    reading, program = demand.reading, demand.program
    free = demand.limit_bytes - demand.bytes
    if program is None:
        what = f"{reading.device} holds {format_bytes(demand.bytes)}"
    else:
        beside = demand.bytes - program.step_bytes
        what = (
            f"{reading.device} needs {format_bytes(demand.bytes)} at the next {program.name} ({format_bytes(program.step_bytes)} "
            f"by its compiler, {format_bytes(beside)} of other live arrays)"
        )
    left = (
        f"{format_bytes(free)} ({free / demand.limit_bytes:.1%}) left"
        if free >= 0
        else f"{format_bytes(-free)} too much"
    )
    return MemoryEvent(
        kind="near_oom",
        step=reading.step,
        time_s=reading.time_s,
        device=reading.device,
        message=f"{what} of a limit of {format_bytes(demand.limit_bytes)}: {left}, since step {reading.step}.",
        action=NEED_LESS,
        figures={
            "demand_bytes": demand.bytes,
            "limit_bytes": demand.limit_bytes,
            "headroom_share": round(free / demand.limit_bytes, 4),
            "program": program.name if program else "none",
        },
    )


def alone_event(program: ProgramMemory, name: str, limit: int, step: int, time_s: float) -> MemoryEvent:
    """A program that needs more than the limit by itself."""
    need = program.step_bytes
    return MemoryEvent(
        kind="near_oom",
        step=step,
        time_s=time_s,
        device=name,
        message=(
            f"{name} alone needs {format_bytes(need)} by its compiler (arguments {format_bytes(program.argument_bytes)}, "
            f"temporaries {format_bytes(program.temp_bytes)}), {format_bytes(need - limit)} above the limit of "
            f"{format_bytes(limit)}, noticed at step {step}."
        ),
        action=NEED_LESS,
        figures={"need_bytes": need, "limit_bytes": limit, "temp_bytes": program.temp_bytes},
    )


def growing_event(demand: Demand, rise: Rise, steps_left: int) -> MemoryEvent:
    """What is held will meet the limit soon, if it goes on like this."""
    reading = demand.reading
    return MemoryEvent(
        kind="near_oom",
        step=reading.step,
        time_s=reading.time_s,
        device=reading.device,
        message=(
            f"{reading.device} meets its limit of {format_bytes(demand.limit_bytes)} in about {steps_left} steps: it needs "
            f"{format_bytes(demand.bytes)} and grows by {format_bytes(round(rise.per_step))} a step since step {rise.since_step}."
        ),
        action="Find what grows and let it go: the growth event and memory/live_arrays_count show which arrays. Else: "
        + NEED_LESS,
        figures={
            "demand_bytes": demand.bytes,
            "limit_bytes": demand.limit_bytes,
            "bytes_per_step": round(rise.per_step),
            "steps_left": steps_left,
            "since_step": rise.since_step,
        },
    )


_FULL = advise("preset.load", names="'full_remat'")
LOWER = (
    "Free small long-lived arrays that are between large ones (kept losses or metrics: float() them), or lower the "
    f"temporaries: {advise('step.under', step='train_step', policy=_FULL)}."
)

_READINGS = 4  # in a row


@final
class LargestBlock:
    """XLA:GPU takes a program's temporaries in one block.

    While a program runs its block is taken, and what is left is small: then nothing is judged. That it runs shows in
    what the allocator holds beyond the live arrays. Without a largest free block (jaxlib before 0.11) nothing is judged.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[Reading]] = {}
        self._live: dict[str, int] = {}

    def short(self, observation: Observation, programs: Iterable[ProgramMemory]) -> MemoryEvent | None:
        """The event while some program's block can't be had, or None."""
        for reading in observation.readings:
            if reading.source == "live_arrays" and reading.live_array_bytes is not None:
                self._live[reading.device] = reading.live_array_bytes
            elif reading.source == "allocator" and reading.largest_free_bytes is not None:
                self._recent.setdefault(reading.device, deque(maxlen=_READINGS)).append(reading)
        largest = max(
            (program for program in programs if program.platform == "gpu"),
            key=lambda each: each.temp_bytes,
            default=None,
        )
        if largest is None:
            return None
        for device, readings in self._recent.items():
            if len(readings) == _READINGS and self._is_short(device, readings, largest.temp_bytes):
                return _block_event(readings[-1], largest)
        return None

    def _is_short(self, device: str, readings: Iterable[Reading], block: int) -> bool:
        live = self._live.get(device)
        if live is None:
            return False
        return all(_room(each) < block and (each.in_use_bytes or 0) - live < block for each in readings)


def _room(reading: Reading) -> int:
    """The largest block that could be had: a free one, or one that the pool still grows by."""
    growth = 0
    if reading.limit_bytes is not None and reading.pool_bytes is not None:
        growth = reading.limit_bytes - reading.pool_bytes
    return max(reading.largest_free_bytes or 0, growth)


def _block_event(reading: Reading, program: ProgramMemory) -> MemoryEvent:
    room = _room(reading)
    whole = reading.pool_bytes or reading.limit_bytes or 0
    free = whole - (reading.in_use_bytes or 0)
    return MemoryEvent(
        kind="near_oom",
        step=reading.step,
        time_s=reading.time_s,
        device=reading.device,
        message=(
            f"The next {program.name} needs {format_bytes(program.temp_bytes)} for its temporaries in one block, and the "
            f"largest that {reading.device} could give is {format_bytes(room)}, since step {reading.step}: "
            f"{format_bytes(free)} are free, but in pieces."
        ),
        action=LOWER,
        figures={
            "block_bytes": program.temp_bytes,
            "largest_free_bytes": room,
            "free_bytes": free,
            "program": program.name,
        },
    )


_LEAST_GAIN = 0.01  # of the limit: a smaller growth foretells nothing
_QUIET_STEPS = 10  # steps in a row with enough headroom that end an episode
_SURELY = 2.0  # a level above any share at which an episode begins


@final
class NearOomDetector:
    """Judges bytes in use, and live arrays plus the largest program's compiled need, against the limit of each device.

    The limit is the smaller of what the allocator reports and ``MonitorSettings.limit_bytes``; where neither is known
    nothing is judged. A program that needs more than the limit by itself is reported once, whatever else is resident.
    The three ways to be near are one episode, reported by the first of them.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        headroom = settings.near_oom_headroom
        self._settings = settings
        self._episode = HysteresisTrigger(
            begin=1 - headroom, release=1 - headroom - min(headroom, 1 - headroom) / 2, quiet=_QUIET_STEPS
        )
        self._limits: dict[str, int] = {}
        self._programs: dict[tuple[str, int], tuple[int, ProgramMemory]] = {}  # by name and need: step noticed, memory
        self._reported: set[str] = set()
        self._latest: dict[str, Demand] = {}
        self._blocks = LargestBlock()
        self._ahead = HysteresisTrigger(
            begin=0.5, release=0.5, quiet=_QUIET_STEPS
        )  # a look that can't judge ends nothing
        self._trends: dict[tuple[str, str], Trend] = {}  # by source and device
        self._growing = HysteresisTrigger(begin=0.5, release=0.0)  # a rise's order

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """Events for programs that cannot fit, then at most one for the devices, judged by the worst."""
        self._learn(observation)
        events = self._too_large(observation)
        moments = self._moments(observation.readings)
        soon = self._soon(observation, moments)
        self._ahead.begins(float(soon is not None))
        for moment in moments:
            # Allocator and live arrays see the same memory: one episode, judged by the worse of their latest readings.
            self._latest[moment[0].reading.source] = max(moment, key=lambda demand: demand.share)
            worst = max(self._latest.values(), key=lambda demand: demand.share)
            ahead = soon is not None or (self._ahead.running and self._episode.running)
            if self._episode.begins(_SURELY if ahead else worst.share, at=moment[0].reading.step):
                is_now = worst.share > 1 - self._settings.near_oom_headroom
                events.append(near_event(worst) if soon is None or is_now else soon)
        return events

    def _soon(self, observation: Observation, moments: Sequence[Sequence[Demand]]) -> MemoryEvent | None:
        """What will happen if nothing changes: a block that can't be had, or growth that meets the limit."""
        short = self._blocks.short(observation, [program for _, program in self._programs.values()])
        growing = self._growth([demand for moment in moments for demand in moment])
        return short or growing

    def _growth(self, demands: Sequence[Demand]) -> MemoryEvent | None:
        latest: dict[tuple[str, str], Demand] = {}
        for demand in demands:
            key = demand.reading.source, demand.reading.device
            latest[key] = demand
            self._trends.setdefault(key, Trend(self._settings.growth_steps)).add(demand.reading.step, demand.bytes)
        if not latest:
            return None
        event: MemoryEvent | None = None
        level = 0.0
        for key, demand in latest.items():
            rise = self._trends[key].rise()
            if rise is None or rise.gain < _LEAST_GAIN * demand.limit_bytes:
                continue
            if rise.per_step <= 0:
                continue
            steps_left = int(max(0.0, demand.limit_bytes - rise.level) / rise.per_step)
            near = self._settings.near_oom_steps * (2 if self._growing.running else 1)
            if steps_left <= near and rise.order > level:
                level, event = rise.order, growing_event(demand, rise, steps_left)
        self._growing.begins(level)
        return event if self._growing.running else None

    def _learn(self, observation: Observation) -> None:
        for compiled in observation.compilations:
            memory = compiled.compilation.memory
            if memory is not None:
                self._programs[compiled.compilation.program, memory.step_bytes] = (compiled.step, memory)
        for reading in observation.readings:
            limit = _smaller(reading.limit_bytes, self._settings.limit_bytes)
            if reading.source != "host" and limit:
                self._limits[reading.device] = _smaller(limit, self._limits.get(reading.device)) or limit

    def _too_large(self, observation: Observation) -> list[MemoryEvent]:
        limit = max(self._limits.values(), default=self._settings.limit_bytes)
        events: list[MemoryEvent] = []
        for (name, need), (step, program) in self._programs.items():
            if limit and name not in self._reported and need > limit:
                self._reported.add(name)
                events.append(alone_event(program, name, limit, step, observation.time_s))
        return events

    def _moments(self, readings: Sequence[Reading]) -> list[list[Demand]]:
        moments: dict[tuple[str, float, int], list[Demand]] = {}
        for reading in readings:
            limit = self._limits.get(reading.device)
            demand = self._demand(reading, limit) if limit else None
            if demand is not None:
                moments.setdefault((reading.source, reading.time_s, reading.step), []).append(demand)
        return list(moments.values())

    def _demand(self, reading: Reading, limit: int) -> Demand | None:
        if reading.source == "allocator" and reading.in_use_bytes is not None:
            held = reading.in_use_bytes + (reading.reserved_bytes or 0)
            return Demand(reading=reading, bytes=held, limit_bytes=limit)
        if reading.source != "live_arrays" or reading.live_array_bytes is None:
            return None
        live = reading.live_array_bytes
        demand = Demand(reading=reading, bytes=live, limit_bytes=limit)
        for _, program in self._programs.values():
            # The program's arguments are among the live arrays and are not counted twice.
            total = max(live - program.argument_bytes, 0) + program.step_bytes
            if program.step_bytes <= limit and total > demand.bytes:  # larger ones have an event of their own
                demand = Demand(reading=reading, bytes=total, limit_bytes=limit, program=program)
        return demand


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((value for value in (first, second) if value), default=None)


_BAND = 0.1  # an episode ends when the share has fallen by so much,
_QUIET_READINGS = 10  # in so many readings in a row


@final
class FragmentationDetector:
    """One event when much of the free memory of a device cannot be given out in one block."""

    def __init__(self, settings: MonitorSettings) -> None:
        begin = settings.fragmentation_share
        self._least = settings.fragmentation_min_bytes
        self._episode = HysteresisTrigger(begin=begin, release=max(0.0, begin - _BAND), quiet=_QUIET_READINGS)

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event: devices are judged together, by the worst, moment by moment."""
        events: list[MemoryEvent] = []
        for moment in _moments(observation):
            worst, found = max(moment, key=lambda pair: self._level(pair[1]))
            if self._episode.begins(self._level(found)):
                events.append(_fragmentation_event(worst, found))
        return events

    def _level(self, found: Fragmentation) -> float:
        return found.share if found.free_bytes >= self._least else 0.0


def _moments(observation: Observation) -> list[list[tuple[Reading, Fragmentation]]]:
    """Known fragmentations grouped by the moment they were read at."""
    moments: dict[tuple[float, int], list[tuple[Reading, Fragmentation]]] = {}
    for reading in observation.readings:
        found = fragmentation_of(reading) if reading.source == "allocator" else None
        if isinstance(found, Fragmentation):
            moments.setdefault((reading.time_s, reading.step), []).append((reading, found))
    return list(moments.values())


def _fragmentation_event(reading: Reading, found: Fragmentation) -> MemoryEvent:
    return MemoryEvent(
        kind="fragmentation",
        step=reading.step,
        time_s=reading.time_s,
        device=reading.device,
        message=(
            f"{found.share:.0%} of the free memory of {reading.device} is outside its largest free block, since step "
            f"{reading.step}: {format_bytes(found.free_bytes)} are free, and the largest block is "
            f"{format_bytes(found.largest_free_bytes)}."
        ),
        action=(
            "Free small long-lived arrays (kept losses or metrics: convert them with float() and let the arrays go), keep "
            "batch shapes constant, and preallocate, before JAX starts: "
            f"{advise('memory.environment', preset='gpu_preallocate')}."
        ),
        figures={
            "fragmentation_share": round(found.share, 4),
            "free_bytes": found.free_bytes,
            "largest_free_bytes": found.largest_free_bytes,
        },
    )
