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
_CALLED = re.compile(r"(?:body|to_apply|calls|condition)=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
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


def collectives_of(hlo_text: str, device_count: int) -> Collectives:
    """Collectives of an optimised program; loops whose trip count the compiler does not know count once."""
    own: dict[str, list[int]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
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
            own.setdefault(computation, []).append(_moved(found["op"], _made(found), device_count))
        trips = _TRIPS.search(line)
        for called in _CALLED.findall(line) if "while(" in line or "call(" in line or "fusion(" in line else ():
            calls.setdefault(computation, []).append((called, int(trips[1]) if trips else 1))
    return _total(entry, own, calls, {})


def _total(
    name: str, own: dict[str, list[int]], calls: dict[str, list[tuple[str, int]]], known: dict[str, Collectives]
) -> Collectives:
    if name not in known:
        count, moved = len(own.get(name, ())), sum(own.get(name, ()))
        for called, trips in calls.get(name, ()):
            inner = _total(called, own, calls, known)
            count, moved = count + trips * inner.count, moved + trips * inner.moved_bytes
        known[name] = Collectives(count, moved)
    return known[name]


def _moved(op: str, size: int, devices: int) -> int:
    """Bytes through the links; ``size`` is that of the result, of a scatter a part of the operand."""
    share = (devices - 1) / max(devices, 1)
    whole = size * devices if op == "reduce-scatter" else size
    return int(whole * share * (2 if op == "all-reduce" else 1)) if op != "collective-permute" else size


def _width(kind: str) -> int:
    """Bytes of one element, from a type's name such as ``bf16``; what names no bits is one byte."""
    bits = _BITS.search(kind)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _made(found: re.Match[str]) -> int:
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
