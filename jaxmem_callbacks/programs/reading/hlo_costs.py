"""Costs in optimised HLO text: bytes that collectives move, operations that the compiler repeats."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_ENTRY_OR_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.-]+) (?:\([^{]*)?.*\{\s*$")
_COLLECTIVE = re.compile(
    r" = (?P<type>\([^=]*?\)|\S+) (?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_TYPED_SHAPE = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_CALLER = re.compile(r" (?:while|call|fusion|async-start|conditional)\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|condition)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(?:true|false)_computation=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_BITS = re.compile(r"\d+")
_COMMENT = re.compile(r"/\*.*?\*/")  # in long tuples, such as /*index=5*/


@dataclass(frozen=True, slots=True)
class Collectives:
    """What one program's collectives do on one device.

    Attributes:
        count: How often one runs, loops multiplied in.
        moved_bytes: Through the device's links.
    """

    count: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _Call:
    """Computations of which one runs, so many times: a loop's body, or the branches of a condition."""

    either: tuple[str, ...]
    trips: int = 1


def collectives_of(hlo_text: str, device_count: int) -> Collectives:
    """Collectives of an optimised program; loops whose trip count the compiler does not know count once.

    Of a condition's branches the one that moves most is counted.
    """
    own: dict[str, list[int]] = {}
    calls: dict[str, list[_Call]] = {}
    computation = entry = ""
    for line in hlo_text.splitlines():
        if not line.startswith((" ", "\t")):
            header = _ENTRY_OR_COMPUTATION.match(line)
            if header:
                computation = header["name"]
                entry = computation if header["entry"] else entry
            continue
        found = _COLLECTIVE.search(_COMMENT.sub("", line))
        if found:
            own.setdefault(computation, []).append(_moved(found, _group(line, device_count)))
        if _CALLER.search(line):
            calls.setdefault(computation, []).extend(_calls(line))
    return _total(entry, own, calls, {})


def _calls(line: str) -> list[_Call]:
    trips = _TRIPS.search(line)
    times = int(trips[1]) if trips else 1
    listed = _BRANCHES.search(line)
    branches = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else _TWO_BRANCHES.findall(line)
    return [*(_Call((name,), times) for name in _CALLED.findall(line)), *([_Call(tuple(branches))] if branches else [])]


def _total(
    name: str, own: dict[str, list[int]], calls: dict[str, list[_Call]], known: dict[str, Collectives]
) -> Collectives:
    if name not in known:
        count, moved = len(own.get(name, ())), sum(own.get(name, ()))
        for call in calls.get(name, ()):
            inner = max((_total(one, own, calls, known) for one in call.either), key=lambda each: each.moved_bytes)
            count, moved = count + call.trips * inner.count, moved + call.trips * inner.moved_bytes
        known[name] = Collectives(count, moved)
    return known[name]


def _group(line: str, device_count: int) -> int:
    """How many devices take part together; all of them where the line names no groups."""
    groups = _GROUP.search(line)
    if groups is None:
        return device_count
    return len(groups[1].split(",")) if groups[1] else int(groups[2])


def _moved(found: re.Match[str], devices: int) -> int:
    """Bytes through the links; the size is that of the results, of a scatter parts of its operands."""
    op, size = found["op"], _result_bytes(found)
    share = (devices - 1) / max(devices, 1)
    whole = size * devices if op == "reduce-scatter" else size
    return int(whole * share * (2 if op == "all-reduce" else 1)) if op != "collective-permute" else size


def _width(kind: str) -> int:
    """Bytes of one element, from a type's name such as ``bf16``; what names no bits is one byte."""
    bits = _BITS.search(kind)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _result_bytes(found: re.Match[str]) -> int:
    """Bytes of the results. An asynchronous start has its operands before them, except a reduction to all, which has none."""
    text = found["type"]
    if found["start"] and found["op"] != "all-reduce":
        text = _parts(text[1:-1])[1]
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _width(kind) for kind, dims in _TYPED_SHAPE.findall(text)
    )


def _parts(text: str) -> list[str]:
    """A tuple's parts, which may be tuples themselves and have commas in their shapes and layouts."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


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
