"""Recorded runs: a file of tests/recordings enters; what it is, and the events that the real detectors find in it now, leave."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem_callbacks.analysis.observation import Compiled, Observation
from jaxmem_callbacks.callbacks.monitor import detectors_of
from jaxmem_callbacks.readers.runs import JAX_NAMES
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup, with_changes
from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading

FOLDER = Path(__file__).parent / "recordings"
_OWN_NAMES = {jax: own for own, jax in JAX_NAMES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One file.

    Attributes:
        head: Its first line: what was run, by which command, with which settings.
        lines: What the monitor wrote.
    """

    head: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def told(self) -> list[dict[str, Any]]:
        """The events that the monitor told while it was recorded."""
        return [line for line in self.lines if line["kind"] == "event"]

    def replay(self, **changes: Any) -> list[MemoryEvent]:
        """What fresh detectors tell of it, with its own settings but for ``changes``."""
        detectors = detectors_of(
            MonitorSettings(**(self.head["settings"] | changes)),
            split=self.head["split"],
            plan=_plan(self.lines),
            versions=self.head["versions"],
            since_s=self.head["since_s"],
        )
        return [
            event
            for observation in self.observations()
            for detector in detectors
            for event in detector.detect(observation)
        ]

    def observations(self) -> Iterator[Observation]:
        """Its lines as the detectors saw them: readings of one moment together."""
        census: ArrayCensus | None = None
        moment: list[Reading] = []
        unchanged: Reading | None = None  # a look at the arrays of which nothing was written so far
        step = -1
        for line in self.lines:
            reading = _reading(line) if line["kind"] == "reading" else None
            if moment and (reading is None or (reading.time_s, reading.source) != (moment[0].time_s, moment[0].source)):
                yield Observation(step=step, time_s=moment[0].time_s, readings=tuple(moment))
                moment = []
            if reading is not None and reading.source == "live_arrays" and not moment:
                if unchanged is not None and census is not None:
                    same = dataclasses.replace(census, step=unchanged.step, time_s=unchanged.time_s)
                    yield Observation(step=step, time_s=same.time_s, arrays=same)
                unchanged = reading
            if reading is not None:
                moment.append(reading)
            step = line["step"] if line["kind"] in ("reading", "arrays") else step
            if line["kind"] == "arrays":
                census, unchanged = with_changes(census, _census(line)), None
                yield Observation(step=step, time_s=line["time_s"], arrays=census)
            elif line["kind"] == "compilation":
                compiled = Compiled(step=line["step"], compilation=_compilation(line))
                yield Observation(step=step, time_s=line["time_s"], compilations=(compiled,))


def recording(name: str) -> Recording:
    """A recording by its name."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        head, *lines = [json.loads(line) for line in file]
    return Recording(head=head, lines=lines)


def names() -> list[str]:
    """All recordings."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


def _fields(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("run", "kind")}


def _reading(line: dict[str, Any]) -> Reading:
    return Reading(**{_OWN_NAMES.get(name, name): value for name, value in _fields(line).items()})


def _census(line: dict[str, Any]) -> ArrayCensus:
    groups = tuple(
        ArrayGroup(**(group | {"shape": tuple(group["shape"]), "devices": tuple(group["devices"])}))
        for group in line["groups"]
    )
    return ArrayCensus(**(_fields(line) | {"groups": groups}))


def _compilation(line: dict[str, Any]) -> Compilation:
    fields = _fields(line)
    memory = fields.pop("memory")
    pairs = {name: tuple(tuple(pair) for pair in fields.pop(name)) for name in ("signature",)}
    texts = {name: tuple(fields.pop(name)) for name in ("changed", "lost")}
    return Compilation(**fields, **pairs, **texts, memory=ProgramMemory(**memory) if memory else None)


def _plan(lines: list[dict[str, Any]]) -> PlanRecord | None:
    """As much of the plan as a detector looks at."""
    found = next((line["plan"] for line in lines if line["kind"] == "plan"), None)
    if found is None:
        return None
    chosen = found["candidates"][found["chosen"]]
    candidate = Candidate(policy=StepPolicy(), step_bytes=chosen["step_bytes"], fits=True, flops=0, extra_flops=0)
    return PlanRecord(
        step=found["step"],
        target=found["target"],
        platform=found["platform"],
        device_count=found["device_count"],
        candidates=(candidate,),
        chosen=0,
        reason="",
        limit_bytes=None,
        budget_bytes=None,
        budget_reason="",
        versions=found["versions"],
        signature=tuple(tuple(pair) for pair in found["signature"]),
    )
