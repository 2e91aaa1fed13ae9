"""Compiled programs: what registered steps need, and which other functions were compiled while a monitor was running.

Measured: bytes by the compiler, for steps of `jm.jit_step` and `jm.step_memory`; for all others only that they were compiled.
Backends: all. Cost: nothing per step; JAX calls the listener once a compile.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Protocol, final

import jax
import jax.monitoring
import jax.numpy as jnp

from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.programs import Compilation

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


@final
class ProgramsProbe:
    """Tells compiles apart: registered steps with their arguments and bytes, others by name only.

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
        self._heard: deque[tuple[str, float]] = deque(maxlen=_KEPT)

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
            Compilation(program=name, time_s=heard_s, signature=(), unavailable=NOT_REGISTERED)
            for name, heard_s in self._settled(time.time() - settle_s)
            if name not in self._registered
        ]
        return tuple(sorted([*registered, *others], key=lambda compilation: compilation.time_s))

    def _awoken(self) -> list[Compilation]:
        """Earlier compiles whose step was called since."""
        known = self._source.calls() if self._idle else ()
        awake = [each for each, calls in known if calls > self._idle.get(_key(each), calls)]
        for compilation in awake:
            del self._idle[_key(compilation)]
        return awake

    def _settled(self, until_s: float) -> list[tuple[str, float]]:
        ready: list[tuple[str, float]] = []
        while self._heard and self._heard[0][1] <= until_s:
            ready.append(self._heard.popleft())
        return ready

    def _hear(self, event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event != _COMPILED:
            return
        name = str(details.get("fun_name", ""))
        match = _WRAPPED.fullmatch(name)
        name = match[1] if match else name
        if not _is_jax_own(name):
            self._heard.append((name, time.time()))


def _key(compilation: Compilation) -> tuple[str, float]:
    return compilation.program, compilation.time_s


def _is_jax_own(name: str) -> bool:
    """Whether a compiled function is one of JAX's: operations called outside jit compile under their own name, once a shape."""
    if not name.isidentifier() or name.startswith("_"):
        return True
    return any(hasattr(module, name) for module in (jnp, jax.lax, jax.random, jax.nn, jnp.linalg))
