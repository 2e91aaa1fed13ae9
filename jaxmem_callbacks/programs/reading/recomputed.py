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
_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w*o\w*)->")
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
    """Operations of a matrix product or convolution, also where a library is called for it, else 0."""
    operands = [shapes.get(name, ()) for name in _OPERAND.findall(match["operands"])]
    product = _CONTRACTED.search(match["rest"])
    if product and operands and operands[0]:
        axes = re.findall(r"\d+", product[1] or product[2] or "")
        return 2 * math.prod(shape) * math.prod(operands[0][int(axis)] for axis in axes)
    labels = _KERNEL_LABELS.search(match["rest"])
    if labels and len(operands) > 1:
        # A gradient by the kernel has the kernel as its result and takes the convolution's results; one by the input takes them
        # in the place of the input. Either way each of them is a sum over the kernel, less its output channels.
        results, kernel = shape, operands[1]
        if "convBackwardFilter" in match["rest"]:
            results, kernel = operands[1], shape
        elif "convBackwardInput" in match["rest"]:
            results = operands[0]
        made = kernel[labels[1].index("o")] if kernel else 1
        return 2 * math.prod(results) * math.prod(kernel) // max(made, 1)
    return 0
