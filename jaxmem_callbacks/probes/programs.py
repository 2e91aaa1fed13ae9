"""Compiled programs: what registered steps need, and other functions that were compiled while a monitor was running.

Measured: bytes by the compiler. Steps of `jm.jit_step` and `jm.step_memory` come with their arguments; all others with their name
and, where the client tells which program the compile brought, their bytes. Backends: all. Cost: nothing per step; JAX calls the
listener once a compile.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Any, NamedTuple, Protocol, final

import jax
import jax.monitoring

from jaxmem_callbacks._compat.executables import NewExecutables
from jaxmem_callbacks.probes.compiled_names import made_by_user, placed
from jaxmem_callbacks.programs.reading.buffer_assignment import figures_of
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory

NOT_REGISTERED = "unknown, because not registered: only steps made by jm.jit_step know their arguments"

_COMPILED = "/jax/core/compile/backend_compile_duration"
_WRAPPED = re.compile(r"\w+\((.*)\)")
_KEPT = 1000  # compiles between two looks; a run that compiles more often has other problems
_SETTLE_S = 1.0  # a registered step enters the registry shortly after the compiler is done


class Source(Protocol):
    """Where registered compiles come from: the module ``programs.steps.registry``, or a list in a test."""

    def since(self, cursor: int) -> tuple[tuple[Compilation, ...], int]:
        """The compiles after the cursor, and the next cursor."""
        ...

    def calls(self) -> tuple[tuple[Compilation, int], ...]:
        """For every step that still exists, its largest compile and its number of calls."""
        ...


class _Heard(NamedTuple):
    """A compile of a program that may or may not be a registered step's."""

    name: str
    time_s: float
    statistics: Any


@final
class ProgramsProbe:
    """Tells compiles apart: registered steps with their arguments and bytes, others by name and bytes.

    What was compiled before ``start`` counts only once its step is called: the process may have compiled others for
    comparison, or for an earlier run.

    Args:
        source: Where registered compiles come from, by default the registry of ``jm.jit_step``.
    """

    def __init__(self, source: Source = registry) -> None:
        self._source = source
        earlier, self._cursor = source.since(0)
        self._idle = {_key(compilation): calls for compilation, calls in source.calls()}
        self._registered = {compilation.program for compilation in earlier}
        self._heard: deque[_Heard] = deque(maxlen=_KEPT)
        self._executables = NewExecutables()

    def start(self) -> None:
        """Begin to listen to JAX's compile events."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def stop(self) -> None:
        """Stop listening; harmless when something else cleared all listeners."""
        try:
            jax.monitoring.unregister_event_duration_listener(self._hear)
        except (AssertionError, ValueError):
            return

    def drain(self, *, settle_s: float = _SETTLE_S) -> tuple[Compilation, ...]:
        """The compiles since the last call, oldest first; unregistered ones are told once ``settle_s`` old."""
        registered, self._cursor = self._source.since(self._cursor)
        registered = (*self._awoken(), *registered)
        self._registered.update(compilation.program for compilation in registered)
        others = [
            Compilation(
                program=heard.name,
                time_s=heard.time_s,
                signature=(),
                memory=_memory(heard.name, heard.statistics),
                unavailable=NOT_REGISTERED,
            )
            for heard in self._settled(time.time() - settle_s)
            if heard.name not in self._registered and made_by_user(heard.name)
        ]
        return tuple(sorted([*registered, *others], key=lambda compilation: compilation.time_s))

    def _awoken(self) -> list[Compilation]:
        """Earlier compiles whose step was called since."""
        known = self._source.calls() if self._idle else ()
        awake = [each for each, calls in known if calls > self._idle.get(_key(each), calls)]
        for compilation in awake:
            del self._idle[_key(compilation)]
        return awake

    def _settled(self, until_s: float) -> list[_Heard]:
        ready: list[_Heard] = []
        while self._heard and self._heard[0].time_s <= until_s:
            ready.append(self._heard.popleft())
        return ready

    def _hear(self, event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event != _COMPILED:
            return
        name = str(details.get("fun_name", ""))
        match = _WRAPPED.fullmatch(name)
        name = placed(match[1] if match else name)
        # Of JAX's own too, so that the next new one is the only one. JAX calls this in the user's compile: whose function it is,
        # and what its statistics say, is asked later, on the thread that drains.
        self._heard.append(_Heard(name, time.time(), self._executables.statistics()))


def _memory(name: str, statistics: Any) -> ProgramMemory | None:
    if statistics is None:
        return None
    platform = jax.local_devices()[0].platform
    return ProgramMemory(name=name, platform=platform, target="attached", **figures_of(statistics, platform))  # type: ignore[arg-type]


def _key(compilation: Compilation) -> tuple[str, float]:
    return compilation.program, compilation.time_s
