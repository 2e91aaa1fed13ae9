"""Run folders at an address such as ``gs://bucket/runs/a``: files are written here, and copied there by a thread of its own.

An object store appends to nothing and may stall for minutes. So the writers have a local folder, as fast as ever, and what
changed in it is copied whole, twice a minute at most and for a twentieth of the time at most.

Nothing that is at the address is overwritten. Where a run is there already, this one goes into ``rerun-1`` below it, and so on.
Process 0 chooses, and the others learn it by the key-value store of `jax.distributed`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import jax

from jaxmem_callbacks._compat.coordination import shared_store
from jaxmem_callbacks.readers.runs import JSONL_NAME, process_name
from jaxmem_callbacks.readers.stores import Store
from jaxmem_callbacks.records.errors import in_a_line
from jaxmem_callbacks.records.files import BESIDE

PART_BYTES = 16 * 2**20  # of JSON lines: what is full is copied once more at most
_EVERY_S = 30.0
_SHARE = 20.0  # of the time a copy takes, that is waited before the next
_PATIENT_S = 120.0  # for process 0 to choose the place; then, or at the end, each process finds one for its own files
_LAST_S = 3.0
_RERUNS = 1000
_mirrors = itertools.count()  # processes that make their monitors in the same order find each other by it


@final
class Mirror:
    """A local folder, and its copy at an address.

    Args:
        address: Where to.
        opens: What opens the store; called on the mirror's thread.
        report: Takes one line when copying fails, and one where it failed to the end.
        every_s: Seconds between two copies.
    """

    def __init__(
        self,
        address: str,
        opens: Callable[[], Store],
        report: Callable[[str], None],
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self.address = address.rstrip("/")
        self.folder = Path(tempfile.mkdtemp(prefix="jaxmem-"))
        self._opens, self._report, self._every_s = opens, report, every_s
        self._channel = f"jaxmem/mirror/{next(_mirrors)}"
        self._store: Store | None = None
        self._place: str | None = None
        self._copied: dict[str, tuple[int, int]] = {}
        self._failed: str | None = None
        self._reported = False
        self._ending, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmem-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def discard(self) -> None:
        """Remove the folder of a mirror that was never started."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def add(self, folder: Path) -> None:
        """Let a folder that is elsewhere, such as a failure's report, be copied too."""
        shutil.copytree(folder, self.folder / "oom" / folder.name)

    def finish(self, seconds: float) -> None:
        """Copy what is left and remove the local folder, which stays where that fails.

        Args:
            seconds: How long is waited; a copy that goes on then is left to itself.
        """
        self._ending.set()
        if not self._ended.wait(seconds):
            self._report(
                f"copying to {self.address} was not done {seconds:g} s after the end and is left behind: "
                f"the run is in {self.folder} until it is."
            )
        elif self._failed is not None:
            self._report(f"the run could not be copied to {self.address} ({self._failed}), and is in {self.folder}.")

    def _run(self) -> None:
        wait_s, is_last = self._every_s, False
        began_s = time.monotonic()
        while not is_last:
            is_last = self._ending.wait(wait_s)
            turn_s = time.monotonic()
            try:
                if self._found_place(turn_s - began_s, is_last=is_last):
                    self._copy()
                self._failed = None
            except Exception as error:  # noqa: BLE001 - whatever a store raises, it is tried again
                self._failed = in_a_line(error)
                if not self._reported and not is_last:
                    self._reported = True
                    self._report(
                        f"copying to {self.address} failed and is tried again; until then the run is in {self.folder}: "
                        f"{self._failed}"
                    )
            took_s = time.monotonic() - turn_s
            wait_s = self._every_s if self._failed else max(self._every_s, _SHARE * took_s)
        if self._failed is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._ended.set()

    def _copy(self) -> None:
        """What changed since it was copied; a file that the store refuses does not keep the others from it."""
        assert self._store is not None
        failed: Exception | None = None
        for path, mark in self._changed():
            try:
                self._store.put(f"{self._place}/{self._name(path)}", _whole(path))
                self._copied[self._name(path)] = mark
            except FileNotFoundError:
                if path.exists():  # else it has just got its number as a part, and is copied under that name
                    raise
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed

    def _changed(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and not path.name.startswith(BESIDE):
                status = path.stat()
                mark = status.st_size, status.st_mtime_ns
                if self._copied.get(self._name(path)) != mark:
                    yield path, mark

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _found_place(self, waited_s: float, *, is_last: bool) -> bool:
        """Whether the place at the address is known; it is looked for once there is something to copy."""
        if self._place is not None:
            return True
        if not any(self._changed()):
            return False
        self._store = self._store or self._opens()
        channel = shared_store() if jax.process_count() > 1 else None
        if channel is None or jax.process_index() == 0:
            self._place = self._own_place(self._store)
            if channel is not None:
                channel.put(f"{self._channel}/place", json.dumps([self.address, self._place]))
            return True
        end_s = time.monotonic() + (_LAST_S if is_last else 0)
        while (word := channel.under(self._channel).get("place")) is None and time.monotonic() < end_s:
            time.sleep(0.1)
        if word is None and not is_last and waited_s < _PATIENT_S:
            return False
        address, place = (None, None) if word is None else json.loads(word)
        self._place = place if address == self.address else self._own_place(self._store)
        return True

    def _own_place(self, store: Store) -> str:
        """The first place whose file of this process is not there yet; it is there then."""
        process = jax.process_index()
        own = self.folder / (process_name(process) if process else JSONL_NAME)
        if not own.exists():  # an event file has the time in its name
            return self.address
        for number in range(_RERUNS):
            place = f"{self.address}/rerun-{number}" if number else self.address
            with contextlib.suppress(FileExistsError):
                store.put(f"{place}/{own.name}", _whole(own), new=True)
                return place
        msg = f"{self.address} holds {_RERUNS} runs"
        raise FileExistsError(msg)


def _whole(path: Path) -> bytes:
    """The bytes of a file; of JSON lines without the last one while it is being written."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1] if path.suffix == ".jsonl" else data
