"""Costs of a parsed program: constants, values of kernel libraries, collectives, and what the compiler computes again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem_callbacks.programs.reading.hlo import (
    CALLING,
    Instruction,
    Module,
    dimensions,
    padded_bytes,
    top_level_parts,
    unpadded_bytes,
)

# A layout's memory space, such as a TPU's on-chip memory or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


def constant_bytes(module: Module) -> int:
    """Bytes of a program's constants in the device's main memory, padding included.

    Those in a fusion are part of its code, and so nowhere in memory.
    """
    return sum(
        padded_bytes(each.shape)
        for each in module.instructions.values()
        if each.opcode == "constant" and each.computation not in module.fusions and not _ELSEWHERE.search(each.shape)
    )


_LIBRARY_PASSING = ("bitcast", "tuple")
_NO_VALUES = ("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "broadcast")


def library_bytes(module: Module) -> int:
    """Bytes of the largest value inside a custom fusion, its results left out; 0 where there is none."""
    fused = {computation for computation, each in module.fusions.items() if "kind=kCustom" in each.attributes}
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
        if each.opcode in _LIBRARY_PASSING:
            waiting += [module.instructions[name] for name in each.operands if name in module.instructions]


_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w*o\w*)->")


def recomputed(module: Module) -> list[Instruction]:
    """Instructions that the compiler's own rematerialisation added near its memory limit, which their names show.

    One that reads nothing, such as a broadcast constant, is made where it is used for free, whatever its name.
    """
    return [each for each in module.instructions.values() if ".remat" in each.name and each.operand_text]


def recomputed_flops(module: Module) -> int:
    """Operations on one device of the instructions that XLA's rematerialisation added; 0 where it added none."""
    again = recomputed(module)
    fused = {each.calls for each in again if each.calls}
    inside = dict.fromkeys(fused, 0)
    for each in module.instructions.values() if fused else ():
        if each.computation in fused:
            inside[each.computation] += _product(each, module)
    return sum(
        (_product(each, module) or math.prod(dimensions(each.shape))) + inside.get(each.calls or "", 0)
        for each in again
    )


def _product(each: Instruction, module: Module) -> int:
    """Operations of a matrix product or convolution, also where a library is called for it, else 0."""
    shape = dimensions(each.shape)
    found = [module.instructions.get(name) for name in each.operands]
    operands = [() if operand is None else dimensions(operand.shape) for operand in found]
    product = _CONTRACTED.search(each.attributes)
    if product and operands and operands[0]:
        axes = re.findall(r"\d+", product[1] or product[2] or "")
        return 2 * math.prod(shape) * math.prod(operands[0][int(axis)] for axis in axes)
    labels = _KERNEL_LABELS.search(each.attributes)
    if labels and len(operands) > 1:
        # A gradient by the kernel has the kernel as its result and takes the convolution's results; one by the input takes them
        # in the place of the input. Either way each of them is a sum over the kernel, less its output channels.
        results, kernel = shape, operands[1]
        if "convBackwardFilter" in each.attributes:
            results, kernel = operands[1], shape
        elif "convBackwardInput" in each.attributes:
            results = operands[0]
        made = kernel[labels[1].index("o")] if kernel else 1
        return 2 * math.prod(results) * math.prod(kernel) // max(made, 1)
    return 0


_COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
_COUNTED = {"fusion", *CALLING, *_COLLECTIVES, *(f"{each}-start" for each in _COLLECTIVES)}
_TYPED_SHAPE = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Collectives:
    """What one program's collectives do on one device.

    Attributes:
        count: How often one runs, loops multiplied in.
        moved_bytes: Through the device's links.
    """

    count: int
    moved_bytes: int


def collectives_of(module: Module, device_count: int) -> Collectives:
    """Collectives of an optimised program; loops whose trip count the compiler does not know count once.

    Of a condition's branches the one that moves most is counted.
    """
    by_computation: dict[str, list[Instruction]] = {}
    for each in module.instructions.values():
        if each.opcode in _COUNTED:
            by_computation.setdefault(each.computation, []).append(each)
    known: dict[str, Collectives] = {}

    def total(computation: str) -> Collectives:
        if computation not in known:
            count = moved = 0
            for each in by_computation.get(computation, ()):
                if each.opcode.removesuffix("-start") in _COLLECTIVES:
                    count, moved = count + 1, moved + _moved(each, device_count)
                for either, trips in _calls(each):
                    inner = max(map(total, either), key=lambda branch: branch.moved_bytes)
                    count, moved = count + trips * inner.count, moved + trips * inner.moved_bytes
            known[computation] = Collectives(count, moved)
        return known[computation]

    return total(module.entry)


def _calls(each: Instruction) -> Iterator[tuple[tuple[str, ...], int]]:
    """Computations of which one runs, and how often: a loop's body, or the branches of a condition."""
    if each.opcode == "conditional":
        yield each.called, 1
        return
    trips = _TRIPS.search(each.attributes)
    times = int(trips[1]) if trips else 1
    for name in [*each.called, *_CONDITION.findall(each.attributes), *([each.calls] if each.calls else ())]:
        yield (name,), times


def _devices_together(each: Instruction, device_count: int) -> int:
    """How many devices take part together; all of them where the instruction names no groups."""
    groups = _GROUP.search(each.attributes)
    if groups is None:
        return device_count
    return len(groups[1].split(",")) if groups[1] else int(groups[2])


def _moved(each: Instruction, device_count: int) -> int:
    """Bytes through the links; the size is that of the results, of a scatter parts of its operands."""
    operation, size, devices = (
        each.opcode.removesuffix("-start"),
        _result_bytes(each),
        _devices_together(each, device_count),
    )
    share = (devices - 1) / max(devices, 1)
    whole = size * devices if operation == "reduce-scatter" else size
    return int(whole * share * (2 if operation == "all-reduce" else 1)) if operation != "collective-permute" else size


def _width(kind: str) -> int:
    """Bytes of one element, from a type's name such as ``bf16``; what names no bits is one byte."""
    bits = _BITS.search(kind)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _result_bytes(each: Instruction) -> int:
    """Bytes of the results. An asynchronous start has its operands before them, except a reduction to all, which has none."""
    text = each.shape
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        text = top_level_parts(text[1:-1])[1]
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _width(kind) for kind, dims in _TYPED_SHAPE.findall(text)
    )
