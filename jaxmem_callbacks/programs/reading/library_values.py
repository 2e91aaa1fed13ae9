"""Optimised HLO of a CPU program enters; the largest value that a kernel library makes by itself leaves, in bytes.

XLA hands groups of operations to YNNPACK, XNNPACK or oneDNN as custom fusions. What lies between their operations is held by
the library, is no temporary of XLA's, and stands in no figure of the compiler. A fusion's results do: XLA gives them room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxmem_callbacks.programs.reading.hlo import Module, parse_module
from jaxmem_callbacks.programs.reading.shapes import unpadded_bytes

_CUSTOM = re.compile(r"fusion\(.*kind=kCustom.*?calls=%?([\w.\-]+)")
_PASSING = ("bitcast", "tuple")
_NO_VALUES = ("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "broadcast")


def library_bytes(hlo_text: str) -> int:
    """Bytes of the largest value inside a custom fusion, its results left out; 0 where there is none."""
    fused = set(_CUSTOM.findall(hlo_text))
    if not fused:
        return 0
    module = parse_module(hlo_text)
    results = {name for computation in fused for name in _results(module, computation)}
    return max(
        (
            unpadded_bytes(each.shape) or 0
            for each in module.instructions.values()
            if each.computation in fused and each.opcode not in _NO_VALUES and each.name not in results
        ),
        default=0,
    )


def _results(module: Module, computation: str) -> Iterator[str]:
    """The instructions whose values a fusion returns."""
    root = module.roots.get(computation)
    waiting = [] if root is None else [root]
    while waiting:
        each = waiting.pop()
        yield each.name
        if each.opcode in _PASSING:
            waiting += [module.instructions[name] for name in each.operands if name in module.instructions]
