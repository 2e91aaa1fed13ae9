"""What the monitor reads: metrics and heap maps on the training thread, probes on its own."""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from jaxmem_callbacks.analysis.observation import Compiled, Metrics, Observation
from jaxmem_callbacks.analysis.timeseries import PICTURES, RateLimiter
from jaxmem_callbacks.callbacks.background import Faults
from jaxmem_callbacks.probes.allocations import AllocationsProbe
from jaxmem_callbacks.probes.device_memory import AllocatorProbe, DriverProbe, Snapshot
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.probes.jax_events import ProgramsProbe, SavesProbe, SaveTimes
from jaxmem_callbacks.probes.live_arrays import HeapProbe
from jaxmem_callbacks.probes.protocol import Probe, Seen
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import Reading, SaveSpan, Unavailable
from jaxmem_callbacks.records.traces import TraceEvent

ONLY = "metric"  # the name of a metric that was handed over without one


def scalars_of(metrics: Any, skipped: set[str], prefix: str = "") -> dict[str, Any]:
    """The scalars among the metrics, unread: nothing larger is ever held.

    Args:
        metrics: A mapping of scalars, nested or not, or one scalar.
        skipped: Names of what is no scalar are added here.
        prefix: Of the names, in recursion.
    """
    if not isinstance(metrics, Mapping):
        if _is_scalar(metrics):
            return {ONLY: metrics}
        skipped.add(f"{type(metrics).__name__} (expected a mapping of names to scalars)")
        return {}
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if _is_scalar(value):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found.update(scalars_of(value, skipped, f"{prefix}{name}/"))
        else:
            skipped.add(f"{prefix}{name}")
    return found


def all_ready(values: Mapping[str, Any]) -> bool:
    """Whether reading these would wait for nothing."""
    return all(_is_ready(value) for value in values.values())


def read_metrics(values: Mapping[str, Any], skipped: set[str]) -> dict[str, float]:
    """Ready values as floats; what was deleted meanwhile is left out, what is no number is added to ``skipped``.

    The caller allows this thread's transfers.
    """
    floats: dict[str, float] = {}
    for name, value in values.items():
        try:
            floats[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            skipped.add(name)
        except RuntimeError:  # deleted or donated meanwhile
            continue
    return floats


def _is_scalar(value: Any) -> bool:
    return type(value) in (float, int, bool) or getattr(value, "shape", None) == ()


def _is_ready(value: Any) -> bool:
    is_ready, is_deleted = getattr(value, "is_ready", None), getattr(value, "is_deleted", None)
    if is_ready is None:
        return True
    # A deleted array is never asked: jaxlib 0.10.2 crashes the process in is_ready(). Reading it raises without waiting.
    try:
        return (is_deleted is not None and is_deleted()) or bool(is_ready())
    except RuntimeError:  # deleted between the two
        return True


NEVER = math.inf


@final
@dataclass(slots=True)
class DueTimes:
    """From when on a call of the hook has more to do than to stamp its step, in seconds since the epoch.

    A time that is past means "at the next call". The monitor's thread may bring a time forward; the training thread does the work
    and puts it off.

    Attributes:
        next_s: The earliest of all: the one number that the hook compares. Before it there is nothing to sample either.
        rare_s: The earliest of those below.
        start_s: The monitor's thread is to be started.
        trace_s: Allocations are to be recorded; at every call while a trace is taken.
        heap_map_s: Addresses of arrays are to be read.
        raise_s: Faults are to be raised; at every call with ``on_error="raise"``.
    """

    next_s: float = 0.0
    rare_s: float = 0.0
    start_s: float = 0.0
    trace_s: float = NEVER
    heap_map_s: float = NEVER
    raise_s: float = NEVER

    def ask_heap_map(self) -> None:
        """Let the next call take a heap map."""
        self.heap_map_s = self.rare_s = self.next_s = 0.0

    def settle(self) -> None:
        """Find the earliest again, after some of it was done."""
        self.rare_s = min(self.start_s, self.trace_s, self.heap_map_s, self.raise_s)


_CLEARLY_MORE = 1.05  # a run that grows and grows has some ninety maps from 1 GiB to 80 GiB


@final
class HeapMaps:
    """The latest maps that were not collected yet.

    Args:
        every_s: Seconds between two that are taken by themselves, at first.
        faults: Reports a probe that raises.

    Attributes:
        is_wanted: Whether the next call of the hook is to take one, as of the last look.
    """

    def __init__(self, every_s: float, faults: Faults) -> None:
        self.is_wanted = False
        self._spans = RateLimiter(every_s, PICTURES)
        self._spans.begin(time.monotonic())
        self._faults = faults
        self._probe = HeapProbe()
        self._taken: tuple[HeapMap | Unavailable, ...] = ()
        self._most_bytes = 0
        self._drawn = False

    def take(self, step: int, *, drawn: bool = False) -> None:
        """Read the addresses now, on the caller's thread; ``drawn`` where there is to be a picture, whatever the time."""
        self._drawn |= drawn
        self._taken = tuple(self._faults.attempt("the heap map", self._probe.read, step, default=()))

    def collect(self, live_bytes: int = 0) -> tuple[Sequence[HeapMap], Sequence[Unavailable], bool]:
        """What was taken since the last time: maps, why there are none, and whether to draw them.

        The next one is wanted once a span, and when live arrays hold clearly more than ever before. The latter is not
        drawn, since a run that begins or grows has many of them, and a picture takes a tenth of a second.

        Args:
            live_bytes: The most that live arrays hold on one device now; 0 where they were not looked at.
        """
        now = time.monotonic()
        due, grown = self._spans.is_over(now), live_bytes > _CLEARLY_MORE * self._most_bytes
        if due:
            self._spans.begin(now)
        if grown:
            self._most_bytes = live_bytes
        taken, self._taken = self._taken, ()
        drawn = self._drawn and bool(taken)
        self._drawn = due or (self._drawn and not taken)
        self.is_wanted = due or grown
        maps = [each for each in taken if isinstance(each, HeapMap)]
        return maps, [each for each in taken if isinstance(each, Unavailable)], drawn


MOST_ARRAYS = 5000  # looking at so many takes some milliseconds of every step
MOST_EVENTS = 500_000  # some 40 MB of lines


@final
class Traces:
    """Takes the trace of a run's first calls.

    Args:
        steps: How many calls; 0 for none.
        faults: Reports a probe that raises and a trace that ends early.
        due: Its ``trace_s`` is now until the last of these calls.
        has_folder: Whether there is a folder to write it to.
    """

    def __init__(self, steps: int, faults: Faults, due: DueTimes, *, has_folder: bool) -> None:
        self._left = steps if has_folder else 0
        self._due = due
        due.trace_s = 0.0 if self._left else NEVER
        self._faults = faults
        self._probe: AllocationsProbe | None = None
        self._events = 0
        self._taken: deque[TraceEvent] = deque()
        if steps and not has_folder:
            faults.note("trace", "trace_steps is set, and without a logdir there is no file to write a trace to.")

    def take(self, step: int) -> None:
        """Look at what changed since the last call, on the caller's thread."""
        self._left = self._faults.attempt("the trace of allocations", self._take, step, default=0)
        if not self._left:
            self._due.trace_s = NEVER

    def collect(self) -> tuple[TraceEvent, ...]:
        """What was taken since the last time."""
        return tuple(self._taken.popleft() for _ in range(len(self._taken)))

    def _take(self, step: int) -> int:
        """Calls that are left to look at."""
        if self._probe is None:
            if jax.process_index() != 0:  # nobody else writes
                return 0
            self._probe = AllocationsProbe()
        events, alive = self._probe.read(step)
        self._taken.extend(events)
        self._events += len(events)
        if alive <= MOST_ARRAYS and self._events <= MOST_EVENTS:
            return self._left - 1
        why = f"{alive} arrays are alive" if alive > MOST_ARRAYS else f"it has {self._events} events"
        self._faults.note(
            "trace", f"the trace of allocations ends at step {step}: {why}, and more would hold the run up."
        )
        return 0


_RING = 4096  # stamps between two looks; 40 seconds of 10 ms steps
_HELD = 2  # steps whose metric scalars are held
_AHEAD = 2  # steps before a look from which on they are held
_FEW = 4  # steps between two looks, up to which all are held
_LONG_S = 0.02  # of a probe, from which on it may take no more than this share of the time
_SHARE = 0.01
_LAST_WAIT_S = 0.5  # at close, for the metrics of steps still running


Stamp = tuple[int, int, float]  # its number among all calls, step, time
# The same and the unread scalars of one step.
Held = tuple[int, int, float, dict[str, Any]]


@final
class Sampler:
    """Collects what there is to see.

    Args:
        settings: Cadences.
        probes: Read on the monitor's thread when a scan is due; an ``AllocatorProbe`` among them on the training thread.
        faults: Reports probes that raise.
        look_s: Seconds between two calls of ``collect``.
        has_folder: Whether there is a folder that a trace of allocations can be written to.

    Attributes:
        ring: The stamps that are not collected yet; the hook appends to it.
        due: What the training thread has to do.
        heaps: Heap maps, taken on the training thread.
        traces: The trace of allocations, taken on the training thread.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        *,
        probes: Sequence[Probe],
        faults: Faults,
        look_s: float,
        has_folder: bool = False,
    ) -> None:
        self._settings = settings
        self._allocator = next((probe for probe in probes if isinstance(probe, AllocatorProbe)), None)
        self._each_step = self._allocator  # None once it is known that no device here reports anything
        self._probes = tuple(probe for probe in probes if probe is not self._allocator)
        self._cadences: dict[type, float] = {
            HostProbe: settings.scan_s if settings.host_s is None else settings.host_s,
            DriverProbe: settings.driver_s,
        }
        self._next_s: dict[Probe, float] = {}
        self._resting: dict[Probe, float] = {}  # those that took long, and until when they are not read
        self._programs, self._saves = ProgramsProbe(), SavesProbe()
        self._faults = faults
        self._look_s = look_s
        self.due = DueTimes(raise_s=0.0 if faults.raises else NEVER)
        self.heaps = HeapMaps(settings.heap_map_s, faults)
        self.traces = Traces(settings.trace_steps, faults, self.due, has_folder=has_folder)
        self.ring: deque[Stamp] = deque(maxlen=_RING)
        self._snapshots: deque[tuple[int, float, Snapshot]] = deque(maxlen=_RING)
        self._held: deque[Held] = deque(maxlen=_HELD)
        self._awaited: tuple[Held, ...] = ()  # one step's, that were not ready when they were looked at
        self._skipped: set[str] = set()
        self._takes_metrics = True
        self._marks: list[tuple[float, int]] = []  # time and step of the latest stamps taken
        self._waiting: list[Compilation] = []
        self._taken = self._dropped = self._read_serial = 0
        self._step = -1
        self._made_s = time.time()
        self._next_scan_s = self._hold_from_s = 0.0

    def start(self) -> None:
        """Begin to listen to compiles and saves."""
        self._programs.start()
        self._saves.start()

    def stop(self) -> None:
        """Listen no longer."""
        self._programs.stop()
        self._saves.stop()

    def sample(self, serial: int, step: int, now: float, metrics: Any) -> None:
        """On the training thread: read the allocator, hold metrics when the next look is near, let go of older ones."""
        if self._each_step is not None:
            self._snapshot(self._each_step, serial, step, now)
        elif now < self._hold_from_s and not self._held:
            self.due.next_s = min(self._hold_from_s, self.due.rare_s)
        if metrics is not None and now >= self._hold_from_s and self._takes_metrics:
            self._hold(serial, step, now, metrics)
        elif self._held and self._held[0][0] <= serial - _HELD:
            self._held.popleft()

    def _hold(self, serial: int, step: int, now: float, metrics: Any) -> None:
        try:
            self._held.append((serial, step, now, scalars_of(metrics, self._skipped)))
        except Exception as error:  # noqa: BLE001 - an odd metric takes nothing else with it
            self._takes_metrics = False
            self._faults.report("taking metrics", error)

    def _snapshot(self, allocator: AllocatorProbe, serial: int, step: int, now: float) -> None:
        if (serial - 1) % self._settings.every_steps:
            return
        snapshot = allocator.snapshot()
        if snapshot:
            self._snapshots.append((step, now, snapshot))
        if not allocator.reports:
            self._each_step = None

    def number(self, step: Any) -> int:
        """A step that is no Python int, as one; nothing on a device is read."""
        kind = "a jax.Array, and reading it would wait for the device"
        if not hasattr(step, "is_ready"):
            try:
                return int(step)
            except (TypeError, ValueError, OverflowError):
                kind = f"{type(step).__name__}, which is no number"
        self._faults.note(
            "step",
            f"the step was given as {kind}; the monitor counts calls instead. Give it a Python int: monitor(i, metrics).",
        )
        return (self.ring[-1][1] if self.ring else self._step) + 1

    def collect(self, *, scan: bool = False) -> Observation:
        """Everything since the last look; the more expensive probes are read when due, or now with ``scan``."""
        stamps = self._drain()
        self._hold_from_s = _hold_from(stamps, self._look_s)
        self.due.next_s = 0.0
        seen: list[Seen] = []
        for step, time_s, snapshot in [self._snapshots.popleft() for _ in range(len(self._snapshots))]:
            if self._allocator is not None:
                seen.extend(self._allocator.readings(step, time_s, snapshot))
        if scan or time.monotonic() >= self._next_scan_s:
            self._next_scan_s = time.monotonic() + self._settings.scan_s
            seen.extend(self._scan(whole=scan))
        elif self._saves.running:  # the training thread may not come by, and this costs microseconds
            seen.extend(self._cheap())
        live = (each.live_array_bytes or 0 for each in seen if isinstance(each, Reading))
        heaps, no_heaps, draws_heap = self.heaps.collect(max(live, default=0))
        return Observation(
            step=self._step,
            time_s=time.time(),
            readings=[each for each in seen if isinstance(each, Reading)],
            unavailable=[*(each for each in seen if isinstance(each, Unavailable)), *no_heaps],
            arrays=next((each for each in seen if isinstance(each, ArrayCensus)), None),
            compilations=self._faults.attempt("learning of compiles", self._compiled, scan, default=()),
            metrics=self._faults.attempt("reading metrics", self._ready_metrics, default=()),
            dropped=self._dropped,
            heaps=heaps,
            draws_heap=draws_heap,
            trace=self.traces.collect(),
            saves=self._spans_of(self._saves.drain()),
        )

    def _spans_of(self, heard: Iterable[SaveTimes]) -> list[SaveSpan]:
        """Saves with the step that was the latest when each began."""
        found: list[SaveSpan] = []
        for began_s, ended_s, background in heard:
            at = bisect.bisect_left(self._marks, (began_s, -1))
            step = self._marks[at - 1][1] if at else -1
            found.append(SaveSpan(began_s=began_s, ended_s=ended_s, first_step=step, background=background))
        return found

    def latest_step(self) -> int:
        """The latest step that was stamped, or -1."""
        with contextlib.suppress(IndexError):  # drained meanwhile
            return self.ring[-1][1]
        return self._step

    def now(self) -> list[Reading]:
        """Allocator readings of this moment, where there are any; a few microseconds a device."""
        seen = self._allocator.read(self._step) if self._allocator is not None else ()
        return [each for each in seen if isinstance(each, Reading)]

    def take_last(self) -> None:
        """At the end of a run, wait a moment for the metrics of running steps, and take a heap map."""
        self._faults.attempt("waiting for metrics", self._wait_for_metrics, default=None)
        self.heaps.take(self.latest_step(), drawn=True)

    def _wait_for_metrics(self) -> None:
        """Give the metrics of running steps a moment, by looking at them; no device is waited for."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while time.monotonic() < deadline and not all(
            all_ready(values) for *_, values in (*self._awaited, *self._held)
        ):
            time.sleep(0.005)

    def let_go(self) -> None:
        """Hold no metric any longer."""
        self._held.clear()
        self._awaited = ()

    def _drain(self) -> list[Stamp]:
        # The length is taken once: what comes meanwhile is for the next look.
        stamps = [self.ring.popleft() for _ in range(len(self.ring))]
        if stamps:
            self._taken += len(stamps)
            last, self._step, _ = stamps[-1]
            self._dropped = last - self._taken
        self._marks = (self._marks + [(time_s, step) for _, step, time_s in stamps])[-_RING:]
        return stamps

    def _scan(self, *, whole: bool) -> list[Seen]:
        seen: list[Seen] = []
        if self._allocator is not None and not self._allocator.reports:
            seen.extend(self._allocator.readings(self._step, time.time(), ()))
        for probe in self._probes:
            if whole or self._is_due(probe):
                seen.extend(self._read(probe))
        return seen

    def _cheap(self) -> list[Seen]:
        hosts = [probe for probe in self._probes if isinstance(probe, HostProbe)]
        return [*self.now(), *(each for host in hosts for each in self._read(host))]

    def _is_due(self, probe: Probe) -> bool:
        """Whether a probe is read at this scan: one with a cadence of its own when that is over, and none that rests."""
        now, every_s = time.monotonic(), self._cadences.get(type(probe), 0.0)
        if now < max(self._resting.get(probe, 0.0), self._next_s.get(probe, 0.0)):
            return False
        self._next_s[probe] = now + every_s
        return True

    def _read(self, probe: Probe) -> Sequence[Seen]:
        """One probe's readings; one that takes long rests afterwards, because this thread takes turns with the training's."""
        name = type(probe).__name__
        began_s = time.thread_time()
        # A probe of the user's may return anything: what is no sequence is that probe's fault, not the monitor's.
        seen = self._faults.attempt(f"the probe {name}", lambda: tuple(probe.read(self._step)), default=())
        took_s = time.thread_time() - began_s
        rest_s = took_s / _SHARE
        if took_s > _LONG_S and rest_s > self._settings.scan_s:
            self._resting[probe] = time.monotonic() + rest_s
            self._faults.note(
                f"rest of {name}",
                f"the probe {name} is read every {rest_s:.0f} s instead of every {self._settings.scan_s:g} s: it takes "
                f"{took_s:.2f} s here.",
            )
        return seen

    def _let_go_of(self, serial: int) -> None:
        """What was read, here rather than on the training thread, where it costs the next step the time of freeing it."""
        with contextlib.suppress(IndexError):  # none is left, or the training thread was first
            while self._held[0][0] <= serial:
                self._held.popleft()

    def _compiled(self, scan: bool) -> list[Compiled]:  # noqa: FBT001 - passed on by Faults.attempt
        """Compiles whose step is known: the one that is stamped next. With ``scan`` also those that no stamp followed."""
        self._waiting.extend(self._programs.drain(settle_s=0.0) if scan else self._programs.drain())
        stamped_s = self._marks[-1][0] if self._marks else 0.0
        ready = [each for each in self._waiting if scan or each.time_s <= stamped_s]
        self._waiting = [each for each in self._waiting if each not in ready]
        return [Compiled(step=self._step_at(each.time_s), compilation=each) for each in ready]

    def _step_at(self, time_s: float) -> int:
        if time_s < self._made_s:  # compiled earlier, in use only now
            return self._step
        at = bisect.bisect_left(self._marks, (time_s, -1))
        return self._marks[at][1] if at < len(self._marks) else self._step

    def _ready_metrics(self) -> list[Metrics]:
        found: list[Metrics] = []
        held = tuple(self._held)
        # Only this thread's guard is opened: a guard that the user set for the whole process is about his own code.
        with jax.transfer_guard("allow"):
            for serial, step, time_s, values in (*self._awaited, *held):
                if serial > self._read_serial and all_ready(values):
                    self._read_serial = serial
                    floats = read_metrics(values, self._skipped)
                    found.append(Metrics(step=step, time_s=time_s, values=floats))
                    self._let_go_of(serial)
        # Of a loop dispatched far ahead of the device the last two steps are never ready: one is waited for, look by look.
        waiting = [each for each in (*self._awaited, *held) if each[0] > self._read_serial]
        self._awaited = tuple(waiting[:1])
        for name in tuple(self._skipped):
            self._faults.note(f"metric {name}", f"the metric {name} is not shown: only scalars are kept.")
        return found


def _hold_from(stamps: Sequence[Stamp], look_s: float) -> float:
    """From when on the hook holds metrics: shortly before the next look, or always where steps are long or their pace is unknown.

    Letting go of an array frees it on the training thread; at a fast pace only the few steps that will be read pay for that.
    """
    if len(stamps) <= _FEW:
        return 0.0
    pace_s = (stamps[-1][2] - stamps[0][2]) / (len(stamps) - 1)
    return time.time() + look_s - _AHEAD * pace_s
