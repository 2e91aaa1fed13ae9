"""The folder of a run: records enter and go to its files; what is wrong with the folder leaves once, whatever its files.

It is held by a lock for one monitor, and looked at once a window: a folder that was removed takes what is written without a word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from jaxmem_callbacks.callbacks.faults import Faults
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
