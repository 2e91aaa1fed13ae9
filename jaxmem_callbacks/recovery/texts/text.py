"""The texts of an exception: an exception enters, what it, its causes, its notes and its group's members say leaves."""

from __future__ import annotations

from collections.abc import Iterator

_DEEPEST = 64
_LONGEST = 4 * 2**20
"""Characters of one text that are read, from its beginning: an exception that says more repeats itself."""


def text_of(source: object) -> str:
    """All that an exception or a text says, with the exception itself first.

    Args:
        source: An exception, text, or bytes of text in any encoding near UTF-8.

    Returns:
        The texts, a line each; an empty one where nothing can be said. Never raises, whatever the object's own methods do.
    """
    if isinstance(source, str):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source).decode("utf-8", errors="replace")
    if isinstance(source, BaseException):
        return "\n".join(_texts(source))
    return _said(source)


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
