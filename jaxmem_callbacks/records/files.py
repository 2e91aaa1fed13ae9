"""The writing of files: each is written whole, or the one that was there before stays.

Nothing is written through a symbolic link: where one stands in a file's place, somebody else chose what would be overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
BESIDE = ".jaxmem-"  # begins the name of a file that is not whole yet
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Generator[BinaryIO]:
    """A file to write that takes its place when it is whole; where writing fails, what was there stays.

    Args:
        path: Where it is to stand.
        private: Only its owner may read it; else whoever the process's umask lets.

    Raises:
        OSError: it cannot be written, or a link or a device stands there.
    """
    require_place(path)
    beside = path.with_name(f"{BESIDE}{uuid.uuid4().hex}")
    try:
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, PRIVATE_FILE if private else 0o666)
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
        beside.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename == str(beside):
            raise OSError(error.errno, error.strerror, str(path)) from error  # the name that its user knows
        raise


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    r"""Write a whole file as `replacing` does. Half of a surrogate pair is written as ``\ud800``.

    Raises:
        OSError: as `replacing`.
    """
    with replacing(path, private=private) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def append_to(path: Path) -> int:
    """A descriptor that appends to a file of its owner's; made where there is none. A pipe that stands there is written to.

    Raises:
        OSError: it cannot be opened, or a link stands there.
    """
    require_place(path, whole=False)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, PRIVATE_FILE)


def require_place(path: Path, *, whole: bool = True) -> None:
    """Refuse a path at which something else than a file stands.

    Args:
        path: Where something is to be written.
        whole: Whether a whole file is to take the place; else a pipe or a device may be there, which its user put there.

    Raises:
        OSError: a link, a folder, or where a whole file is to stand a device or a pipe is there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        msg = "it is a symbolic link, and nothing is written through one; remove it, or name the file that it leads to"
        raise OSError(errno.ELOOP, msg, str(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if whole and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe, expected a file", str(path))
