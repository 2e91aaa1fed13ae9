"""Arguments that wait in host memory: how much of them a compiled schedule has on the device at one moment.

A copy that comes from the host lives from its start to its last use, and an update on its way there from where it is made to the
end of its copy. What a GPU's kernels read and write in the host's memory by themselves takes nothing of the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, padded_bytes, top_level_parts
from jaxmem_callbacks.records.units import format_bytes

_HOST = "S(5)"  # XLA's memory space of the host in a layout
_PASSING = {"bitcast", "get-tuple-element", "copy-done"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopies:
    """What waits on the host, and the most of it that a program has on the device at one moment.

    Attributes:
        waiting_bytes: Bytes of the arguments that are in host memory.
        arrays: How many they are.
        at_once_bytes: The most bytes of their copies and updates that are on the device at one moment.
        at_once: How many arrays that are.
        moment: The number of the instruction where this is so.
        length: Instructions of the schedule.
    """

    waiting_bytes: int
    arrays: int
    at_once_bytes: int = 0
    at_once: int = 0
    moment: int = 0
    length: int = 0

    @property
    def words(self) -> str:
        """A sentence on the schedule."""
        if not self.at_once:
            return "The compiled program reads and writes them where they are."
        return (
            f"The compiled schedule has {format_bytes(self.at_once_bytes)} of them on the device at once: at instruction "
            f"{self.moment:,} of {self.length:,}, {self.at_once} arrays have come for their update or are on their way back."
        )


def host_copies(module: Module) -> HostCopies | None:
    """The host's part of a program's arguments and its way to the device; None where all of them are on the device.

    Args:
        module: The program, its instructions in the order in which they run.
    """
    entry = [each for each in module.instructions.values() if each.computation == module.entry]
    waiting = [each for each in entry if each.opcode == "parameter" and _HOST in each.shape]
    if not waiting:
        return None
    size = sum(padded_bytes(each.shape) for each in waiting)
    changes = [_Change(0, 0, 0)]
    for stay in _Stays(entry).all():
        changes += [_Change(stay.first, stay.bytes, 1), _Change(stay.last, -stay.bytes, -1)]
    changes.sort()  # at one instruction what ends comes first: an update takes the place of what it is made of
    held = list(
        zip(accumulate(each.bytes for each in changes), accumulate(each.arrays for each in changes), strict=True)
    )
    most = max(range(len(held)), key=lambda number: held[number][0])
    return HostCopies(
        waiting_bytes=size,
        arrays=len(waiting),
        at_once_bytes=held[most][0],
        at_once=held[most][1],
        moment=changes[most].position,
        length=len(entry),
    )


class _Change(NamedTuple):
    position: int
    bytes: int
    arrays: int


class _Stay(NamedTuple):
    """An array on the device, from one instruction to before another."""

    first: int
    last: int
    bytes: int


class _Stays:
    """Stays on the device of arrays whose place is the host, in one computation.

    Args:
        instructions: In the order in which they run.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        self._at = {each.name: position for position, each in enumerate(instructions)}
        self._by_name = {each.name: each for each in instructions}
        self._users: dict[str, list[Instruction]] = {}
        for each in instructions:
            for operand in each.operands:
                self._users.setdefault(operand, []).append(each)

    def all(self) -> Iterator[_Stay]:
        """Those of every copy between the two memories."""
        for each in self._by_name.values():
            source = self._by_name.get(each.operands[0]) if each.opcode in {"copy", "copy-start"} else None
            if source is None:
                continue
            result = top_level_parts(each.shape.strip("()"))[0]
            if _HOST in source.shape and "S(" not in result:
                yield _Stay(self._at[each.name], self._last_use(each), padded_bytes(result))
            elif _HOST in result and "S(" not in source.shape:
                first = self._at[self._maker(source).name]
                yield _Stay(first, self._end(each), padded_bytes(result))

    def _last_use(self, copy: Instruction) -> int:
        """Where what a copy brings is read last."""
        ends = [self._at[copy.name]]
        for user in self._users.get(copy.name, ()):
            if user.opcode in _PASSING:
                ends.append(self._last_use(user))
            else:
                ends.append(self._end(user))
        return max(ends)

    def _end(self, each: Instruction) -> int:
        """Where an instruction ends: of one that is asynchronous, where it is waited for."""
        ends = [self._at[each.name]]
        if each.opcode.endswith("-start"):
            ends += [self._at[user.name] for user in self._users.get(each.name, ())]
        return max(ends)

    def _maker(self, each: Instruction) -> Instruction:
        """What makes a value that is handed on."""
        while each.opcode in _PASSING and each.operands and each.operands[0] in self._by_name:
            each = self._by_name[each.operands[0]]
        return each
