"""Optimised HLO text in, the bytes that its collectives move through one device's links out; loops multiplied in.

A ring is assumed: of n devices a gather or scatter moves (n-1)/n of the whole result or operand, a reduction to all twice that.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.-]+) (?:\([^{]*)?.*\{\s*$")
_COLLECTIVE = re.compile(
    r" = (?P<type>\([^=]*?\)|\S+) (?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_SHAPE = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
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
            header = _COMPUTATION.match(line)
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
    return sum(math.prod(int(n) for n in dims.split(",") if n) * _width(kind) for kind, dims in _SHAPE.findall(text))


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
