"""Folders at addresses such as ``gs://bucket/runs/a``: what opens them, and a run's lines copied here to be read."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, final

from jaxmem_callbacks.readers.runs import JSONL_NAME
from jaxmem_callbacks.records.errors import RunFileError, in_a_line

_BY_TENSORFLOW = ("gs", "s3")
_LINES = f"{PurePosixPath(JSONL_NAME).stem}*{PurePosixPath(JSONL_NAME).suffix}"


class Store(Protocol):
    """Files below an address."""

    def put(self, address: str, data: bytes, *, new: bool = False) -> None:
        """Write a whole file, with the folders that it needs.

        Raises:
            FileExistsError: with ``new``, one is there.
        """
        ...

    def get(self, address: str) -> bytes:
        """The bytes of a file."""
        ...

    def sizes(self, address: str) -> Mapping[str, int]:
        """The files below a folder, at any depth: their names from there, and their bytes."""
        ...


@final
class FsspecStore:
    """By fsspec: every scheme of which a package is installed, such as gcsfs and s3fs.

    Args:
        address: Where the store is.
    """

    def __init__(self, address: str) -> None:
        self._files, _ = importlib.import_module("fsspec.core").url_to_fs(address)

    def put(self, address: str, data: bytes, *, new: bool = False) -> None:
        """Write a whole file; that it is new is seen to by the store itself, where it can."""
        if new:
            self._files.invalidate_cache()
            if self._files.exists(address):
                raise FileExistsError(address)
        self._files.makedirs(address.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(address, data, **({"mode": "create"} if new else {}))

    def get(self, address: str) -> bytes:
        """The bytes of a file."""
        return bytes(self._files.cat_file(address))

    def sizes(self, address: str) -> Mapping[str, int]:
        """The files below a folder."""
        self._files.invalidate_cache()
        root = str(self._files._strip_protocol(address)).rstrip("/")  # noqa: SLF001 - fsspec's own word for what `find` answers with
        found: Mapping[str, Mapping[str, Any]] = self._files.find(address, detail=True)
        return {name.removeprefix(f"{root}/"): int(each["size"] or 0) for name, each in found.items() if name != root}


@final
class EpathStore:
    """By etils.epath, which asks TensorFlow for ``gs://`` and ``s3://``."""

    def __init__(self) -> None:
        self._path: Any = importlib.import_module("etils.epath").Path

    def put(self, address: str, data: bytes, *, new: bool = False) -> None:
        """Write a whole file."""
        path = self._path(address)
        if new and path.exists():
            raise FileExistsError(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get(self, address: str) -> bytes:
        """The bytes of a file."""
        return bytes(self._path(address).read_bytes())

    def sizes(self, address: str) -> Mapping[str, int]:
        """The files below a folder."""
        root, found = self._path(address), dict[str, int]()
        waiting = [root] if root.is_dir() else []
        while waiting:
            for path in waiting.pop().iterdir():
                if path.is_dir():
                    waiting.append(path)
                else:
                    found[path.relative_to(root).as_posix()] = int(path.stat().length)
        return found


def is_address(text: str) -> bool:
    """Whether a text is an address and no local path."""
    return "://" in text


def opener(address: str) -> Callable[[], Store] | None:
    """What opens the store of an address, which may take its time; None where no installed package does."""
    scheme = address.partition("://")[0]
    try:
        importlib.import_module("fsspec").get_filesystem_class(scheme)
    except (ImportError, ValueError):
        both = all(importlib.util.find_spec(name) for name in ("etils", "tensorflow"))
        return EpathStore if both and scheme in _BY_TENSORFLOW else None
    return lambda: FsspecStore(address)


def packages_for(address: str) -> str:
    """What would open an address, in words."""
    scheme = address.partition("://")[0]
    known = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"}
    own = f"its package {known[scheme]}" if scheme in known else f"its own package for {scheme}"
    return f"no package that is installed here opens {scheme}://: fsspec with {own}, or etils with TensorFlow"


@final
class RemoteRuns:
    """The lines of the runs below an address, copied into a local folder.

    Args:
        address: A monitor's logdir, or a folder of them.
        folder: Where to.

    Raises:
        RunFileError: no installed package opens it.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address.rstrip("/"), folder
        opens = opener(address)
        if opens is None:
            msg = f"{address} cannot be read, and {packages_for(address)}. Or copy the folder here."
            raise RunFileError(msg)
        self._opens = opens
        self._store: Store | None = None
        self._copied: dict[str, int] = {}

    def refresh(self) -> None:
        """Copy the files whose size is another one than before; each stays the same file here.

        Raises:
            RunFileError: the store does not answer, or refuses.
        """
        try:
            self._store = self._store or self._opens()
            for name, size in sorted(self._store.sizes(self.address).items()):
                path = PurePosixPath(name)
                if path.match(_LINES) and ".." not in path.parts and self._copied.get(name) != size:
                    here = self.folder / path
                    here.parent.mkdir(parents=True, exist_ok=True)
                    here.write_bytes(self._store.get(f"{self.address}/{name}"))
                    self._copied[name] = size
        except Exception as error:  # each store has errors of its own
            msg = f"{self.address} cannot be read: {in_a_line(error)}."
            raise RunFileError(msg) from error


@contextlib.contextmanager
def readable(place: str) -> Generator[Path]:
    """A path at which the runs of a place can be read: itself, or a copy of the lines at an address, as long as it is needed.

    Raises:
        RunFileError: an address that cannot be read, or that has no run.
    """
    if not is_address(place):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as folder:
        runs = RemoteRuns(place, Path(folder))
        runs.refresh()
        if not any(runs.folder.iterdir()):
            msg = (
                f"{runs.address} holds no {JSONL_NAME}. Expected the address that MemoryMonitor(logdir=...) was given."
            )
            raise RunFileError(msg)
        try:
            yield runs.folder
        except RunFileError as error:
            raise RunFileError(str(error).replace(folder, runs.address)) from error
