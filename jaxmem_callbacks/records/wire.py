"""Protocol buffers by hand: the fields of a message, read and written. No schema is compiled, so no package is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def fields_of_message(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of one message.

    Raises:
        IndexError, ValueError: the bytes are no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint_at(data, at)
        number, kind = divmod(key, 8)
        if kind == _VARINT:
            value, at = _varint_at(data, at)
            yield number, value
            continue
        if kind == _LENGTH:
            size, at = _varint_at(data, at)
        else:
            size = _SIZES.get(kind)
        if size is None or at + size > len(data):
            msg = f"no field of kind {kind} with {size} bytes at {at}"
            raise ValueError(msg)
        yield number, data[at : at + size]
        at += size


def varints(data: bytes) -> Iterator[int]:
    """The numbers of a packed field.

    Raises:
        IndexError: the last one is cut.
    """
    at = 0
    while at < len(data):
        value, at = _varint_at(data, at)
        yield value


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next one begins."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def message_of(fields: Iterable[tuple[int, int | bytes | str | Iterable[int]]]) -> bytes:
    """A message of these fields, by number: numbers as such, bytes and texts with their length, several numbers packed."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3 | _VARINT), _varint(value)]
            continue
        data = value.encode() if isinstance(value, str) else value
        data = data if isinstance(data, bytes) else b"".join(map(_varint, data))
        parts += [_varint(number << 3 | _LENGTH), _varint(len(data)), data]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - seven bits a byte
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
