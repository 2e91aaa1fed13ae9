"""The texts of an exception: an exception enters, what it, its causes, its notes and its group's members say leaves."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

_DEEPEST = 64
_LOOKED_AT, _MOST = 400, 0.6
_LONGEST = 4 * 2**20
"""Characters of one text that are read, from its beginning: an exception that says more repeats itself."""


def text_of(source: object) -> str:
    """All that an exception or a text says, with the exception itself first.

    Args:
        source: An exception, text, or bytes of text in UTF-16 or any encoding near UTF-8.

    Returns:
        The texts, a line each; an empty one where nothing can be said. Never raises, whatever the object's own methods do.
    """
    if isinstance(source, str):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source).decode(encoding_of(bytes(source)), errors="replace")
    if isinstance(source, BaseException):
        return "\n".join(_texts(source))
    return _said(source)


def encoding_of(beginning: bytes) -> str:
    """The encoding of bytes that a text begins with: UTF-16 by its mark, or by the zero in every other byte of plain letters."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    seen = beginning[:_LOOKED_AT]
    for encoding, zeros, letters in (("utf-16-le", seen[1::2], seen[::2]), ("utf-16-be", seen[::2], seen[1::2])):
        if zeros.count(0) > _MOST * len(zeros) and letters.count(0) < len(letters) / 10:
            return encoding
    return "utf-8-sig"


def _texts(error: BaseException) -> Iterator[str]:
    """Each exception once: itself, its notes, its members, its cause or, where that is hidden, what it was raised while."""
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < _DEEPEST:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield f"{type(current).__name__}: {_said(current)}"
        notes = getattr(current, "__notes__", None)
        yield from (_said(note) for note in notes[:_DEEPEST]) if isinstance(notes, list | tuple) else ()
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting += members[:_DEEPEST]
        behind = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        waiting += [behind] if behind is not None else []


def _said(thing: object) -> str:
    try:
        return str(thing)[:_LONGEST]
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure that is being told
        return ""
