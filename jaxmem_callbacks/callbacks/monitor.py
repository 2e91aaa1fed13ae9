"""MemoryMonitor: sampler, detectors and recorder joined. Enters: a call a step; leaves: TensorBoard, JSON lines, events.

The call only stamps the step. A daemon thread looks ten times a second, reads what is dearer, judges and writes.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from jaxmem_callbacks.callbacks.detectors import detectors_of
from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.callbacks.opening import Opening
from jaxmem_callbacks.callbacks.recorder import Recorder
from jaxmem_callbacks.callbacks.sampler import Sampler
from jaxmem_callbacks.callbacks.ticker import Ticker
from jaxmem_callbacks.callbacks.wanted import folder_of, plan_of, settings_of, split_of, versions_now, writers_of
from jaxmem_callbacks.probes.allocator import AllocatorProbe
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.probes.programs import ProgramsProbe
from jaxmem_callbacks.probes.protocol import Probe
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.records.settings import MonitorSettings

_LOOK_S = 0.1


@final
class MemoryMonitor:
    """Watches the memory of a training run without disturbing it.

    A call costs microseconds: it waits for no device, transfers nothing, compiles nothing and holds metric scalars for two
    steps at most. A part that fails is named once on stderr and switched off.

    Tags: ``memory/..._gib`` (mean of a window; ``/min`` and ``/max`` where there were several values or devices),
    ``train/<metric>``, ``memory/events``, ``memory/known_here``, ``memory/over_time``; of a plan
    ``plan/frontier``, ``plan/candidates``, ``plan/where_figures_come_from``, ``memory/planned_gib/<step>``.

    Args:
        preset: A ``Preset``, its name, ``MonitorSettings``, or None for the defaults.
        logdir: Folder for the event file and ``memory.jsonl``; None writes no files.
        writer: The user's own logger, or several: see ``as_writer``. It is called from the monitor's thread.
        plan: What `jm.plan` gave for the step: the monitor writes its figure and table once at the start, says when it is
            stale, and shows predicted beside compiled bytes.
        probes: Replaces the built-in ones; read on the monitor's thread every ``scan_s`` seconds, except an ``AllocatorProbe``,
            which is read at every ``every_steps``-th call.

    Raises:
        TypeError: a preset, plan or writer that is none.
        ValueError: settings out of range, or a ``logdir`` that is no local folder.

    Example:
        >>> with MemoryMonitor() as monitor:
        ...     for step in range(3):
        ...         monitor(step, {"loss": 0.5})
        >>> monitor.events
        ()
    """

    def __init__(
        self,
        preset: Preset | MonitorSettings | str | None = None,
        *,
        logdir: str | os.PathLike[str] | None = None,
        writer: Any = None,
        plan: Any = None,
        probes: Sequence[Probe] | None = None,
    ) -> None:
        planned = plan_of(plan)
        settings = settings_of(preset)
        folder: Path | None = folder_of(logdir)
        self._faults = Faults(settings.on_error)
        look_s = min(_LOOK_S, settings.scan_s, settings.window_s)
        self._programs = ProgramsProbe()
        self._sampler = Sampler(
            settings,
            probes=(AllocatorProbe(), LiveArraysProbe(), HostProbe()) if probes is None else probes,
            programs=self._programs,
            faults=self._faults,
            look_s=look_s,
        )
        self._detectors = detectors_of(
            settings, split=split_of(preset), plan=planned, versions=versions_now(), since_s=time.time()
        )
        opening = Opening(settings=settings, logdir=folder, writers=writers_of(writer), faults=self._faults)
        self._recorder = Recorder(settings, opening.open, self._faults, look_s=look_s, plan=planned)
        self._ticker = Ticker(look_s, self._try_look)
        self._look_lock = threading.Lock()
        self._pid = os.getpid()
        self._running = False
        self._stamp: Callable[[Any, Any], None] = self._first_stamp
        self._programs.start()
        weakref.finalize(self, self._programs.stop)

    def __call__(self, step: Any, metrics: Any = None) -> None:
        """Say that a step was dispatched.

        Args:
            step: Its number, a Python int.
            metrics: A mapping of names to scalars, on device or not; read later, when ready.
        """
        try:
            self._stamp(step, metrics)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, training goes on
            self._stamp = _ignore
            self._faults.report("the hook", error)
        if self._faults.pending is not None:
            self._faults.raise_pending()

    def on_step(self, info: Any, force: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - Levanter's hook signature
        """The hook for loops that hand over an object with ``step`` and perhaps ``loss`` (Levanter)."""
        loss = getattr(info, "loss", None)
        self(info.step, None if loss is None else {"loss": loss})

    def sample(self, step: int) -> dict[str, float]:
        """Say that a step was dispatched and return what is known, for a logger of the caller's.

        Args:
            step: Its number.

        Returns:
            Tag -> value, such as ``memory/live_arrays_gib``; unknown figures are absent. Dear figures are at most
            ``scan_s`` old.
        """
        self(step)
        latest = self._faults.attempt("sampling", self._latest, default={})
        self._faults.raise_pending()
        return latest

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """The events so far, oldest first."""
        return self._recorder.events

    def flush(self) -> None:
        """Look now, at everything, and write it; for the end of an epoch or a test, not for every step."""
        self._try_look(scan=True)
        self._faults.raise_pending()

    def close(self) -> None:
        """Write what is left and let go of files and thread; further calls do nothing."""
        self._finish()
        self._faults.raise_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(wait=kind is None)
        if kind is None:
            self._faults.raise_pending()

    def _latest(self) -> dict[str, float]:
        latest = self._recorder.latest(self._sampler.now())
        if not latest:
            self._try_look(scan=True)
            latest = self._recorder.latest()
        return latest

    def _first_stamp(self, step: Any, metrics: Any) -> None:
        self._stamp = self._sampler.stamp
        self._stamp(step, metrics)
        self._running = os.getpid() == self._pid
        if self._running:
            atexit.register(self._finish)
            self._ticker.start()

    def _try_look(self, *, scan: bool = False, last: bool = False) -> None:
        # After a fork there is no such thread, and a lock that it held at that moment stays locked.
        if self._running and os.getpid() == self._pid:
            self._faults.attempt("the monitor", self._look, scan, last, default=None)

    def _look(self, scan: bool, last: bool) -> None:  # noqa: FBT001 - passed on by Faults.attempt
        with self._look_lock:
            observation = self._sampler.collect(scan=scan or last)
            events: list[MemoryEvent] = []
            for detector in self._detectors:
                events.extend(self._faults.attempt(type(detector).__name__, detector.detect, observation, default=()))
            self._recorder.record(observation, events, last=last)

    def _finish(self, *, wait: bool = True) -> None:
        self._stamp = _ignore
        self._programs.stop()
        if not self._running or os.getpid() != self._pid:
            return
        atexit.unregister(self._finish)
        if not self._ticker.stop():
            self._faults.say("a writer hangs; the monitor's last window is not written.")
            self._running = False
            return
        if wait:
            self._sampler.wait_for_metrics()
        self._try_look(last=True)
        self._running = False
        self._sampler.let_go()
        self._faults.attempt("closing the writers", self._recorder.close, default=None)


def _ignore(step: Any, metrics: Any) -> None:
    """The hook of a monitor that is closed or switched off."""
