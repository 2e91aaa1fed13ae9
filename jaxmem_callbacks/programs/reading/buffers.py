"""What makes a program's peak: the buffers alive at the moment when its temporaries fill most memory.

The figure is the compiler's plan, not a measurement. Temporaries share one stretch of memory whose size is the program's
``temp_bytes``; each value has a place in it and a live range in the flattened schedule (loop bodies once). The peak is the
position where the values alive cover most of it. What is left over there is reported as a buffer of kind ``gap``: memory that
the plan needs because values of other moments do not fit together more closely. So temporaries plus gap are the size of
the stretch exactly.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem_callbacks.programs.reading.buffer_assignment import (
    HOST_COLOR,
    Allocation,
    Value,
    device_allocations,
    dump_file,
    dump_options,
    read_allocations,
    read_schedule,
)
from jaxmem_callbacks.programs.reading.buffer_groups import Arguments, BufferClassifier
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, parse_module, unpadded_bytes
from jaxmem_callbacks.records.peaks import (
    AT_THE_PEAK,
    CONSTANTS,
    GAPS,
    GRADIENTS,
    RESULTS,
    SAVED,
    TEMPORARIES,
    UNKNOWN,
    WHOLE_HEAP,
    Peak,
    peak_of,
)
from jaxmem_callbacks.records.programs import Buffer

_Slot = tuple[int, int, int]  # allocation, offset, bytes
_RANKED = (UNKNOWN, TEMPORARIES, GRADIENTS, SAVED)  # of several values in one place the last of these decides
_UNINFORMATIVE = {"broadcast", "tuple", "while", "parameter", "custom-call", "constant", "conditional", "call"}


def peak_attached(lowered: Any, arguments: Arguments | None = None) -> Peak:
    """What makes the peak of a program on the attached devices. Costs one more compile.

    Args:
        lowered: What ``jitted.lower(*args)`` gave.
        arguments: What its arguments hold; judged by their names where this does not hold them.

    Returns:
        Temporaries alive at the peak, the gap between them, arguments, outputs and constants; largest first.

    Raises:
        CompileError: the compiler wrote no buffer assignment.
    """
    return compiled_with_peak(lowered, arguments)[1]


def compiled_with_peak(lowered: Any, arguments: Arguments | None = None) -> tuple[Any, Peak]:
    """A program compiled for the attached devices, past JAX's persistent cache, and what makes its peak.

    Raises:
        CompileError: the compiler wrote no buffer assignment.
    """
    import jax

    with tempfile.TemporaryDirectory(prefix="jaxmem-") as place:
        folder = pathlib.Path(place)
        compiled = lowered.compile(compiler_options=dump_options(folder) | past_the_cache())
        return compiled, read_peak(folder, jax.default_backend(), arguments)


def read_peak(folder: pathlib.Path, platform: str, arguments: Arguments | None = None) -> Peak:
    """What makes the peak of the program whose dumps lie in ``folder``.

    Args:
        folder: Where a compile with `dump_options` wrote.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        arguments: What the program's parameters hold; judged by their names where this does not hold them.

    Raises:
        CompileError: there are no such dumps.
    """
    every = read_allocations(folder)
    here = device_allocations(every, platform)
    module = parse_module(dump_file(folder, ".txt").read_text("utf-8", "replace"))
    known = arguments or Arguments()
    temporaries = [allocation for allocation in here if allocation.kind == "temporary"]
    slots = _slots(temporaries)
    position = _peak_position(slots)
    reader = _Reader(module, known, BufferClassifier(module, known), position)
    beside = [each for each in every if each not in here]
    buffers = [
        *reader.alive(temporaries),
        *(reader.whole(each) for each in here if each.kind in {"argument", "output", "constant"}),
        *reader.beside("host", [each for each in beside if each.color == HOST_COLOR]),
        *reader.beside("on-chip", [each for each in beside if each.color != HOST_COLOR]),
    ]
    has_ranges = not slots or any(value.first is not None for values in slots.values() for value in values)
    moment = reader.moment(read_schedule(folder)) if slots and has_ranges else None
    return peak_of(buffers, basis=AT_THE_PEAK if has_ranges else WHOLE_HEAP, moment=moment)


def past_the_cache() -> dict[str, Any]:
    """An option without effect on the program that makes JAX's persistent cache, where one is on, compile it anew.

    Dump options are no part of that cache's key, so a program found there is never compiled and never dumped.
    """
    import jax

    config: Any = jax.config  # its flags are declared on one JAX line and not on the other
    on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    return {"xla_debug_buffer_assignment_show_max": time.monotonic_ns() % 2**31} if on else {}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Describes the buffers of one program at one position of its schedule."""

    module: Module
    arguments: Arguments
    classifier: BufferClassifier
    position: int

    def alive(self, temporaries: Sequence[Allocation], *, gaps: bool = True) -> Iterator[Buffer]:
        """The temporaries alive at the position, one for each place in memory, and the gap."""
        slots = _slots(temporaries)
        alive = {
            slot: values for slot, values in slots.items() if any(_lives(value, self.position) for value in values)
        }
        covered: dict[int, list[tuple[int, int]]] = {}
        for slot in sorted(alive, key=lambda slot: -slot[2]):
            number, offset, size = slot
            taken = covered.setdefault(number, [])
            if any(start <= offset and offset + size <= end for start, end in taken):
                continue  # a part of a buffer reported already, such as one that is written in place
            taken.append((offset, offset + size))
            yield self._temporary(size, alive[slot])
        gap = sum(allocation.bytes - _covered(covered.get(i, [])) for i, allocation in enumerate(temporaries))
        if gap > 0 and gaps:
            yield Buffer(bytes=gap, shape="memory between the buffers", kind="gap", group=GAPS)

    def beside(self, space: str, allocations: Sequence[Allocation]) -> Iterator[Buffer]:
        """What is in another memory meanwhile."""
        temporaries = [each for each in allocations if each.kind == "temporary"]
        held = (self.whole(each) for each in allocations if each.kind in {"argument", "output"})
        yield from (replace(each, memory_space=space) for each in [*self.alive(temporaries, gaps=False), *held])

    def whole(self, allocation: Allocation) -> Buffer:
        """An allocation that is held throughout: an argument, an output or a constant."""
        value, group = (
            self._result(allocation) if allocation.kind == "output" else (self._holder(allocation), CONSTANTS)
        )
        origin = self.module.origin(value.name, value.index) if value else None
        name = origin.op_name if origin else None
        if allocation.kind == "argument":
            argument = self.arguments.find(allocation.parameter, name)
            name, group = argument.path or None, argument.kind
        return Buffer(
            bytes=allocation.bytes,
            shape=value.shape if value else "",
            kind=allocation.kind,
            operation=name,
            source=origin.source if origin else None,
            group=group,
            unpadded_bytes=unpadded_bytes(value.shape) if value else None,
        )

    def moment(self, schedule: dict[int, str]) -> str | None:
        """The operation at the position, or the last one before it that has a name, with its source line."""
        for position in range(self.position, -1, -1):
            origin = self.module.origin(schedule.get(position, ""))
            if origin is not None and origin.op_name and "/" in origin.op_name:
                return origin.op_name + (f" ({origin.source})" if origin.source else "")
        return None

    def _holder(self, allocation: Allocation) -> Value | None:
        """The value that an argument's or a constant's memory is for; in that of a donated argument others lie too."""
        own = self.module.parameters.get((self.module.entry or "", allocation.parameter or 0))
        filling = [value for value in allocation.values if value.bytes == allocation.bytes]
        arguments = [value for value in filling if allocation.kind == "argument" and value.name == own]
        return next(iter(arguments or filling or allocation.values), None)

    def _result(self, allocation: Allocation) -> tuple[Value | None, str]:
        """What lies at the position in memory that is kept for a result, which may be lent to others until then."""
        whole = [value for value in allocation.values if value.bytes == allocation.bytes]
        lent = [value for value in whole if value.first is not None and _lives(value, self.position)]
        for value in lent:
            group, _ = self.classifier.classify(value)
            if group in {GRADIENTS, SAVED}:
                return self.classifier.content(value), group
        last = max(whole or allocation.values, key=lambda value: value.first or 0, default=None)
        return last, RESULTS

    def _temporary(self, size: int, values: list[Value]) -> Buffer:
        """One buffer, described by the value alive in it that is most informative."""
        alive = [value for value in values if _lives(value, self.position)]
        ranked = sorted((self._ranked(value) for value in alive), key=lambda ranked: ranked[0])
        rank, best, why = ranked[-1]
        if not rank[1]:  # nothing but a loop's beginning: what the loop makes of it lies in the same place
            rank, best, why = max(
                (self._ranked(v) for v in _same_buffer(values, self.position)), key=lambda ranked: ranked[0]
            )
        held = self.classifier.content(best)
        origin = self.module.origin(held.name, held.index)
        copied = self.classifier.copied_argument(best)
        return Buffer(
            bytes=size,
            shape=best.shape,
            kind="temporary",
            operation=f"copy of {copied}" if copied else origin.op_name if origin else None,
            source=origin.source if origin else None,
            group=_RANKED[rank[0]],
            unpadded_bytes=unpadded_bytes(best.shape),
            why=why,
        )

    def _ranked(self, value: Value) -> tuple[tuple[int, bool, tuple[bool, ...]], Value, str | None]:
        """A value with its group's rank and how informative it is."""
        group, why = self.classifier.classify(value)
        held = self.classifier.content(value)
        information = _information(held, self.module)
        return (_RANKED.index(group), any(information[:2]), information), value, why


def _slots(temporaries: Sequence[Allocation]) -> dict[_Slot, list[Value]]:
    slots: dict[_Slot, list[Value]] = {}
    for number, allocation in enumerate(temporaries):
        for value in allocation.values:
            if value.bytes:
                slots.setdefault((number, value.offset, value.bytes), []).append(value)
    return slots


def _peak_position(slots: dict[_Slot, list[Value]]) -> int:
    """The position in the schedule where the slots in use add up to most bytes."""
    changes: dict[int, int] = {}
    for (_, _, size), values in slots.items():
        for first, last in _merged((v.first, v.last) for v in values if v.first is not None and v.last is not None):
            changes[first] = changes.get(first, 0) + size
            changes[last + 1] = changes.get(last + 1, 0) - size
    best, best_bytes, total = 0, -1, 0
    for position in sorted(changes):
        total += changes[position]
        if total > best_bytes:
            best, best_bytes = position, total
    return best


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping spans joined."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _covered(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in _merged(spans))


def _lives(value: Value, position: int) -> bool:
    """Whether a value lives at a position; one without a live range is taken to live throughout."""
    if value.first is None or value.last is None:
        return True
    return value.first <= position <= value.last


def _same_buffer(values: list[Value], position: int) -> list[Value]:
    """The values that hand one buffer on to each other, such as a loop's initial value, its update and its result."""
    chain = [value for value in values if _lives(value, position)]
    rest = [value for value in values if value not in chain and value.first is not None]
    grown = True
    while grown:
        near = [value for value in rest if any(_touches(value, other) for other in chain)]
        grown = bool(near)
        chain += near
        rest = [value for value in rest if value not in near]
    return chain


def _touches(one: Value, other: Value) -> bool:
    if one.first is None or one.last is None or other.first is None or other.last is None:
        return False
    return one.first <= other.last + 1 and other.first <= one.last + 1


def _information(value: Value, module: Module) -> tuple[bool, bool, bool, bool]:
    origin = module.origin(value.name, value.index)
    maker: Instruction | None = module.instructions.get(value.name)
    return (
        module.writes_slice(value.name),
        maker is not None and maker.opcode not in _UNINFORMATIVE,
        origin is not None and origin.source is not None,
        origin is not None and origin.op_name is not None,
    )
