"""A path in, its text out. Looks at the kind and size of the file before it reads a byte, so that no file can hang or flood."""

from __future__ import annotations

import os
import stat

from jaxmem_callbacks.config.problems import Place, Problem, preset_error
from jaxmem_callbacks.records.errors import PresetError
from jaxmem_callbacks.records.units import format_bytes

LIMIT_BYTES = 64 * 1024


def read_text(path: str) -> str:
    """The text of a YAML file.

    Raises:
        PresetError: missing, unreadable, no regular file (a folder, a FIFO, a device), larger than 64 KiB, not UTF-8.
    """
    data = _read(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        problem = Problem(
            place=Place(source=path, line=line, column=column),
            given=f"this is not UTF-8 text: byte 0x{data[error.start]:02x}.",
            expected="Expected: a YAML file in UTF-8. Save it so, or convert it with `iconv -t UTF-8`.",
        )
        raise preset_error([problem]) from None


def _read(path: str) -> bytes:
    """The bytes, refused by kind and size first; a FIFO is opened without waiting for its writer."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(path, f"the file cannot be read: {reason}.") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise _refused(path, f"this is {_kind(facts.st_mode)}, not a file.")
        if facts.st_size > LIMIT_BYTES:
            raise _too_large(path, facts.st_size)
        with os.fdopen(os.dup(handle), "rb") as stream:
            data = stream.read(LIMIT_BYTES + 1)  # files under /proc say a size of 0
    finally:
        os.close(handle)
    if len(data) > LIMIT_BYTES:
        raise _too_large(path, len(data))
    return data


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def _too_large(path: str, size: int) -> PresetError:
    return _refused(path, f"the file has {format_bytes(size)}, which is too large to be a preset.")


def _refused(path: str, given: str) -> PresetError:
    expected = f"Expected: the path of a YAML file of at most {format_bytes(LIMIT_BYTES)}."
    return preset_error([Problem(place=Place(source=path), given=given, expected=expected)])
