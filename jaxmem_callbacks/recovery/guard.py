"""`jm.oom_guard`: code runs inside; where it fails for want of memory a report is written, and the same exception goes on."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar, cast, final

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import require, require_path, require_whole
from jaxmem_callbacks.recovery.monitor_snapshot import CallCounts, MemoryReserve, Monitored
from jaxmem_callbacks.recovery.reporting import ReportSettings, report_oom

_REPORTS = "outdir='reports'"

# The guards around the code that runs, outermost first: of each thread and each task its own, since they share a guard.
_entered: ContextVar[tuple[tuple[int, CallCounts], ...]] = ContextVar("jaxmem_guards", default=())
_Function = TypeVar("_Function", bound=Callable[..., Any])


def oom_guard(
    monitor: Monitored | None = None,
    *,
    outdir: str | os.PathLike[str] | None = None,
    plan_seconds: float = 60.0,
    keep: int = 10,
) -> OomGuard:
    """Explains an out-of-memory failure, at compile or run time, and raises the same exception again.

        with jm.oom_guard():
            for batch in batches:
                state, metrics = step(state, batch)

    Also a decorator: ``@jm.oom_guard(plan_seconds=0)``. Every failure becomes one new folder with ``report.md``,
    ``report.html`` and ``facts.json``; lines on stderr name its cause, the best remedy and the folder. Other exceptions pass
    untouched. No environment variable, argument or text that looks like a secret is written.

    Args:
        monitor: A `jm.MemoryMonitor` whose last readings and events are reported. A monitor's own ``with`` is a guard already.
        outdir: Where the folder is made. None: next to the monitor's ``logdir``, as ``<logdir>-oom``, else ``./oom``.
        plan_seconds: For how many seconds the failed step may be compiled under other policies, to predict what they save; 0
            for not at all.
        keep: How many reports of this process stay in ``outdir``; the oldest go, and nothing else.

    Returns:
        The guard. It may be entered again, nested, and in several threads.

    Raises:
        TypeError: a monitor, a folder or a number that is none, or a decorated function that only begins when it is iterated.
        ValueError: ``plan_seconds`` or ``keep`` that make no sense.
    """
    if monitor is not None and not callable(getattr(monitor, "witnessed", None)):
        msg = (
            f"oom_guard got {type(monitor).__name__} as its monitor. Expected a jm.MemoryMonitor or None; a folder is given by "
            f"name: {advise('guard.call', arguments=_REPORTS)}."
        )
        raise TypeError(msg)
    require("oom_guard", "plan_seconds", plan_seconds, numbers.Real, "seconds from 0 on, such as plan_seconds=60")
    if not 0 <= plan_seconds < math.inf:
        msg = f"oom_guard: plan_seconds={plan_seconds!r}. Expected seconds from 0 on, such as plan_seconds=60."
        raise ValueError(msg)
    if isinstance(keep, bool) or require_whole("oom_guard", "keep", keep) < 1:
        msg = f"oom_guard: keep={keep!r}. Expected a number of reports of at least 1, such as keep=10."
        raise ValueError(msg)
    place = None if outdir is None else require_path("oom_guard", "outdir", outdir, "reports")
    return OomGuard(monitor, ReportSettings(outdir=place, plan_seconds=plan_seconds, keep=keep))


@final
class OomGuard:
    """What `jm.oom_guard` returns.

    Args:
        monitor: The monitor of the run, or None.
        settings: Where and how reports are written.
    """

    def __init__(self, monitor: Monitored | None, settings: ReportSettings) -> None:
        self._monitor, self._settings = monitor, settings
        self._reserve = MemoryReserve()

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), (id(self), CallCounts())))
        self._reserve.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserve.release()  # before anything that takes memory
        before = self._left()
        if error is not None:
            report_oom(error, self._settings, self._monitor, before)

    def _left(self) -> CallCounts | None:
        """The calls of steps before this guard was entered, by the same thread or task; None where another one entered it."""
        entered = _entered.get()
        at = next((at for at in reversed(range(len(entered))) if entered[at][0] == id(self)), None)
        if at is None:
            return None
        _entered.set(entered[:at] + entered[at + 1 :])
        return entered[at][1]

    def __call__(self, function: _Function) -> _Function:
        """The function, guarded at every call.

        Raises:
            TypeError: a generator function, whose body runs long after its call.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(function, "__name__", "the function")
            msg = (
                f"oom_guard cannot guard {name} as a decorator: it is a generator function, and its body runs when it is "
                f"iterated. Write around the loop instead: with {advise('guard.call', arguments=_REPORTS)}:"
            )
            raise TypeError(msg)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("_Function", awaited)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("_Function", guarded)
