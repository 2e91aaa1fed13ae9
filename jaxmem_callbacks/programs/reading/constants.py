"""Optimised HLO text in, bytes of the arrays that are part of the program out, such as data that a step closes over.

They take device memory as long as the program is loaded. Of ``memory_analysis()`` they are in the total alone, which jaxlib has
since 0.12.
"""

from __future__ import annotations

import re

from jaxmem_callbacks.programs.reading.shapes import padded_bytes

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CONSTANT = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) constant\(")
# Part of the code that a fusion becomes, and so nowhere in memory.
_FUSED = re.compile(r" fusion\(.*?\bcalls=%?([\w.\-]+)")
# A layout's memory space, such as a TPU's on-chip memory or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


def constant_bytes(hlo_text: str | None) -> int:
    """Bytes of a program's constants in the device's main memory, padding included.

    Args:
        hlo_text: What ``compiled.as_text()`` gave.
    """
    shapes: dict[str, list[str]] = {}
    fused: set[str] = set()
    computation = ""
    for line in (hlo_text or "").splitlines():
        if line and not line[0].isspace():
            begun = _COMPUTATION.match(line)
            computation = begun[1] if begun else computation
        elif " constant(" in line and (found := _CONSTANT.match(line)):
            shapes.setdefault(computation, []).append(found[1])
        elif " fusion(" in line and (found := _FUSED.search(line)):
            fused.add(found[1])
    return sum(
        padded_bytes(shape)
        for place, found in shapes.items()
        if place not in fused
        for shape in found
        if not _ELSEWHERE.search(shape)
    )
