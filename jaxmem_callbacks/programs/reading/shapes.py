"""A shape as XLA prints it in, such as ``bf16[6,128,1024]{2,1,0:T(8,128)(2,1)}``; elements and bytes without padding out."""

from __future__ import annotations

import math
import re

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
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
        if not bits and kind not in _WITHOUT_BITS:
            return None
        total += -(-_elements(sizes) * (int(bits) if bits else _WITHOUT_BITS[kind]) // 8)
    return total if arrays else None


def _elements(sizes: str) -> int:
    return math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
