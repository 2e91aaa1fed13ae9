"""Optimised HLO of a CPU program enters; the largest value that a kernel library makes by itself leaves, in bytes.

XLA hands groups of operations to YNNPACK, XNNPACK or oneDNN as custom fusions. What lies between their operations is held by
the library, is no temporary of XLA's, and stands in no figure of the compiler.
"""

from __future__ import annotations

import re

from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.reading.shapes import unpadded_bytes

_CUSTOM = re.compile(r"fusion\(.*kind=kCustom.*?calls=%?([\w.\-]+)")
_NO_VALUES = ("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "broadcast")


def library_bytes(hlo_text: str) -> int:
    """Bytes of the largest value inside a custom fusion; 0 where there is no such fusion."""
    fused = set(_CUSTOM.findall(hlo_text))
    if not fused:
        return 0
    module = parse_module(hlo_text)
    return max(
        (
            unpadded_bytes(each.shape) or 0
            for each in module.instructions.values()
            if each.computation in fused and each.opcode not in _NO_VALUES
        ),
        default=0,
    )
