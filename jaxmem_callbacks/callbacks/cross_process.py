"""Readings of all processes on process 0, at an interval, where a preset asks for it.

Through the key-value store of `jax.distributed`, by a thread of its own: no device, no collective, and nobody waits for a process
that does not answer. A round that hangs, as where the coordinator is stopped, is left alone until it comes back.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import jax

from jaxmem_callbacks._compat.coordination import Store, shared_store
from jaxmem_callbacks.analysis.figures import (
    NAMES,
    Figure,
    Windows,
    values_of,
)
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.callbacks.background import Faults
from jaxmem_callbacks.records.runs import AcrossFigure, AcrossProcesses, Reading, Unavailable

_MISSED = 3  # rounds without a word
# A page shows these of each process, where they are not so many that nobody can tell the curves apart.
_OF_EACH, _MOST_OF_EACH = {"in_use_bytes", "live_arrays_bytes", "host_bytes"}, 64
_OF_TAG = {figure.tag: name for name, figure in NAMES.items()}


@final
class ProcessReport:
    """What this process sends: lowest, mean and highest of its figures since it sent them before."""

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
class ProcessReports:
    """What process 0 has received from each process, and when.

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

        Figures that are read less often than texts are sent stand as they were sent last.
        """
        for process, text in texts.items():
            report = json.loads(text)
            before = self._latest.get(int(process))
            if before is None or before[0] != report["serial"]:
                known = {} if before is None else before[2]
                self._latest[int(process)] = (report["serial"], now_s, {**known, **report["figures"]})
        for process in [each for each in self._latest if str(each) not in texts]:  # it has ended
            del self._latest[process]

    def across(self, step: int, time_s: float, now_s: float) -> AcrossProcesses:
        """What is known now."""
        fresh = {process: own for process, (_, at_s, own) in self._latest.items() if now_s - at_s <= self._silent_s}
        names = {name: None for own in fresh.values() for name in own}
        return AcrossProcesses(
            step=step,
            time_s=time_s,
            processes=self._processes,
            silent=tuple(process for process in range(self._processes) if process not in fresh),
            figures={
                name: _joined(name, {each: own[name] for each, own in fresh.items() if name in own}) for name in names
            },
        )


def _joined(name: str, values: Mapping[int, Sequence[Any]]) -> AcrossFigure:
    low = min(values, key=lambda process: values[process][0])
    high = max(values, key=lambda process: values[process][2])
    mean = sum(each[1] for each in values.values()) / len(values)
    each_is_kept = name in _OF_EACH and len(values) <= _MOST_OF_EACH
    return AcrossFigure(
        low=values[low][0],
        low_process=low,
        mean=mean if name.endswith("_share") else round(mean),
        high=values[high][2],
        high_process=high,
        high_device=values[high][3],
        highs={str(process): each[2] for process, each in sorted(values.items())} if each_is_kept else {},
    )


WAIT_S = 0.5  # at a flush and at the end; never in a look at an interval
_LONG_S = 10.0  # of a round, from which on it is reported to hang
_monitors = itertools.count()  # processes that make their monitors in the same order find each other by it


@final
class Exchange:
    """One process's part of it.

    Args:
        every_s: Seconds between two rounds.
        faults: Reports rounds that raise or hang.
    """

    def __init__(self, every_s: float, faults: Faults) -> None:
        self._every_s = every_s
        self._faults = faults
        self._folder = f"jaxmem/monitor/{next(_monitors)}"
        self._report = ProcessReport()
        self._next_s = 0.0
        self._store: Store | None = None
        self._reports: ProcessReports | None = None
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._brought: Mapping[str, str] | None = None
        self._off = False
        self._unavailable: list[Unavailable] = []

    def turn(self, observation: Observation, *, wait: bool = False) -> Observation:
        """Begin a round when one is due, or now with ``wait``.

        Args:
            observation: What was seen; what it read is sent to the others.
            wait: Wait for the round, for half a second at most.

        Returns:
            The observation with what the rounds before brought, on process 0; or why there is nothing.
        """
        if self._off or not self._opened():
            why, self._unavailable = self._unavailable, []
            return replace(observation, unavailable=[*observation.unavailable, *why]) if why else observation
        self._report.add(observation.readings)
        now_s = time.monotonic()
        if (wait or now_s >= self._next_s) and not self._is_busy(now_s, _LONG_S):
            self._next_s, self._began_s = now_s + self._every_s, now_s
            self._start(self._round, self._report.text())
        if wait:
            self._join()
            self._is_busy(time.monotonic(), WAIT_S)
        brought, self._brought = self._brought, None
        if brought is None or self._reports is None:
            return observation
        now_s = time.monotonic()
        self._reports.learn(brought, now_s)
        return replace(observation, processes=self._reports.across(observation.step, observation.time_s, now_s))

    def close(self) -> None:
        """Take back what this process sent, so that it is not missed."""
        if self._store is not None and not self._off and not self._is_busy(time.monotonic(), _LONG_S):
            self._start(self._drop)
            self._join()
        self._off = True

    def _opened(self) -> bool:
        if self._store is not None:
            return True
        processes = jax.process_count()
        self._store = shared_store() if processes > 1 else None
        if self._store is None:
            why = "this run has one process" if processes == 1 else "jax.distributed has no key-value store here"
            self._unavailable.append(Unavailable(figure="processes", device="all", reason=why))
            self._off = True
        elif jax.process_index() == 0:
            self._reports = ProcessReports(self._every_s, processes)
        return self._store is not None

    def _start(self, action: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=self._attempt, args=(action, *args), name="jaxmem-exchange", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(WAIT_S)

    def _is_busy(self, now_s: float, long_s: float) -> bool:
        busy = self._thread is not None and self._thread.is_alive()
        if busy and now_s - self._began_s >= long_s:
            self._faults.note(
                "exchange",
                "the exchange with the other processes gets no answer (does the coordinator, process 0, still run?): their "
                "figures are not shown until one comes.",
            )
        return busy

    def _attempt(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - the runtime's own errors, such as a connection that is gone
            if not self._off:
                self._off = True
                self._faults.report("the exchange with the other processes", error)

    def _round(self, text: str | None) -> None:
        if self._store is not None and text is not None:
            self._store.put(self._place, text)
        if self._store is not None and self._reports is not None:
            self._brought = self._store.under(self._folder)

    def _drop(self) -> None:
        if self._store is not None:
            self._store.drop(self._place)

    @property
    def _place(self) -> str:
        return f"{self._folder}/{jax.process_index()}"
