"""`MemoryMonitor`: a hook for the training loop. Sampler, detectors and recorder, joined."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast, final

from jaxmem_callbacks._compat.trace_state import is_traced
from jaxmem_callbacks.analysis.array_detectors import (
    GrowthDetector,
    HostGrowthDetector,
    ImbalanceDetector,
    ReplicationDetector,
)
from jaxmem_callbacks.analysis.compile_detectors import DonationDetector, PlanDetector, RecompilationDetector
from jaxmem_callbacks.analysis.limit_detectors import FragmentationDetector, NearOomDetector
from jaxmem_callbacks.analysis.observation import Detector
from jaxmem_callbacks.callbacks.background import PATIENCE_S, SHORT_S, Faults, Ticker
from jaxmem_callbacks.callbacks.config import monitor_arguments
from jaxmem_callbacks.callbacks.cross_process import Exchange
from jaxmem_callbacks.callbacks.mirror import PART_BYTES, Mirror
from jaxmem_callbacks.callbacks.recorder import Outputs, Recorder
from jaxmem_callbacks.callbacks.sampler import NEVER, DueTimes, Sampler, Stamp
from jaxmem_callbacks.config.named import Name
from jaxmem_callbacks.environment.apply import verify
from jaxmem_callbacks.environment.process import process_facts
from jaxmem_callbacks.probes.device_memory import AllocatorProbe, DriverProbe, devices_here
from jaxmem_callbacks.probes.host import HostProbe, largest_containers
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.probes.memory_profile import NearOomProfiles
from jaxmem_callbacks.probes.protocol import Probe
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import require_callable
from jaxmem_callbacks.records.errors import EnvironmentSettingError, RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import MonitorSettings, Preset
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.recovery.monitor_snapshot import CallCounts, MemoryReserve, MonitorSnapshot
from jaxmem_callbacks.recovery.reporting import ReportSettings, report_last, report_oom
from jaxmem_callbacks.transforms.sharding.infer import would_split


def detectors_of(
    settings: MonitorSettings,
    *,
    split: str | None = None,
    plan: PlanRecord | None = None,
    versions: Mapping[str, str] | None = None,
    since_s: float = 0.0,
) -> tuple[Detector, ...]:
    """All of them, fresh.

    Args:
        settings: Their thresholds.
        split: How the policy splits the state over a mesh, or None.
        plan: What was planned of the step, or None.
        versions: Package -> version of the process, for a plan.
        since_s: When the run began: compiles before are history.
    """
    return (
        NearOomDetector(settings),
        FragmentationDetector(settings),
        GrowthDetector(settings),
        HostGrowthDetector(settings, largest_containers),
        DonationDetector(since_s=since_s),
        RecompilationDetector(since_s=since_s),
        ReplicationDetector(settings, split, would_split),
        ImbalanceDetector(settings),
        *([PlanDetector(plan, versions or {})] if plan is not None else []),
    )


_PART = "environment"


def report_environment(preset: Preset, faults: Faults) -> None:
    """Report what the runtime's own figures contradict; nothing where all holds or is unknown.

    Args:
        preset: With an environment.
        faults: Report it; with ``on_error="raise"`` the user's own thread raises ``EnvironmentSettingError``.
    """
    checks = verify(preset.environment, devices_here(), process_facts(started=True))
    broken = "; ".join(f"{check.setting}: {check.text}" for check in checks if check.outcome == "broken")
    if not broken:
        return
    more = advise("command.typed", typed="doctor --start")
    words = f"{preset.name}: the backend does not obey its environment. {broken}. `{more}` shows more."
    if faults.raises:
        faults.report(_PART, EnvironmentSettingError(words))
    else:
        faults.note(_PART, words)


_LOOK_S = 0.1
_Step = TypeVar("_Step", bound=Callable[..., Any])
_MAPPED = ("near_oom", "fragmentation", "growth")  # events at which the next call maps the heap


@final
class MemoryMonitor:
    """Watches the memory of a training run without disturbing it.

    Call it once for each step, ``monitor(step, metrics)``: the step's number, and its scalars by name or nothing. A call costs
    microseconds: it waits for no device, transfers nothing, compiles nothing and holds metric scalars for two steps at most. A
    part that fails is named once on stderr and switched off.

    Tags: ``memory/..._gib``, on the CPU ``..._mib`` (mean of a window; where values differed,
    ``window/memory/.../min`` and ``/max``), ``train/<metric>``, ``memory/events``, ``memory/known_here``,
    ``memory/checkpoint_saves``, ``memory/over_time``, ``memory/heap_map``; of a plan ``plan/frontier``,
    ``plan/candidates``, ``plan/where_figures_come_from``, ``memory/planned_gib/<step>``. docs/figures.md explains each.

    Args:
        preset: A ``Preset``, its name (several joined by ``+``) or path, ``MonitorSettings``, or None for the defaults.
        logdir: Folder for the event file and ``memory.jsonl``, which process 0 writes; others write events of their own, if any
            (docs/faults.md). None writes no files but the report of an out-of-memory failure that passes the monitor's
            ``with`` (docs/oom.md). An address such as ``gs://bucket/runs/a`` is written to through fsspec or etils.epath, by
            copies of a local folder (docs/faults.md).
        writer: The user's own logger, or several: see ``as_writer``. It is called from the monitor's thread.
        on_event: Called with each ``MemoryEvent`` of this process, on the monitor's thread, after the event was written. One that
            raises is reported once and switched off; one that hangs is left behind, as a writer is (docs/faults.md).
        plan: What `jm.plan` gave for the step, or the path of the JSON that a plan made elsewhere was saved to: the monitor
            writes its figure and table once at the start, warns when it is stale, and shows predicted with compiled bytes.
        probes: Replaces the built-in ones; read on the monitor's thread every ``scan_s`` seconds, except an ``AllocatorProbe``,
            which is read at every ``every_steps``-th call.

    Raises:
        TypeError: a preset, plan, writer, callable, probe or folder of another type.
        ValueError: settings out of range, a ``logdir`` that no installed package opens, or a path at which there is no plan.

    Example:
        >>> with MemoryMonitor() as monitor:
        ...     for step in range(3):
        ...         monitor(step, {"loss": 0.5})
        >>> monitor.events
        ()
    """

    _running = False  # also where the constructor refused its arguments

    def __init__(  # noqa: PLR0913 - each is a keyword
        self,
        preset: Preset | MonitorSettings | Name | None = None,
        *,
        logdir: str | os.PathLike[str] | None = None,
        writer: Any = None,
        on_event: Callable[[MemoryEvent], object] | None = None,
        plan: Any = None,
        probes: Sequence[Probe] | None = None,
    ) -> None:
        given = monitor_arguments(preset, logdir=logdir, writer=writer, on_event=on_event, plan=plan, probes=probes)
        settings, look_s = given.settings, min(_LOOK_S, given.settings.scan_s, given.settings.window_s)
        self._faults = Faults(settings.on_error)
        self._mirror = None if given.address is None else Mirror(*given.address, self._faults.print)
        folder = given.folder if self._mirror is None else self._mirror.folder
        if self._mirror is not None and settings.jsonl_part_bytes is None:
            settings = replace(settings, jsonl_part_bytes=PART_BYTES)
        self._sampler = Sampler(
            settings,
            probes=(AllocatorProbe(), LiveArraysProbe(), HostProbe(), DriverProbe())
            if given.probes is None
            else given.probes,
            faults=self._faults,
            look_s=look_s,
            has_folder=folder is not None,
        )
        self._detectors = detectors_of(
            settings, split=given.split, plan=given.plan, versions=given.versions, since_s=time.time()
        )
        shown = folder if given.address is None else given.address[0]
        outputs = Outputs(settings, folder, given.writers, self._faults, on_event=given.on_event, shown=shown)
        self._recorder = Recorder(settings, outputs, self._faults, look_s=look_s, plan=given.plan)
        self._exchange = None if settings.processes_s is None else Exchange(settings.processes_s, self._faults)
        self._profiles = (
            None if folder is None else NearOomProfiles(settings.near_oom_profiles, folder, shown or folder)
        )
        self._unverified = given.unverified
        self._logdir, self._reserve, self._before = given.folder, MemoryReserve(), CallCounts()
        self._ticker = Ticker(look_s, weakref.WeakMethod(self._try_look))
        self._at_exit = partial(_finish_at_exit, weakref.ref(self))
        self._pid = os.getpid()
        self._foreign: deque[MemoryEvent] = deque()
        self._count = 0
        self._clock = time.time
        self._append: Callable[[Stamp], None] = self._sampler.ring.append
        self._sample = self._sampler.sample
        self._due = self._sampler.due
        self._sampler.start()
        weakref.finalize(self, self._sampler.stop)

    def __call__(self, step: Any, metrics: Any = None) -> None:
        """Record that a step was dispatched.

        Args:
            step: Its number, a Python int.
            metrics: A mapping of names to scalars, on device or not; read later, when ready.
        """
        # CPU caches are cold here, so a call touches as few objects as possible: rare work is in `_do_rare`.
        try:
            now = self._clock()
            if type(step) is not int:
                step = self._sampler.number(step)
            self._count = serial = self._count + 1
            self._append((serial, step, now))
            due = self._due
            if now >= due.next_s:
                self._sample(serial, step, now, metrics)
                if now >= due.rare_s:
                    self._do_rare(due, step, now)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, training goes on
            self._switch_off()
            self._faults.report("the hook", error)
            self._faults.raise_pending()

    def on_step(self, info: Any, force: bool = False) -> None:  # noqa: FBT001, FBT002 - Levanter's hook signature
        """The hook for loops that hand over an object with ``step`` and perhaps ``loss`` (Levanter).

        At the end of a training Levanter calls every hook once more, by ``force``: a recorded step is not recorded again.
        """
        try:
            step, loss = info.step, getattr(info, "loss", None)
        except Exception as error:  # noqa: BLE001 - whatever the object raises, training goes on
            self._faults.report("the hook of what a loop hands over", error)
            self._faults.raise_pending()
            return
        if not force or step != self._sampler.latest_step():
            self(step, None if loss is None else {"loss": loss})

    def wrap(self, train_step: _Step, step: Callable[..., Any] | None = None) -> _Step:
        """A train step that records each of its calls, for a training loop that has no hooks (docs/frameworks.md).

        Put it in place of the function that the loop calls. It returns and raises what that function does, and has its
        attributes, such as ``lower``. Inside a trace nothing is recorded: wrap what ``jax.jit`` returned, not what it takes.

        Args:
            train_step: A jitted step, or a function that runs one.
            step: Called with the same arguments before each call; returns the step's number, a Python int. None counts calls
                from 0, as does one that raised.

        Raises:
            TypeError: an argument that cannot be called.

        Example:
            >>> import jax
            >>> with MemoryMonitor() as monitor:
            ...     train_step = monitor.wrap(jax.jit(lambda state, batch: state + batch))
            ...     state = train_step(train_step(0.0, 1.0), 2.0)
            >>> float(state)
            3.0
        """
        require_callable("MemoryMonitor.wrap", "train_step", train_step, "a jitted step, or a function that runs one")
        if step is not None:
            expected = "a function of the step's arguments that returns its number, or None"
            require_callable("MemoryMonitor.wrap", "step", step, expected)
        return cast("_Step", WrappedStep(train_step, step, self, self._faults))

    def sample(self, step: int) -> dict[str, float]:
        """Record that a step was dispatched and return what is known, for a logger of the caller's.

        Args:
            step: Its number.

        Returns:
            Tag -> value, such as ``memory/live_arrays_gib``, in GiB on the CPU too; unknown figures are absent.
            Figures that are costly to read are at most ``scan_s`` seconds old.
        """
        self(step)
        latest = self._faults.attempt("sampling", self._latest, default={})
        self._faults.raise_pending()
        return latest

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """The events so far, oldest first."""
        return self._recorder.events

    def witnessed(self) -> MonitorSnapshot:
        """What was seen so far, for the report of an out-of-memory failure (`jm.oom_guard`); it waits for nothing."""
        step = self._sampler.latest_step()
        return self._recorder.witnessed(self._logdir, step if step >= 0 else None)

    def tell(self, event: MemoryEvent) -> None:
        """Add an event from elsewhere, such as a recovery; it is written with the monitor's own at its next reading.

        Any thread.
        """
        self._foreign.append(event)

    def flush(self) -> None:
        """Look now, at everything, and write it; for the end of an epoch or a test, not for every step.

        Call it on the thread that calls the hook: it asks live arrays for their addresses.
        """
        self._take_heap(self._sampler.latest_step(), drawn=True)
        self._look_now()
        self._faults.raise_pending()

    def close(self) -> None:
        """Write what is left, close the files and end the thread; further calls do nothing."""
        self._finish()
        self._faults.raise_pending()

    def __del__(self) -> None:
        """A monitor that nobody holds any longer, as after a notebook's cell was run again, is closed."""
        if self._running:
            self._finish(wait=False)

    def __enter__(self) -> Self:
        self._reserve.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserve.release()
        if error is not None:
            report = report_oom(error, ReportSettings(), self, self._before)
            if report is not None:
                self._take_heap(self._sampler.latest_step(), drawn=True)
            if report is not None and self._mirror is not None and self._has_thread:
                self._faults.attempt("copying the failure's report", self._mirror.add, report, default=None)
        self._finish(wait=kind is None)
        if kind is None:
            self._faults.raise_pending()

    def _repr_html_(self) -> str | None:
        """The report of the run so far in a notebook, as `jaxmem report` writes it; None where no folder has its lines."""
        from jaxmem_callbacks.readers.runs import stories_of
        from jaxmem_callbacks.writers.report import framed_report

        folder = self._logdir if self._mirror is None else self._mirror.folder
        if folder is None:
            return None
        try:
            newest = stories_of(folder)[-1]
        except (RunFileError, OSError):  # such as before the first step
            return None
        return framed_report(newest, source=str(folder))

    def _latest(self) -> dict[str, float]:
        latest = self._recorder.latest(self._sampler.now())
        if not latest:
            self._look_now()
            latest = self._recorder.latest()
        return latest

    def _do_rare(self, due: DueTimes, step: int, now: float) -> None:
        """Do what few calls have to do."""
        if now >= due.start_s:
            due.start_s = NEVER
            self._start()
        if now >= due.trace_s:
            self._take_trace(due, step)
        if now >= due.heap_map_s:
            due.heap_map_s = NEVER
            if self._recorder.takes_pictures:
                self._take_heap(step)
        due.settle()
        if now >= due.raise_s:
            self._faults.raise_pending()

    def _start(self) -> None:
        if os.getpid() == self._pid:
            if self._mirror is not None:
                self._mirror.start()
            self._ticker.start()  # raises where no thread can be had: then nothing runs, and nobody waits for it
            self._running = True
            atexit.register(self._at_exit)

    def _take_trace(self, due: DueTimes, step: int) -> None:
        if self._has_thread:
            self._sampler.traces.take(step)
        else:
            due.trace_s = NEVER

    def _take_heap(self, step: int, *, drawn: bool = False) -> None:
        if self._has_thread:
            self._sampler.heaps.take(step, drawn=drawn)

    def _switch_off(self) -> None:
        self._append, self._due = _ignore, DueTimes(next_s=NEVER)

    @property
    def _has_thread(self) -> bool:
        return self._running and os.getpid() == self._pid  # a fork copies the monitor without its thread

    def _look_now(self) -> None:
        if self._has_thread and not self._ticker.run(partial(self._try_look, scan=True)):
            self._report_hang()

    def _try_look(self, *, scan: bool = False, last: bool = False) -> None:
        self._faults.attempt("the monitor", self._look, scan, last, default=None)
        if messages := self._faults.messages():
            self._faults.attempt(
                "reporting on itself",
                self._recorder.record_messages,
                messages,
                self._sampler.latest_step(),
                default=None,
            )

    def _look(self, scan: bool, last: bool) -> None:  # noqa: FBT001 - passed on by Faults.attempt
        if self._unverified is not None:  # only the first time: the backend has started by now
            preset, self._unverified = self._unverified, None
            self._faults.attempt("verifying the environment", report_environment, preset, self._faults, default=None)
        observation = self._sampler.collect(scan=scan or last)
        if self._exchange is not None:
            exchange = partial(self._exchange.turn, observation, wait=scan or last)
            observation = self._faults.attempt("the exchange with the other processes", exchange, default=observation)
        events = [self._foreign.popleft() for _ in range(len(self._foreign))]
        for detector in self._detectors:
            events.extend(self._faults.attempt(type(detector).__name__, detector.detect, observation, default=()))
        self._recorder.record(observation, events, last=last)
        # After the record, which opens the writers: before it nobody knows whether any of them shows a map.
        if self._sampler.heaps.is_wanted or any(event.kind in _MAPPED for event in events):
            self._sampler.due.ask_heap_map()
        if self._profiles is not None:
            self._faults.attempt("the profile near OOM", self._profiles.keep, events, default=None)

    def _finish(self, *, wait: bool = True) -> None:
        self._switch_off()
        self._sampler.stop()
        if not self._has_thread:
            if self._mirror is not None:
                self._mirror.discard()
            self._running = False
            return
        atexit.unregister(self._at_exit)
        if wait:
            self._sampler.take_last()
        if not self._ticker.stop(self._end):
            self._report_hang()
        if self._mirror is not None:
            self._mirror.finish(PATIENCE_S if wait else SHORT_S)
        self._running = False
        self._sampler.let_go()

    def _end(self) -> None:
        self._try_look(last=True)
        if self._exchange is not None:
            self._exchange.close()
        self._faults.attempt("closing the writers", self._recorder.close, default=None)

    def _report_hang(self) -> None:
        doing = self._faults.doing(self._ticker.ident)
        self._faults.note(
            "hanging",
            f"{doing or 'the monitor'} hangs and is left behind: what it did not take is not written.",
        )


def _ignore(stamp: Stamp) -> None:
    """The ring of a monitor that is closed or switched off."""


def _finish_at_exit(monitor: weakref.ref[MemoryMonitor]) -> None:
    alive = monitor()
    if alive is not None:
        report_last(alive)
        alive.close()


# They have `__get__`, which binds them to nothing.
_BOUND = (types.MethodType, staticmethod)


@final
class WrappedStep:
    """A function that calls the monitor after each of its own calls, and otherwise stands for the function that it wraps.

    Its attributes are that function's, such as ``lower`` of a jitted one; in a class it is a method where that function is one.
    Inside a trace, where no step runs, the monitor is not called.

    Args:
        function: What is called. Its result and its exceptions are the caller's.
        number: The number of a step by the arguments of the call; calls are counted from 0 where it is None or fails.
        record: Called with the number after the call.
        faults: Where an exception of ``number`` is reported.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        number: Callable[..., Any] | None,
        record: Callable[[Any], None],
        faults: Faults,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._number, self._record, self._faults = function, number, record, faults
        self._counted = itertools.count()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result."""
        if is_traced(args, kwargs):
            self._faults.note(
                f"{self._name} in a trace",
                f"{self._name} was called inside a trace, where no step runs, and is not counted there. Where no step is "
                "counted at all, wrap the jitted function and not the one that is jitted.",
            )
            return self._function(*args, **kwargs)
        step = self._numbered(args, kwargs)  # before the call, which may donate its arguments or change them
        result = self._function(*args, **kwargs)
        self._record(step)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, where the wrapped function would be one."""
        binds = hasattr(type(self._function), "__get__") and not isinstance(self._function, _BOUND)
        return types.MethodType(self, instance) if binds and instance is not None else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_function"), name)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def _numbered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted = next(self._counted)
        if self._number is None:
            return counted
        number = functools.partial(self._number, *args, **kwargs)
        return self._faults.attempt(f"the step's number of {self._name}", number, default=counted)
