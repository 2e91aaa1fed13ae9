"""A compiled program's serialized buffer assignment in, the bytes of its allocations in the device's main memory out.

The bytes are XLA's ``BufferAssignmentProto``, which ``memory_analysis()`` carries for CPUs and GPUs. Only the few fields that
are needed are read, by the wire format of protocol buffers, so that no schema is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxmem_callbacks.programs.reading.dumps import HOST_COLOR

# Fields of BufferAssignmentProto and of its BufferAllocationProto.
_ALLOCATIONS = 3
_SIZE, _IS_THREAD_LOCAL, _COLOR = 2, 3, 8
# Kinds of fields on the wire.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def assigned_bytes(serialized: bytes, platform: str) -> int | None:
    """Bytes of all allocations that a program asks the device for, of every memory color; None where they cannot be read.

    Args:
        serialized: The assignment; empty where the compiler gives none.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``; a TPU's other colors are its small on-chip memories.
    """
    try:
        every = [value for number, value in _fields(serialized) if number == _ALLOCATIONS]
        allocations = [_numbers(value) for value in every if isinstance(value, bytes)]
    except (IndexError, ValueError):
        return None

    def is_here(allocation: dict[int, int]) -> bool:
        color = allocation.get(_COLOR, 0)
        return not allocation.get(_IS_THREAD_LOCAL) and (color == 0 if platform == "tpu" else color != HOST_COLOR)

    return sum(each.get(_SIZE, 0) for each in allocations if is_here(each)) if allocations else None


def _numbers(allocation: bytes) -> dict[int, int]:
    """The numbers of one allocation, up to the values that share it, of which a large program has very many."""
    up_to = itertools.takewhile(lambda field: field[0] <= _COLOR, _fields(allocation))
    return {number: value for number, value in up_to if isinstance(value, int)}


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of one message.

    Raises:
        IndexError, ValueError: the bytes are no message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == _VARINT:
            yield number, varint()
            continue
        sizes = {_FIXED64: 8, _FIXED32: 4}
        size = varint() if kind == _LENGTH else sizes.get(kind)
        if size is None or at + size > len(data):
            msg = f"no field of kind {kind} with {size} bytes at {at}"
            raise ValueError(msg)
        yield number, data[at : at + size]
        at += size
