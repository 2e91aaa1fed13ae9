"""Files of presets: the shipped ones, and the user's, with their size and kind checked before they are read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxmem_callbacks.config.documents import Place, Problem, preset_error
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PresetError, did_you_mean
from jaxmem_callbacks.records.units import format_bytes

SCHEMA_NAME = "preset.schema.json"


def shipped_folder(room: Path | None = None) -> Path:
    """The folder that holds the shipped parts and their JSON Schema.

    Args:
        room: The folder of ``jaxmem_callbacks/config``; None for this one.

    Raises:
        PresetError: neither place has it, so the installation is incomplete.
    """
    room = room or Path(__file__).resolve().parent
    places = (room / "shipped", room.parent.parent / "configs")
    for place in places:
        if (place / SCHEMA_NAME).is_file():
            return place
    msg = (
        f"The shipped presets are missing: no {SCHEMA_NAME} in {places[0]} or {places[1]}. "
        "The installation is incomplete. Next: install the package again from its checkout."
    )
    raise PresetError(msg)


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped parts, sorted."""
    return tuple(sorted(path.stem for path in shipped_folder().glob("*.yaml")))


def require_shipped(name: str) -> Path:
    """The file of a shipped part.

    Raises:
        PresetError: there is none of that name; says which there are.
    """
    known = shipped_names()
    if name in known:
        return shipped_folder() / f"{name}.yaml"
    msg = (
        f"Unknown preset {name!r}.{did_you_mean(name, known)} Expected one of: {', '.join(known)}; or a path such as "
        f"./{name}.yaml.\nNext: `{advise('command.typed', typed='presets')}` describes each."
    )
    raise PresetError(msg)


def is_path(text: str) -> bool:
    """Whether a preset is named by a path, and not by the name of a shipped part."""
    return text.endswith((".yaml", ".yml")) or any(mark in text for mark in {"/", os.sep})


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
