"""Readings and events of the other processes of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxmem_callbacks.analysis.figures import DERIVED, FIGURES, Figure, over_processes, values_of
from jaxmem_callbacks.analysis.timeseries import Windows
from jaxmem_callbacks.records.readings import AcrossFigure, AcrossProcesses, Reading
from jaxmem_callbacks.records.runs import MemoryEvent

_BYTES = {"GiB": "bytes", "arrays": "count", "share": "share"}
_MISSED = 3  # rounds without a word


def across_name(figure: Figure) -> str:
    """A figure's name in records: ``memory/in_use_gib`` is ``in_use_bytes``."""
    plain = figure.tag.removeprefix("memory/").rpartition("_")[0]
    return f"{plain}_{_BYTES[figure.unit]}"


NAMES: Mapping[str, Figure] = {across_name(figure): figure for figure in (*FIGURES, *DERIVED)}
_OF_TAG = {figure.tag: name for name, figure in NAMES.items()}


def across_scalars(across: AcrossProcesses) -> dict[str, float]:
    """Tags of the mean, and of the lowest and the highest."""
    flat: dict[str, float] = {}
    for name, each in across.figures.items():
        if (figure := NAMES.get(name)) is not None:  # another version of this library may know more
            tag = over_processes(figure).tag
            ends = ((tag, each.mean), (f"{tag}/min", each.low), (f"{tag}/max", each.high))
            flat |= {place: value / figure.divisor for place, value in ends}
    return flat


@final
class Told:
    """What this process has to tell: lowest, mean and highest of its figures since it told them before."""

    def __init__(self) -> None:
        self._windows = Windows(0.0)
        self._serial = 0

    def add(self, readings: Sequence[Reading]) -> None:
        """Take in what was read."""
        for reading in readings:
            self._windows.add(values_of(reading), reading.device)

    def text(self) -> str | None:
        """What is new as a text, once; None where nothing is."""
        window = self._windows.close(self._serial, 0.0, force=True)
        if window is None:
            return None
        self._serial += 1
        figures = {
            _OF_TAG[tag]: [
                *(_whole(value, NAMES[_OF_TAG[tag]]) for value in (each.low, each.mean, each.high)),
                each.high_at,
            ]
            for tag, each in window.spreads.items()
        }
        return json.dumps({"serial": self._serial, "figures": figures})


def _whole(value: float, figure: Figure) -> float:
    return value if figure.unit == "share" else round(value * figure.divisor)


@final
class Heard:
    """What process 0 has heard of each process, and when.

    Args:
        every_s: Seconds between two rounds.
        processes: How many the run has.
    """

    def __init__(self, every_s: float, processes: int) -> None:
        self._silent_s = _MISSED * every_s
        self._processes = processes
        self._latest: dict[int, tuple[int, float, Mapping[str, Any]]] = {}  # serial, when it was new, figures

    def learn(self, texts: Mapping[str, str], now_s: float) -> None:
        """Take in the texts by process; only a text that is new is a sign of life, since clocks of machines differ.

        Figures that are read less often than texts are sent stand as they were told last.
        """
        for process, text in texts.items():
            said = json.loads(text)
            before = self._latest.get(int(process))
            if before is None or before[0] != said["serial"]:
                known = {} if before is None else before[2]
                self._latest[int(process)] = (said["serial"], now_s, {**known, **said["figures"]})
        for process in [each for each in self._latest if str(each) not in texts]:  # it has ended
            del self._latest[process]

    def across(self, step: int, time_s: float, now_s: float) -> AcrossProcesses:
        """What is known now."""
        fresh = {process: said for process, (_, at_s, said) in self._latest.items() if now_s - at_s <= self._silent_s}
        names = {name: None for said in fresh.values() for name in said}
        return AcrossProcesses(
            step=step,
            time_s=time_s,
            processes=self._processes,
            silent=tuple(process for process in range(self._processes) if process not in fresh),
            figures={
                name: _joined(name, {each: said[name] for each, said in fresh.items() if name in said})
                for name in names
            },
        )


def _joined(name: str, said: Mapping[int, Sequence[Any]]) -> AcrossFigure:
    low = min(said, key=lambda process: said[process][0])
    high = max(said, key=lambda process: said[process][2])
    mean = sum(each[1] for each in said.values()) / len(said)
    return AcrossFigure(
        low=said[low][0],
        low_process=low,
        mean=mean if name.endswith("_share") else round(mean),
        high=said[high][2],
        high_process=high,
        high_device=said[high][3],
    )


_EACH = 3  # processes that are told one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldElsewhere:
    """An event, as the first of ``processes`` told it; the others told it in the same words."""

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
class Elsewhere:
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
    def told(self) -> Sequence[ToldElsewhere]:
        """Each event once, by its step."""
        found = [
            ToldElsewhere(event=event, processes=tuple(sorted(self._processes[key])))
            for key, event in self._events.items()
        ]
        return sorted(found, key=lambda each: (each.event.step, each.processes))
