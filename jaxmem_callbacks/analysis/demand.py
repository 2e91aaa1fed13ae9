"""Demand: what one device holds, or will hold at the next run of a program, against its limit; and the events that say so."""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem_callbacks.analysis.trend import Rise
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_SMALLER = advise("preset.load", names="'donate', 'full_remat'")
NEED_LESS = (
    f"Lower what the step needs: {advise('step.under', step='train_step', policy=_SMALLER)}; or free arrays that are held "
    "beside the state; or take a smaller batch."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one device holds, or will hold, against its limit.

    Attributes:
        reading: What it was told by.
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
        action="Find what grows and let it go: the growth event and memory/live_arrays_count say which arrays. Else: "
        + NEED_LESS,
        figures={
            "demand_bytes": demand.bytes,
            "limit_bytes": demand.limit_bytes,
            "bytes_per_step": round(rise.per_step),
            "steps_left": steps_left,
            "since_step": rise.since_step,
        },
    )
