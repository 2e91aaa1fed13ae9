"""Compiles and checkpoint saves, as `jax.monitoring` reports them.

Compiles: what registered steps need, and the user's other compiled functions.

Saves: when a save of Orbax began and ended, its background part included; Orbax itself is not imported. Backends: all; in a run
of several processes Orbax reports to process 0 only. Cost: nothing per step; JAX calls the listeners some thirty times a save. A
save that fails never reports its end: it counts as running until a later one ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import jax
import jax.monitoring
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

from jaxmem_callbacks._compat.executables import NewExecutables
from jaxmem_callbacks.programs.reading.buffer_assignment import figures_of
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory

# Libraries of parts. One that brings a training loop is none: its step is the user's.
_LIBRARIES = frozenset(
    ("jax", "optax", "flax", "equinox", "chex", "haiku", "distrax", "rlax", "jaxopt", "lineax", "diffrax", "optimistix")
)
_PASSED = frozenset(("jax", "jaxlib", "jaxmem_callbacks", "contextlib", "functools"))
_STEP = "jaxmem_callbacks.programs.steps.step"
_PLACED = re.compile(r"<[^<>]+> \(.+:\d+\)", re.DOTALL)
_CALLBACKS = ("pure_callback", "io_callback")  # primitives that JAX does not list


def made_by_user(name: str) -> bool:
    """Whether a compiled function of this name is the user's; one that has the name of an operation is taken for that."""
    if _PLACED.fullmatch(name):
        return True
    if not name.isidentifier() or name.startswith("_") or name in _CALLBACKS:
        return False
    if any(hasattr(module, name) for module in (jnp, jax.lax, jax.random, jax.nn, jnp.linalg)):
        return False
    return name not in _primitive_names() and name not in _jitted_by_libraries(len(sys.modules))


def placed(name: str) -> str:
    """The name of a function that has one, else with the line that calls it, such as ``<lambda> (train.py:12)``.

    JAX gives lambdas, partials and objects one name for all, and compiles them at their call, so that only their caller
    differs. Where a library calls, the name is left as it is, and where a step of this library does, which is registered.
    """
    if not name.startswith("<"):
        return name
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if module == _STEP:
            return name
        package = module.partition(".")[0]
        if package not in _PASSED:
            is_part = package in _LIBRARIES
            return name if is_part else f"{name} ({Path(frame.f_code.co_filename).name}:{line})"
    return name


@functools.cache
def _primitive_names() -> frozenset[str]:
    return frozenset(each.name for each in vars(primitives).values() if isinstance(each, Primitive))


@functools.lru_cache(maxsize=1)
def _jitted_by_libraries(modules: int) -> frozenset[str]:  # noqa: ARG001 - asked again once more are imported
    """The names of the jitted functions that are in modules of libraries."""
    found: set[str] = set()
    for module_name, module in tuple(sys.modules.items()):
        if module_name.partition(".")[0] in _LIBRARIES:
            found.update(_name_of(each) for each in tuple(getattr(module, "__dict__", {}).values()) if _is_jitted(each))
    return frozenset(found)


def _is_jitted(each: object) -> bool:
    """Whether it can be lowered and wraps a function; of its class, since an object may answer every attribute."""
    kind = type(each)
    return callable(getattr(kind, "lower", None)) and hasattr(each, "__wrapped__")


def _name_of(jitted: object) -> str:
    return str(getattr(jitted, "__name__", ""))


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


class _CompileEvent(NamedTuple):
    """A compile of a program that may or may not be a registered step's."""

    name: str
    time_s: float
    statistics: Any


@final
class ProgramsProbe:
    """Compiles: registered steps with their arguments and bytes, others by name and bytes.

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
        self._compiled: deque[_CompileEvent] = deque(maxlen=_KEPT)
        self._executables = NewExecutables()

    def start(self) -> None:
        """Begin to listen to JAX's compile events."""
        jax.monitoring.register_event_duration_secs_listener(self._on_compile)

    def stop(self) -> None:
        """Stop listening; harmless when something else cleared all listeners."""
        try:
            jax.monitoring.unregister_event_duration_listener(self._on_compile)
        except (AssertionError, ValueError):
            return

    def drain(self, *, settle_s: float = _SETTLE_S) -> tuple[Compilation, ...]:
        """The compiles since the last call, oldest first; unregistered ones once they are ``settle_s`` old."""
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

    def _settled(self, until_s: float) -> list[_CompileEvent]:
        ready: list[_CompileEvent] = []
        while self._compiled and self._compiled[0].time_s <= until_s:
            ready.append(self._compiled.popleft())
        return ready

    def _on_compile(self, event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event != _COMPILED:
            return
        name = str(details.get("fun_name", ""))
        match = _WRAPPED.fullmatch(name)
        name = placed(match[1] if match else name)
        # Of JAX's own too, so that the next new one is the only one. JAX calls this in the user's compile: whose function it is,
        # and what its statistics are, is asked later, on the thread that drains.
        self._compiled.append(_CompileEvent(name, time.time(), self._executables.statistics()))


def _memory(name: str, statistics: Any) -> ProgramMemory | None:
    if statistics is None:
        return None
    platform = jax.local_devices()[0].platform
    return ProgramMemory(name=name, platform=platform, target="attached", **figures_of(statistics, platform))  # type: ignore[arg-type]


def _key(compilation: Compilation) -> tuple[str, float]:
    return compilation.program, compilation.time_s


# Both interfaces of Orbax 0.12, old and v1, send these two, for a save that blocks and for one that does not.
_BEGAN = {"/jax/orbax/write/start": False, "/jax/orbax/write/async/start": True}
_ENDED = {"/jax/orbax/write/total_duration_secs", "/jax/orbax/write/async/total_duration_secs"}
SaveTimes = tuple[float, float | None, bool]  # begin, end or None while it runs, whether it is in the background
_KEPT_SAVES = 100  # saves between two looks
_AT_ONCE = 2  # a save may begin while the one before it is still being written


@final
class SavesProbe:
    """Listens to saves on the threads that make them; `drain` is for the monitor's thread."""

    def __init__(self) -> None:
        self._running: deque[tuple[float, bool]] = deque(maxlen=_AT_ONCE)
        self._ended: deque[tuple[float, float, bool]] = deque(maxlen=_KEPT_SAVES)

    def start(self) -> None:
        """Begin to listen."""
        jax.monitoring.register_event_listener(self._on_begin)
        jax.monitoring.register_event_duration_secs_listener(self._on_end)

    def stop(self) -> None:
        """Stop listening; harmless when something else cleared all listeners."""
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_listener(self._on_begin)
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._on_end)

    @property
    def running(self) -> bool:
        """Whether one runs now."""
        return bool(self._running)

    def drain(self) -> list[SaveTimes]:
        """Those that ended since the last call, and those that run."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return [*ended, *((began_s, None, background) for began_s, background in tuple(self._running))]

    def _on_begin(self, event: str, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event in _BEGAN:
            self._running.append((time.time(), _BEGAN[event]))

    def _on_end(self, event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG002 - JAX's signature
        if event not in _ENDED:
            return
        now = time.time()
        # Saves end in the order in which they begin: an older one that has not ended has failed.
        while self._running:
            began_s, background = self._running.popleft()
            if not self._running or abs(now - duration_secs - began_s) < abs(now - duration_secs - self._running[0][0]):
                self._ended.append((began_s, now, background))
                return
