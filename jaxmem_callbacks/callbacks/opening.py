"""Opening a run's writers: settings, a folder and the user's own loggers enter; the writers of this process leave.

The one place that decides which process writes: process 0. The others sample and detect, and write their own events only, each
to files of its own, when there are any.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax

import jaxmem_callbacks
from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.callbacks.run_folder import RunFolder, lock_folder
from jaxmem_callbacks.callbacks.wanted import versions_now
from jaxmem_callbacks.probes.allocations import BLIND
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.readers.runs import JSONL_NAME, process_name
from jaxmem_callbacks.readers.traces import TRACE_NAME
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import RunStart
from jaxmem_callbacks.records.traces import TraceHead
from jaxmem_callbacks.writers.jsonl import OwnEventsWriter
from jaxmem_callbacks.writers.protocol import Writer


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What to open when the first sample is there.

    Attributes:
        settings: Which files are wanted.
        logdir: Their folder, or None for no files.
        writers: The user's own.
        faults: Told of a folder that cannot be written.
        run_id: Names the run in file names and lines.
    """

    settings: MonitorSettings
    logdir: Path | None
    writers: Sequence[Writer]
    faults: Faults
    run_id: str = field(default_factory=lambda: f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}")

    def open(self) -> list[Writer]:
        """The writers of this process; the user's own in the first only."""
        if jax.process_index() != 0:
            return self._own_events()
        return [*self.writers, *self._files()]

    def _own_events(self) -> list[Writer]:
        """Without the folder's lock, which the first process may have on the same machine: no other has these files."""
        if self.logdir is None:
            return []
        wanted = (
            (self.settings.tensorboard, self._own_tensorboard),
            (self.settings.jsonl, partial(self._own_jsonl, self._start())),
        )
        return [OwnEventsWriter(make) for want, make in wanted if want]

    def _own_tensorboard(self) -> Writer:
        """A run of its own beside that of the first process: two processes can't write one event file."""
        from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

        folder = self._folder / f"process-{jax.process_index()}"
        folder.mkdir(parents=True, exist_ok=True)
        return TensorBoardWriter(folder, self.run_id)

    def _own_jsonl(self, start: RunStart) -> Writer:
        from jaxmem_callbacks.writers.jsonl import JsonlWriter

        self._folder.mkdir(parents=True, exist_ok=True)  # on a disk of this machine's own nobody else makes it
        return JsonlWriter(self._folder / process_name(jax.process_index()), self.run_id, start=start)

    def _files(self) -> list[Writer]:
        if self.logdir is None:
            return []
        lock = self.faults.attempt(f"writing to {self.logdir}", lock_folder, self.logdir, default=None)
        if lock is None:
            return []
        wanted: list[tuple[bool, str, Callable[[], Writer]]] = [
            (self.settings.tensorboard, "TensorBoard", self._tensorboard),
            (self.settings.jsonl, "JSONL", self._jsonl),
            (self.settings.trace_steps > 0, "the trace", self._trace),
        ]
        return [RunFolder(self.logdir, lock, {name: make for want, name, make in wanted if want}, self.faults)]

    def _tensorboard(self) -> Writer:
        from jaxmem_callbacks.writers.tensorboard import TensorBoardWriter

        return TensorBoardWriter(self._folder, self.run_id)

    def _jsonl(self) -> Writer:
        from jaxmem_callbacks.writers.jsonl import JsonlWriter

        path, part_bytes = self._folder / JSONL_NAME, self.settings.jsonl_part_bytes
        return JsonlWriter(path, self.run_id, part_bytes=part_bytes, start=self._start())

    def _trace(self) -> Writer:
        from jaxmem_callbacks.writers.jsonl import TraceWriter

        first = jax.local_devices()[0]
        head = TraceHead(
            name=self.run_id,
            device=device_label(first),
            device_bytes=memory_of_kind(first.device_kind),
            tells=(f"The first {self.settings.trace_steps} calls of the monitor on {first.device_kind}.",),
            blind=BLIND,
            versions=tuple(versions_now().items()),
        )
        return TraceWriter(self._folder / f"{TRACE_NAME}.{self.run_id}.jsonl", head)

    def _start(self) -> RunStart:
        first, process = jax.local_devices()[0], jax.process_index()
        devices = {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count()}
        devices |= {"process": process} if process else {}
        return RunStart(
            time_s=time.time(),
            versions={"jaxmem_callbacks": jaxmem_callbacks.__version__, **versions_now()},
            devices={**devices, "processes": jax.process_count()},
            settings=dataclasses.asdict(self.settings),
        )

    @property
    def _folder(self) -> Path:
        return self.logdir or Path()
