"""Windows, tables, figures and events of a run, handed to its writers; and the folder in which these write.

Runs on the monitor's own thread only. A writer that raises is switched off by itself; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import jax

import jaxmem_callbacks
from jaxmem_callbacks.analysis.figures import (
    ERROR,
    PRESET_LIMIT,
    PROGRAM,
    ByteUnit,
    History,
    Windows,
    across_scalars,
    byte_unit,
    values_of,
    window_in,
)
from jaxmem_callbacks.analysis.observation import Metrics, Observation
from jaxmem_callbacks.analysis.run_summary import COLUMNS, DURING, MetricAvailability, Saves
from jaxmem_callbacks.analysis.timeseries import PICTURES, RateLimiter
from jaxmem_callbacks.callbacks.background import Faults
from jaxmem_callbacks.callbacks.config import versions_now
from jaxmem_callbacks.probes.allocations import BLIND
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.readers.runs import JSONL_NAME, process_name
from jaxmem_callbacks.readers.traces import TRACE_NAME
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap, changed_groups
from jaxmem_callbacks.records.errors import printable
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import CheckpointSave, Dropped, MemoryEvent, Reading, RunStart, Said, Unavailable
from jaxmem_callbacks.records.secrets import recent_secrets, scrubbed
from jaxmem_callbacks.records.traces import TraceHead, TracePart
from jaxmem_callbacks.records.units import GIB, format_bytes
from jaxmem_callbacks.recovery.monitor_snapshot import MonitorSnapshot
from jaxmem_callbacks.writers.figures import draw_heap, draw_over_time
from jaxmem_callbacks.writers.jsonl import JsonlWriter, OwnEventsWriter, TraceWriter
from jaxmem_callbacks.writers.log import EventCallback, LogWriter
from jaxmem_callbacks.writers.plan_figure import plan_picture
from jaxmem_callbacks.writers.plan_page import plan_page, plan_scalars
from jaxmem_callbacks.writers.protocol import LoggedTable, Record, Writer

_Record = TypeVar("_Record")
KNOWN_TAG = "memory/known_here"
_SAVES = 1000  # that are drawn


def _clean(record: _Record) -> _Record:
    return scrubbed(record, recent_secrets(), then=printable)


@final
class Recorder:
    """Keeps the story of a run and writes it down.

    Args:
        settings: Window length and the preset's limit.
        outputs: The writers, opened at the first record.
        faults: Reports what cannot be drawn.
        look_s: Seconds between two calls of ``record``.
        plan: What was planned of the step, or None.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        outputs: Outputs,
        faults: Faults,
        *,
        look_s: float,
        plan: PlanRecord | None = None,
    ) -> None:
        self._settings = settings
        self._plan = self._unwritten_plan = scrubbed(plan)
        self._outputs = outputs
        self._faults = faults
        # A window closes at the look nearest to its end; waiting for the next one would put two scans into some windows.
        self._windows = Windows(settings.window_s - look_s / 2)
        self._history = History()
        self._saves = Saves()
        self._saved: deque[CheckpointSave] = deque(maxlen=_SAVES)
        self._known = MetricAvailability(settings.limit_bytes, plan)
        self._known_shape: object = None
        self._unavailable: set[Unavailable] = set()
        self._latest: dict[tuple[str, str], Reading] = {}
        self._used: set[str] = set()
        self._census: ArrayCensus | None = None
        self._needs: dict[str, int] = {}
        self._across: Mapping[str, float] = {}
        self._limit = settings.limit_bytes
        self._figures = RateLimiter(settings.figure_s, PICTURES)
        self._unit: ByteUnit | None = None
        self._unflushed = False
        self._dropped = 0
        self.events: tuple[MemoryEvent, ...] = ()

    def record(self, observation: Observation, events: Sequence[MemoryEvent], *, last: bool = False) -> None:
        """Take in one observation; ``last`` closes the open window and draws the figure."""
        ended = self._saves.learn(observation)
        events = [scrubbed(self._saves.labelled(event)) for event in events]
        observation = replace(observation, metrics=[_clean(each) for each in observation.metrics])
        self.events += tuple(events)
        self._learn(observation)
        if self._unit is None:  # once: a tag that changes its unit would be two curves
            self._unit = self._known.unit = byte_unit(jax.local_devices()[0].platform, self._limit)
        if self._unwritten_plan is not None:
            self._faults.attempt("the plan's page", self._write_plan, self._unwritten_plan, observation, default=None)
            self._unwritten_plan = None
        for record in (*self._raw(observation), *events, *ended):
            self._write(record)
        if ended:
            self._saved.extend(ended)
            self._write(saves_table(tuple(self._saved)))
        if observation.trace:
            self._write(TracePart(events=tuple(observation.trace)))
        window = self._windows.close(observation.step, observation.time_s, force=last)
        if window is not None:
            self._history.add(window)
            self._write(window_in(window, self._unit))
        if observation.dropped > self._dropped and (last or window is not None):
            self._dropped = observation.dropped
            self._write(Dropped(step=observation.step, time_s=observation.time_s, stamps=self._dropped))
        due = last or self._is_due(observation.time_s)
        self._write_table(observation, due=due)
        if due and self.takes_pictures:
            self._write_figure()
        self._write_heap(observation.heaps, drawn=observation.draws_heap)
        self._flush()

    def record_messages(self, messages: Sequence[str], step: int) -> None:
        """Write what the monitor reported of itself, whether or not it still looks."""
        now = Observation(step=step, time_s=time.time(), messages=messages)
        self._known.learn(now)
        for message in messages:
            self._write(Said(step=step, time_s=now.time_s, message=message))
        self._write_table(now, due=False)
        self._flush()

    def latest(self, fresh: Sequence[Reading] = ()) -> dict[str, float]:
        """Tag -> value in GiB now: the latest reading of every probe and device, ``fresh`` ones first."""
        readings = self._latest | {(each.source, each.device): each for each in fresh}
        pool = Windows(0.0)
        for reading in readings.values():
            pool.add(self._shown(reading), reading.device)
        pool.keep(self._constants())
        window = pool.close(0, 0.0, force=True)
        return window.scalars() if window is not None else {}

    def witnessed(self, logdir: Path | None, step: int | None) -> MonitorSnapshot:
        """What was seen so far, for a report of a failure; any thread, and it waits for nothing."""
        return MonitorSnapshot(
            logdir=logdir,
            step=step,
            readings=tuple(self._latest.values()),
            events=self.events,
            history=self._history.points,
            needs=dict(self._needs),
            limit_bytes=self._limit,
        )

    @property
    def takes_pictures(self) -> bool:
        """Whether anything is shown of what is drawn; no while the writers are not opened."""
        return self._outputs.takes_pictures

    def close(self) -> None:
        """Close the writers."""
        self._outputs.close()

    def _flush(self) -> None:
        if self._unflushed:  # always before a look ends: a fork would copy what is buffered, and write it again
            self._unflushed = False
            self._outputs.flush()

    def _learn(self, observation: Observation) -> None:
        self._known.learn(observation)
        self._used.update(reading.device for reading in observation.readings if reading.live_array_bytes)
        for reading in observation.readings:
            self._latest[reading.source, reading.device] = reading
            self._windows.add(self._shown(reading), reading.device)
            if reading.limit_bytes is not None:
                self._limit = min(reading.limit_bytes, self._settings.limit_bytes or reading.limit_bytes)
        for metrics in observation.metrics:
            self._windows.add({f"train/{name}": value for name, value in metrics.values.items()})
        for compiled in observation.compilations:
            name, memory = compiled.compilation.program, compiled.compilation.memory
            if memory is not None:  # of several compiles the largest counts: all of them may run again
                self._needs[name] = max(memory.step_bytes, self._needs.get(name, 0))
        if observation.processes is not None:
            self._across = across_scalars(observation.processes)
        self._windows.keep(self._constants())

    def _shown(self, reading: Reading) -> dict[str, float]:
        """What a reading adds to the curves; devices that never held an array would only pull the mean down."""
        idle = reading.source == "live_arrays" and bool(self._used) and reading.device not in self._used
        if idle:
            return {}
        allocator = self._latest.get(("allocator", reading.device))
        return values_of(reading, allocator, temp_bytes=self._known.temp_bytes)

    def _constants(self) -> dict[str, float]:
        values = {f"{PROGRAM}{name}": need / GIB for name, need in dict(self._needs).items()}
        values |= self._across
        if self._plan is not None:
            values |= plan_scalars(self._plan)
            predicted, compiled = self._plan.candidates[self._plan.chosen].step_bytes, self._needs.get(self._plan.step)
            if predicted and compiled:
                values[ERROR + self._plan.step] = compiled / predicted - 1
        if self._settings.limit_bytes is not None:
            values[PRESET_LIMIT] = self._settings.limit_bytes / GIB
        return values

    def _raw(self, observation: Observation) -> list[Record]:
        """What is written as it is: of many readings of one device between two looks, the last and the highest."""
        kept: dict[tuple[str, str], list[Reading]] = {}
        for reading in observation.readings:
            pair = kept.setdefault((reading.source, reading.device), [reading, reading])
            pair[0] = max(pair[0], reading, key=lambda each: each.in_use_bytes or 0)
            pair[1] = reading
        readings = [each for high, end in kept.values() for each in ([end] if high is end else [high, end])]
        new = [each for each in observation.unavailable if each not in self._unavailable]
        self._unavailable.update(new)
        compilations = [replace(each.compilation, step=each.step) for each in observation.compilations]
        across = [] if observation.processes is None else [observation.processes]
        return [*readings, *new, *self._arrays(observation.arrays), *across, *compilations, *observation.metrics]

    def _arrays(self, census: ArrayCensus | None) -> list[ArrayCensus]:
        """Of the groups of arrays only those that differ from what was written before: mostly none."""
        changed = changed_groups(self._census, census) if census is not None else None
        self._census = census or self._census
        return [] if changed is None else [changed]

    def _write_plan(self, plan: PlanRecord, observation: Observation) -> None:
        """Once, at the start: what was planned is there from the first moment on."""
        from jaxmem_callbacks.planning.choice import pareto

        frontier = pareto(plan.candidates)
        for record in plan_page(plan, frontier, step=observation.step, time_s=observation.time_s):
            self._write(record)
        if self.takes_pictures:
            self._write(plan_picture(plan, frontier, step=observation.step, time_s=observation.time_s))

    def _is_due(self, time_s: float) -> bool:
        """Whether the figure and the latest values are drawn up again: a run that is killed keeps some at most so old."""
        due, over = self._figures.has_begun, self._figures.is_over(time_s)
        if over:
            self._figures.begin(time_s)
        return due and over

    def _write_table(self, observation: Observation, *, due: bool) -> None:
        if self._known_shape and not due and not MetricAvailability.may_change_by(observation):
            return  # most looks bring metrics alone
        shape = self._known.shape()
        if shape == self._known_shape and not due:
            return
        self._known_shape = shape
        known_first = sorted(self._known.rows(), key=lambda row: not row.known)
        rows = [(row.figure, row.latest, row.source, row.text) for row in known_first]
        self._write(
            LoggedTable(tag=KNOWN_TAG, step=observation.step, time_s=observation.time_s, columns=COLUMNS, rows=rows)
        )

    def _write_figure(self) -> None:
        picture = self._faults.attempt("the memory figure", self._draw, default=None)
        if picture is not None:
            self._write(picture)

    def _write_heap(self, heaps: Sequence[HeapMap], *, drawn: bool) -> None:
        """The device that holds most is written, and where it is to be drawn, for writers that show pictures."""
        fullest = max(heaps, key=lambda heap: sum(buffer.bytes for buffer in heap.buffers), default=None)
        if fullest is None or not fullest.buffers:
            return
        self._write(fullest)
        if not drawn or not self.takes_pictures:
            return
        picture = self._faults.attempt("the heap figure", draw_heap, fullest, default=None)
        if picture is not None:
            self._write(picture)

    def _draw(self) -> Record | None:
        return draw_over_time(
            self._history.points, self.events, limit_bytes=self._limit, needs=self._needs, saves=self._saved
        )

    def _write(self, record: Record) -> None:
        """To every writer, the user's own too: names of metrics, events and plans are texts of the outside."""
        self._unflushed |= not isinstance(record, Reading | Metrics)
        if not isinstance(record, Metrics):  # they are clean since they came, for the curves' names too
            record = _clean(record)
        self._outputs.each(lambda writer: writer.write(record))


SAVES_TAG = "memory/checkpoint_saves"
SAVES_SHOWN = 20
_SAVED = {"in_use_bytes": "held by the allocator", "live_array_bytes": "live arrays", "resident_bytes": "host"}


def saves_table(saves: Sequence[CheckpointSave]) -> LoggedTable:
    """The latest saves, newest first: when, how long, and the highest values that were read during each.

    Args:
        saves: At least one, oldest first.
    """
    rows = [
        (_when(save), f"{save.time_s - save.began_s:.2f}", *(_high(save, name) for name in _SAVED))
        for save in reversed(saves[-SAVES_SHOWN:])
    ]
    columns = (DURING, "seconds", *(f"{what}, highest" for what in _SAVED.values()))
    return LoggedTable(tag=SAVES_TAG, step=saves[-1].step, time_s=saves[-1].time_s, columns=columns, rows=rows)


def _when(save: CheckpointSave) -> str:
    how = "in the background" if save.background else "while the training waited"
    return f"after step {save.first_step} to {save.step}, {how}"


def _high(save: CheckpointSave, name: str) -> str:
    high, before = save.highs.get(name), save.before.get(name)
    if high is None:
        return "unknown, because nothing was read meanwhile"
    return format_bytes(high) + ("" if before is None else f" ({format_bytes(before)} before)")


_CLOSING_S = 2.0  # one that is being closed, as when a notebook's cell runs again, draws its last figure meanwhile
# What is no one file's fault: the disk or the quota is full, or the file system is gone.
_OF_THE_FOLDER = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})


@final
class Outputs:
    """The writers of a run, and the one boundary at which their exceptions end.

    A writer that raises is switched off alone; where the run's folder fails, all that write into it are.

    Args:
        settings: Which files are needed.
        logdir: Their folder, or None for no files.
        writers: The user's own; only the first process writes to them.
        faults: Reports writers and the folder.
        on_event: Takes each event of this process, or None.
        shown: Where its user finds the run: the folder, or the address that it is copied to.
    """

    def __init__(  # noqa: PLR0913 - each is a keyword
        self,
        settings: MonitorSettings,
        logdir: Path | None,
        writers: Sequence[Writer],
        faults: Faults,
        *,
        on_event: Callable[[MemoryEvent], object] | None = None,
        shown: Path | str | None = None,
    ) -> None:
        self._settings, self._faults, self._users = settings, faults, writers
        self._logdir, self._folder, self._on_event = logdir, logdir or Path(), on_event
        self._shown = shown or logdir
        self._run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self._writers: dict[str, Writer] | None = None  # by the name that a fault is reported under
        self._in_folder: frozenset[str] = frozenset()
        self._lock: int | None = None
        self.takes_pictures = False

    def each(self, action: Callable[[Writer], None]) -> None:
        """Run an action on every writer; they are opened at the first one."""
        if self._writers is None:
            self._open()
        for name in tuple(self._writers or ()):
            if self._writers and name in self._writers:  # no longer where the folder failed meanwhile
                self._attempt(name, action, self._writers[name])

    def flush(self) -> None:
        """Flush all, and see whether the folder is still there."""
        self.each(lambda writer: writer.flush())
        if self._in_folder & (self._writers or {}).keys() and not self._is_there():
            msg = "the folder was removed or replaced while the run went on"
            self._give_up(FileNotFoundError(msg))

    def close(self) -> None:
        """Close all, and let another monitor have the folder."""
        self.each(lambda writer: writer.close())
        self._writers = {}
        if self._lock is not None:
            unlock(self._lock)

    def _attempt(self, name: str, action: Callable[..., Any], *args: Any) -> Any:
        return self._faults.attempt(name, action, *args, default=None, failed=self._failed)

    def _failed(self, name: str, error: Exception) -> None:
        if name in self._in_folder and isinstance(error, OSError) and error.errno in _OF_THE_FOLDER:
            self._give_up(error)
            return
        if self._writers:
            self._writers.pop(name, None)
        self._faults.report(name, error)

    def _give_up(self, error: OSError) -> None:
        """Switch off all that write into the folder."""
        for name in self._in_folder & (self._writers or {}).keys():
            with contextlib.suppress(OSError, ValueError):  # what is still buffered cannot be written either
                (self._writers or {}).pop(name).close()
        self._faults.report(f"writing to {self._folder}", error)

    def _is_there(self) -> bool:
        try:
            return self._lock is not None and os.path.samestat(self._folder.stat(), os.fstat(self._lock))
        except OSError:
            return False

    def _open(self) -> None:
        log = self._faults.attempt("the log", self._log, default=None)
        self._writers = {} if log is None else {"the log": log}
        plain, makers = self._faults.attempt("opening the writers", self._needed, default=((), {}))
        self._writers |= {f"writer {at} ({type(each).__name__})": each for at, each in enumerate(plain, start=1)}
        self._in_folder = frozenset(makers)
        for name, make in makers.items():
            writer = self._attempt(name, make)
            if writer is not None:
                self._writers[name] = writer
        if self._on_event is not None:
            self._writers["on_event"] = EventCallback(self._on_event)
        self.takes_pictures = any(writer.takes_pictures for writer in self._writers.values())

    def _needed(self) -> tuple[Sequence[Writer], Mapping[str, Callable[[], Writer]]]:
        """The writers that are there already, and what makes the others, which write into the folder."""
        if jax.process_index() != 0:
            return self._own_events(), {}
        if self._logdir is None:
            return self._users, {}
        self._lock = self._faults.attempt(f"writing to {self._folder}", lock_folder, self._folder, default=None)
        if self._lock is None:
            return self._users, {}
        makers: list[tuple[bool, str, Callable[[], Writer]]] = [
            (self._settings.tensorboard, "TensorBoard", self._tensorboard),
            (self._settings.jsonl, "JSONL", self._jsonl),
            (self._settings.trace_steps > 0, "the trace", self._trace),
        ]
        return self._users, {f"{name} in {self._folder}": make for needed, name, make in makers if needed}

    def _log(self) -> Writer:
        """Of every process, since each sees its own events; the run's end is logged once."""
        return LogWriter(self._shown, limit_bytes=self._settings.limit_bytes, ends=jax.process_index() == 0)

    def _own_events(self) -> list[Writer]:
        """Without the folder's lock, which the first process may have on the same machine: no other has these files."""
        if self._logdir is None:
            return []
        makers = (
            (self._settings.tensorboard, self._own_tensorboard),
            (self._settings.jsonl, partial(self._own_jsonl, self._start())),
        )
        return [OwnEventsWriter(make) for needed, make in makers if needed]

    def _own_tensorboard(self) -> Writer:
        """A run of its own beside that of the first process: two processes can't write one event file."""
        from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

        folder = self._folder / f"process-{jax.process_index()}"
        folder.mkdir(parents=True, exist_ok=True)
        return TensorBoardWriter(folder, self._run_id)

    def _own_jsonl(self, start: RunStart) -> Writer:
        self._folder.mkdir(parents=True, exist_ok=True)  # on a disk of this machine's own nobody else makes it
        return JsonlWriter(self._folder / process_name(jax.process_index()), self._run_id, start=start)

    def _tensorboard(self) -> Writer:
        from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

        return TensorBoardWriter(self._folder, self._run_id)

    def _jsonl(self) -> Writer:
        path, part_bytes = self._folder / JSONL_NAME, self._settings.jsonl_part_bytes
        return JsonlWriter(path, self._run_id, part_bytes=part_bytes, start=self._start())

    def _trace(self) -> Writer:
        first = jax.local_devices()[0]
        head = TraceHead(
            name=self._run_id,
            device=device_label(first),
            device_bytes=memory_of_kind(first.device_kind),
            tells=(f"The first {self._settings.trace_steps} calls of the monitor on {first.device_kind}.",),
            blind=BLIND,
            versions=tuple(versions_now().items()),
        )
        return TraceWriter(self._folder / f"{TRACE_NAME}.{self._run_id}.jsonl", head)

    def _start(self) -> RunStart:
        first, process = jax.local_devices()[0], jax.process_index()
        devices = {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count()}
        devices |= {"process": process} if process else {}
        return RunStart(
            time_s=time.time(),
            versions={"jaxmem_callbacks": jaxmem_callbacks.__version__, **versions_now()},
            devices={**devices, "processes": jax.process_count()},
            settings=dataclasses.asdict(self._settings),
        )


def lock_folder(folder: Path) -> int:
    """Make the folder and take it for one monitor; the system lets go of it when the process dies, however it dies.

    Raises:
        RuntimeError: another monitor has it.
        OSError: it cannot be made, read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    end_s = time.monotonic() + _CLOSING_S
    while not _locked(descriptor):
        if time.monotonic() >= end_s:
            os.close(descriptor)
            msg = "another monitor writes to this folder; close it first (monitor.close()) or give this one another logdir"
            raise RuntimeError(msg)
        time.sleep(0.02)
    return descriptor


def _locked(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let go of a folder, also where forked processes still hold the same descriptor."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
