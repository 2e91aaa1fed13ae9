"""Optimised HLO text in, an estimate of the operations that the compiler chose to compute again by itself out.

Near its memory limit XLA clones instructions and names the clones ``.remat``. Their products and convolutions are counted from
their shapes, everything else as one operation a result element, loops once.
"""

from __future__ import annotations

import math
import re

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.-]+) = (?P<type>\([^=]*?\)|\S+) (?P<op>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?(?P<name>[\w.-]+) (?:\([^{]*)?.*\{\s*$")
_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_OPERAND = re.compile(r"%?([\w.-]+)\s*(?:,|$)")


def recomputed_flops(hlo_text: str) -> int:
    """Operations on one device of the instructions that XLA's rematerialisation added; 0 where it added none."""
    if ".remat" not in hlo_text:
        return 0
    shapes: dict[str, tuple[int, ...]] = {}
    products: dict[str, int] = {}
    again: list[tuple[int, str | None]] = []
    computation = ""
    for line in hlo_text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            header = _COMPUTATION.match(line)
            computation = header["name"] if header else computation
            continue
        shape = _shape(match["type"])
        shapes[match["name"]] = shape
        flops = _product(match, shape, shapes)
        products[computation] = products.get(computation, 0) + flops
        if ".remat" in match["name"] and match["operands"]:
            called = re.search(r"calls=%?([\w.-]+)", match["rest"])
            again.append((flops or math.prod(shape), called[1] if called else None))
    return sum(own + products.get(called or "", 0) for own, called in again)


def _shape(text: str) -> tuple[int, ...]:
    """The first shape of a type; of a tuple's the first element stands for all."""
    found = _SHAPE.search(text)
    return tuple(int(size) for size in found[1].split(",") if size) if found else ()


def _product(match: re.Match[str], shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> int:
    """Operations of a matrix product or convolution, else 0."""
    operands = [shapes.get(name, ()) for name in _OPERAND.findall(match["operands"])]
    if match["op"] == "dot" and operands:
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", match["rest"])
        sizes = [operands[0][int(axis)] for axis in axes[1].split(",") if axis] if axes and operands[0] else []
        return 2 * math.prod(shape) * math.prod(sizes)
    if match["op"] == "convolution" and len(operands) > 1:
        labels = re.search(r"dim_labels=\w+_(\w+)->", match["rest"])
        kernel = operands[1]
        made = kernel[labels[1].index("o")] if labels and "o" in labels[1] and kernel else 1
        return 2 * math.prod(shape) * math.prod(kernel) // max(made, 1)
    return 0
