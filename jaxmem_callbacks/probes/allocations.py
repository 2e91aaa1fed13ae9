"""Allocations: what appeared and vanished on the first local device since the last reading, and which steps ran meanwhile.

Measured: live arrays of that device's default memory, as the probe of live arrays counts them; temporaries, results and reused
arguments of programs by their compiler. Modelled: the order within a reading. Backends: all. Cost: about a microsecond for every
live array and ten for each new one, on the thread that reads, so it is read over a bounded number of steps only.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from jaxmem_callbacks._compat.arrays import live_arrays
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.traces import Alloc, Free, ProgramEnd, ProgramOutput, ProgramStart, StepMark, TraceEvent

BLIND = (
    "The order within a step is modelled: first what no program made, then programs with results before temporaries, then frees.",
    "What comes and goes between two calls of the monitor is not seen, nor what XLA holds beside arrays and temporaries.",
    "Temporaries are those of steps made by jm.jit_step, the largest of several signatures; others' are not seen, only results.",
    "Arrays that share memory count each.",
)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """An array that was alive at the last reading; it is not held. Never compared: weak references compare arrays."""

    array: weakref.ref[Any]
    id: int
    bytes: int
    name: str


@final
class AllocationsProbe:
    """Changes since the last reading, on one thread only. It keeps no array alive, waits for none and asks for no address."""

    def __init__(self) -> None:
        self._device = jax.local_devices()[0]
        self._kind = self._device.default_memory().kind
        self.device = device_label(self._device)
        self._known: dict[int, _Seen] = {}
        self._calls = _calls()
        self._ids = self._runs = 0
        self._names: dict[Any, str] = {}

    def read(self, step: int) -> tuple[Sequence[TraceEvent], int]:
        """The events since the last reading, a mark at their end, and how many arrays were alive."""
        arrays = live_arrays()
        known: dict[int, _Seen] = {}
        new: dict[int, _Seen] = {}
        live_bytes = 0
        for array in reversed(arrays):  # the client lists the newest first
            key = id(array)
            seen = self._known.get(key)
            if seen is None or seen.array() is not array:
                seen = self._first_sight(array)
                if seen is None:
                    continue
                new[seen.id] = seen
            known[key] = seen
            live_bytes += seen.bytes
        gone = {seen.id: seen for key, seen in self._known.items() if known.get(key) is not seen}
        self._known = known
        events = [*self._changes(step, new, gone), StepMark(step=step, live_bytes=live_bytes)]
        return events, len(arrays)

    def _first_sight(self, array: Any) -> _Seen | None:
        """An array that was not there; None where it holds nothing on this device."""
        sharding = array.sharding
        if self._device not in sharding.device_set or sharding.memory_kind not in (None, self._kind):
            return None
        try:
            size = array.on_device_size_in_bytes() // len(sharding.device_set)
        except RuntimeError:  # deleted or donated since the list was made
            return None
        key = (array.dtype, array.shape)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        return _Seen(weakref.ref(array), self._next_id(), size, name)

    def _changes(self, step: int, new: dict[int, _Seen], gone: dict[int, _Seen]) -> Iterator[TraceEvent]:
        """New arrays are given to the programs that ran, the newest first, as far as their compilers report results."""
        programs: list[TraceEvent] = []
        for compilation, runs in reversed(self._ran()):
            outputs = self._results(compilation, new, gone)
            # Of several runs between two readings the results of the last one are what is there.
            each = [self._program(step, compilation, outputs if last else ()) for last in [False] * (runs - 1) + [True]]
            programs = [*(event for pair in each for event in pair), *programs]
        yield from (Alloc(id=each.id, bytes=each.bytes, step=step, name=each.name) for each in new.values())
        yield from programs
        yield from (Free(id=each, step=step) for each in gone)

    def _results(
        self, compilation: Compilation, new: dict[int, _Seen], gone: dict[int, _Seen]
    ) -> tuple[ProgramOutput, ...]:
        """A program's results among new arrays; they, and what they reuse of what is gone, leave the two."""
        memory = compilation.memory
        if memory is None:
            return ()
        reused = _pairs(new.values(), gone.values(), memory.alias_bytes)
        fresh = memory.output_bytes - memory.alias_bytes
        found: list[ProgramOutput] = []
        for each in reversed(tuple(new.values())):
            reuses = reused.get(each.id)
            if reuses is not None:
                del gone[reuses]
            elif each.bytes <= fresh:
                fresh -= each.bytes
            else:
                continue
            del new[each.id]
            found.append(ProgramOutput(id=each.id, bytes=each.bytes, reuses=reuses, name=each.name))
        return tuple(reversed(found))

    def _program(
        self, step: int, compilation: Compilation, outputs: tuple[ProgramOutput, ...]
    ) -> tuple[ProgramStart, ProgramEnd]:
        self._runs += 1
        memory = compilation.memory
        start = ProgramStart(
            run=self._runs,
            program=compilation.program,
            step=step,
            temp_bytes=None if memory is None else memory.temp_bytes,
            outputs=outputs,
            unknown=compilation.unavailable if memory is None else None,
        )
        return start, ProgramEnd(run=self._runs, step=step)

    def _ran(self) -> list[tuple[Compilation, int]]:
        """The steps that were called since the last reading, and how often."""
        before, self._calls = self._calls, _calls()
        ran = [(made, calls - before.get(name, (made, 0))[1]) for name, (made, calls) in self._calls.items()]
        return [(made, runs) for made, runs in ran if runs > 0]

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids


def _pairs(new: Iterable[_Seen], gone: Iterable[_Seen], alias_bytes: int) -> dict[int, int]:
    """New array -> the gone one of its size whose memory it took over, as far as the compiler reports that.

    The largest first, so that a small array that is merely gone does not use up what a large one needs.
    """
    left: dict[int, deque[int]] = defaultdict(deque)
    for each in gone:
        left[each.bytes].append(each.id)
    pairs: dict[int, int] = {}
    for each in sorted(new, key=lambda one: -one.bytes):
        if each.bytes <= alias_bytes and left[each.bytes]:
            alias_bytes -= each.bytes
            pairs[each.id] = left[each.bytes].popleft()
    return pairs


def _calls() -> dict[str, tuple[Compilation, int]]:
    """The steps of this process by name, with their largest compile and their calls; like names count together."""
    found: dict[str, tuple[Compilation, int]] = {}
    for compilation, calls in registry.calls():
        largest, earlier = found.get(compilation.program, (compilation, 0))
        found[compilation.program] = max(largest, compilation, key=_need), earlier + calls
    return found


def _need(compilation: Compilation) -> int:
    return -1 if compilation.memory is None else compilation.memory.step_bytes
