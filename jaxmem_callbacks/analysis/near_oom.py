"""Near-OOM: little is left now or at a program's next run, a program's block can't be had, or growth meets the limit soon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxmem_callbacks.analysis.demand import Demand, alone_event, growing_event, near_event
from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.largest_block import LargestBlock
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.trend import Trend
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.runs import MemoryEvent

_LEAST_GAIN = 0.01  # of the limit: a smaller growth foretells nothing
_QUIET = 10  # steps in a row with enough headroom that end an episode
_SURELY = 2.0  # a level above any share at which an episode begins


@final
class NearOomDetector:
    """Judges bytes in use, and live arrays plus the largest program's compiled need, against the limit of each device.

    The limit is the smaller of what the allocator reports and ``MonitorSettings.limit_bytes``; where neither is known
    nothing is judged. A program that needs more than the limit by itself is told once, whatever else is resident.
    The three ways to be near are one episode, told by the first of them.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        headroom = settings.near_oom_headroom
        self._settings = settings
        self._episode = Episode(
            begin=1 - headroom, release=1 - headroom - min(headroom, 1 - headroom) / 2, quiet=_QUIET
        )
        self._limits: dict[str, int] = {}
        self._programs: dict[tuple[str, int], tuple[int, ProgramMemory]] = {}  # by name and need: step noticed, memory
        self._told: set[str] = set()
        self._latest: dict[str, Demand] = {}
        self._blocks = LargestBlock()
        self._ahead = Episode(begin=0.5, release=0.5, quiet=_QUIET)  # a look that can't judge ends nothing
        self._trends: dict[tuple[str, str], Trend] = {}  # by source and device
        self._growing = Episode(begin=0.5, release=0.0)  # a rise's order

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
        told: MemoryEvent | None = None
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
                level, told = rise.order, growing_event(demand, rise, steps_left)
        self._growing.begins(level)
        return told if self._growing.running else None

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
            if limit and name not in self._told and need > limit:
                self._told.add(name)
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
            if program.step_bytes <= limit and total > demand.bytes:  # larger ones are told by themselves
                demand = Demand(reading=reading, bytes=total, limit_bytes=limit, program=program)
        return demand


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((value for value in (first, second) if value), default=None)
