"""Largest block: the block that a program's temporaries take, against the largest block that a GPU's pool could give out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_FULL = advise("preset.load", names="'full_remat'")
LOWER = (
    "Free small long-lived arrays that lie between large ones (kept losses or metrics: float() them), or lower the "
    f"temporaries: {advise('step.under', step='train_step', policy=_FULL)}."
)

_READINGS = 4  # in a row


@final
class LargestBlock:
    """XLA:GPU takes a program's temporaries in one block.

    While a program runs its block is taken, and what is left is small: then nothing is judged. Whether it runs is told by
    what the allocator holds beyond the live arrays. Without a largest free block (jaxlib before 0.11) nothing is judged.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[Reading]] = {}
        self._live: dict[str, int] = {}

    def short(self, observation: Observation, programs: Iterable[ProgramMemory]) -> MemoryEvent | None:
        """The event to tell while some program's block can't be had, or None."""
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
                return _event(readings[-1], largest)
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


def _event(reading: Reading, program: ProgramMemory) -> MemoryEvent:
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
