"""Near-OOM: free memory under a share of the limit, now or at the next run of a program whose need the compiler has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.settings import MonitorSettings
from jaxmem_callbacks.records.units import format_bytes

_ACTION = (
    "Lower what the step needs: jm.jit_step(train_step, jm.load_preset('donate', 'full_remat')); or free arrays that are held "
    "beside the state; or take a smaller batch."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    """What one device holds, or will hold, against its limit."""

    reading: Reading
    bytes: int
    limit_bytes: int
    program: ProgramMemory | None = None

    @property
    def share(self) -> float:
        return self.bytes / self.limit_bytes


@final
class NearOomDetector:
    """Judges bytes in use, and live arrays plus the largest program's compiled need, against the limit of each device.

    The limit is the smaller of what the allocator reports and ``MonitorSettings.limit_bytes``; where neither is known
    nothing is judged. A program that needs more than the limit by itself is told once, whatever else is resident.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        headroom = settings.near_oom_headroom
        self._settings = settings
        self._episode = Episode(begin=1 - headroom, release=1 - headroom - min(headroom, 1 - headroom) / 2)
        self._limits: dict[str, int] = {}
        self._programs: dict[tuple[str, int], tuple[int, ProgramMemory]] = {}  # by name and need: step noticed, memory
        self._told: set[str] = set()
        self._latest: dict[str, _Demand] = {}

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """Events for programs that cannot fit, then at most one for the devices, judged by the worst."""
        self._learn(observation)
        events = self._too_large(observation)
        for moment in self._moments(observation.readings):
            # Allocator and live arrays see the same memory: one episode, judged by the worse of their latest readings.
            self._latest[moment[0].reading.source] = max(moment, key=lambda demand: demand.share)
            worst = max(self._latest.values(), key=lambda demand: demand.share)
            if self._episode.begins(worst.share):
                events.append(_near(worst))
        return events

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
                events.append(_alone(program, name, limit, step, observation.time_s))
        return events

    def _moments(self, readings: Sequence[Reading]) -> list[list[_Demand]]:
        moments: dict[tuple[str, float, int], list[_Demand]] = {}
        for reading in readings:
            limit = self._limits.get(reading.device)
            demand = self._demand(reading, limit) if limit else None
            if demand is not None:
                moments.setdefault((reading.source, reading.time_s, reading.step), []).append(demand)
        return list(moments.values())

    def _demand(self, reading: Reading, limit: int) -> _Demand | None:
        if reading.source == "allocator" and reading.in_use_bytes is not None:
            held = reading.in_use_bytes + (reading.reserved_bytes or 0)
            return _Demand(reading=reading, bytes=held, limit_bytes=limit)
        if reading.source != "live_arrays" or reading.live_array_bytes is None:
            return None
        live = reading.live_array_bytes
        demand = _Demand(reading=reading, bytes=live, limit_bytes=limit)
        for _, program in self._programs.values():
            # The program's arguments are among the live arrays and are not counted twice.
            total = max(live - program.argument_bytes, 0) + program.step_bytes
            if program.step_bytes <= limit and total > demand.bytes:  # larger ones are told by themselves
                demand = _Demand(reading=reading, bytes=total, limit_bytes=limit, program=program)
        return demand


def _smaller(first: int | None, second: int | None) -> int | None:
    return min((value for value in (first, second) if value), default=None)


def _near(demand: _Demand) -> MemoryEvent:
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
        action=_ACTION,
        figures={
            "demand_bytes": demand.bytes,
            "limit_bytes": demand.limit_bytes,
            "headroom_share": round(free / demand.limit_bytes, 4),
            "program": program.name if program else "none",
        },
    )


def _alone(program: ProgramMemory, name: str, limit: int, step: int, time_s: float) -> MemoryEvent:
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
        action=_ACTION,
        figures={"need_bytes": need, "limit_bytes": limit, "temp_bytes": program.temp_bytes},
    )
