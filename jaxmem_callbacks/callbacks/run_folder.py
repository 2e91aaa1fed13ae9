"""The folder of a run, and the writers that a monitor opens in it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import jax

import jaxmem_callbacks
from jaxmem_callbacks.callbacks.config import versions_now
from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.probes.allocations import BLIND
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.readers.runs import JSONL_NAME, process_name
from jaxmem_callbacks.readers.traces import TRACE_NAME
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import RunStart
from jaxmem_callbacks.records.traces import TraceHead
from jaxmem_callbacks.writers.jsonl import OwnEventsWriter
from jaxmem_callbacks.writers.protocol import Record, Writer

_CLOSING_S = 2.0  # one that is being closed, as when a notebook's cell runs again, draws its last figure meanwhile
# What is no one file's fault: the disk or the quota is full, or the file system is gone.
_OF_THE_FOLDER = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})


@final
class RunFolder(Writer):
    """Writes the files of one folder; a file that fails is switched off alone, a folder that fails with all of them.

    Args:
        folder: It exists.
        lock: Of ``lock_folder``.
        makers: Name -> what opens that file.
        faults: Told of files and of the folder.
    """

    def __init__(self, folder: Path, lock: int, makers: Mapping[str, Callable[[], Writer]], faults: Faults) -> None:
        self._folder, self._lock, self._faults = folder, lock, faults
        self._writers: dict[str, Writer] = {}
        for name, make in makers.items():
            writer = self._attempt(name, make)
            if writer is not None:
                self._writers[name] = writer
        self.takes_pictures = any(writer.takes_pictures for writer in self._writers.values())

    def write(self, record: Record) -> None:
        """Write it to every file."""
        for name, writer in tuple(self._writers.items()):
            self._attempt(name, lambda writer=writer: writer.write(record))

    def flush(self) -> None:
        """Flush every file, and see whether the folder is still there."""
        for name, writer in tuple(self._writers.items()):
            self._attempt(name, writer.flush)
        if self._writers and not self._is_there():
            msg = "the folder was removed or replaced while the run went on"
            self._give_up(FileNotFoundError(msg))

    def close(self) -> None:
        """Close every file and let another monitor have the folder."""
        for name, writer in tuple(self._writers.items()):
            self._attempt(name, writer.close)
        unlock(self._lock)

    def _attempt(self, name: str, action: Callable[[], Any]) -> Any:
        return self._faults.attempt(f"{name} in {self._folder}", self._guarded, action, default=None)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            if error.errno not in _OF_THE_FOLDER:
                raise
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        given_up, self._writers = self._writers, {}
        for writer in given_up.values():
            with contextlib.suppress(OSError, ValueError):  # what is still buffered cannot be written either
                writer.close()
        self._faults.report(f"writing to {self._folder}", error)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._folder.stat(), os.fstat(self._lock))
        except OSError:
            return False


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
