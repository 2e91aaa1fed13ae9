"""A shape as XLA prints it in, such as ``bf16[6,128,1024]{2,1,0:T(8,128)(2,1)}``; elements and bytes out."""

from __future__ import annotations

import math
import re

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
# What follows: a layout's dimensions, the last one first, and the tile that the last ones are rounded up to.
_LAYOUT = re.compile(r"\{([\d,]*)(?::T\(([\d,]+)\))?")
_WITHOUT_BITS = {"pred": 8, "token": 0, "opaque": 0}


def element_count(shape: str) -> int:
    """Elements of an array; of a tuple, those of its first array; 0 where there is none."""
    found = _ARRAY.search(shape)
    return _elements(found[3]) if found else 0


def unpadded_bytes(shape: str) -> int | None:
    """Bytes of all arrays in a shape as if their elements lay side by side; None where a dtype is unknown."""
    total = 0
    arrays = _ARRAY.findall(shape)
    for kind, bits, sizes in arrays:
        size = _bytes(kind, bits, _elements(sizes))
        if size is None:
            return None
        total += size
    return total if arrays else None


def padded_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape as they lie in memory, in tiles where the layout says so; 0 for an unknown dtype."""
    total = 0
    for found in _ARRAY.finditer(shape):
        layout = _LAYOUT.match(shape, found.end())
        order, tile = layout.groups() if layout else ("", None)
        if tile is None:
            elements = _elements(found[3])
        else:
            sizes, tiles = _numbers(found[3]), _numbers(tile)[::-1]
            minor = [sizes[place] for place in _numbers(order)]
            minor += [1] * (len(tiles) - len(minor))
            tiles += [1] * (len(minor) - len(tiles))
            elements = math.prod(-(-size // by) * by for size, by in zip(minor, tiles, strict=True))
        total += _bytes(found[1], found[2], elements) or 0
    return total


def _bytes(kind: str, bits: str, elements: int) -> int | None:
    if not bits and kind not in _WITHOUT_BITS:
        return None
    return -(-elements * (int(bits) if bits else _WITHOUT_BITS[kind]) // 8)


def _elements(sizes: str) -> int:
    return math.prod(_numbers(sizes))


def _numbers(sizes: str) -> list[int]:
    return [int(size.lstrip("<=")) for size in sizes.split(",") if size]
