"""Checkpoint saves in a run: what was held during each, and the events that fell into one.

A save copies the state, on the device or to the host, so that memory is highest while it runs: a peak that no step explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.records.readings import CheckpointSave, Reading, SaveSpan
from jaxmem_callbacks.records.runs import MemoryEvent

DURING = "during a checkpoint save"
_FIGURES = ("in_use_bytes", "live_array_bytes", "resident_bytes")


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
        levels = {name: [size for (of, _), size in self._levels.items() if of == name] for name in _FIGURES}
        return {name: max(sizes) for name, sizes in levels.items() if sizes}


def _sizes(reading: Reading) -> Iterator[tuple[str, int]]:
    for name in _FIGURES:
        size = getattr(reading, name)
        if size is not None:
            yield name, size
