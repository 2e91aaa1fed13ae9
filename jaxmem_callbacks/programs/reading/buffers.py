"""What makes a program's peak: the buffers alive at the moment when its temporaries fill most memory.

The figure is the compiler's plan, not a measurement. Temporaries share one stretch of memory whose size is the program's
``temp_bytes``; each value has a place in it and a live range in the flattened schedule (loop bodies once). The peak is the
position where the values alive cover most of it. What is left over there is told as a buffer of kind ``gap``: memory that
the plan needs because values of other moments do not fit together more closely. So temporaries plus gap are the size of
the stretch exactly.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmem_callbacks.programs.reading.dumps import (
    Allocation,
    Value,
    device_allocations,
    dump_file,
    dump_options,
    read_allocations,
)
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, parse_module
from jaxmem_callbacks.records.programs import Buffer

_Slot = tuple[int, int, int]  # allocation, offset, bytes
_UNTELLING = {"broadcast", "tuple", "while", "parameter", "custom-call", "constant", "conditional", "call"}


def peak_buffers_attached(lowered: Any) -> tuple[Buffer, ...]:
    """What makes the peak of a program on the attached devices. Costs one more compile.

    Args:
        lowered: What ``jitted.lower(*args)`` gave.

    Returns:
        Temporaries alive at the peak, the gap between them, arguments, outputs and constants; largest first.

    Raises:
        CompileError: the compiler wrote no buffer assignment.
    """
    import jax

    with tempfile.TemporaryDirectory(prefix="jaxmem-") as place:
        folder = pathlib.Path(place)
        lowered.compile(compiler_options=dump_options(folder) | past_the_cache())
        return peak_buffers(folder, jax.default_backend())


def peak_buffers(folder: pathlib.Path, platform: str, argument_names: Sequence[str] = ()) -> tuple[Buffer, ...]:
    """What makes the peak of the program whose dumps lie in ``folder``.

    Args:
        folder: Where a compile with `dump_options` wrote.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        argument_names: Names of the program's parameters in order, where the HLO does not have the user's.
    """
    allocations = device_allocations(read_allocations(folder), platform)
    module = parse_module(dump_file(folder, ".txt").read_text("utf-8", "replace"))
    temporaries = [allocation for allocation in allocations if allocation.kind == "temporary"]
    held = [
        _whole(allocation, module, argument_names)
        for allocation in allocations
        if allocation.kind in {"argument", "output", "constant"}
    ]
    return tuple(sorted([*_alive(temporaries, module), *held], key=lambda buffer: -buffer.bytes))


def past_the_cache() -> dict[str, Any]:
    """An option without effect on the program that makes JAX's persistent cache, where one is on, compile it anew.

    Dump options are no part of that cache's key, so a program found there is never compiled and never dumped.
    """
    import jax

    config: Any = jax.config  # its flags are declared on one JAX line and not on the other
    on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    return {"xla_debug_buffer_assignment_show_max": time.monotonic_ns() % 2**31} if on else {}


def _alive(temporaries: Sequence[Allocation], module: Module) -> Iterable[Buffer]:
    """The temporaries alive at the fullest position, one for each place in memory, and the gap."""
    slots = _slots(temporaries)
    peak = _peak_position(slots)
    alive = {slot: values for slot, values in slots.items() if any(_lives(value, peak) for value in values)}
    covered: dict[int, list[tuple[int, int]]] = {}
    for slot in sorted(alive, key=lambda slot: -slot[2]):
        number, offset, size = slot
        taken = covered.setdefault(number, [])
        if any(start <= offset and offset + size <= end for start, end in taken):
            continue  # a part of a buffer told already, such as one that is written in place
        taken.append((offset, offset + size))
        yield _temporary(size, _same_buffer(alive[slot], peak), module)
    gap = sum(allocation.bytes - _covered(covered.get(i, [])) for i, allocation in enumerate(temporaries))
    if gap > 0:
        yield Buffer(bytes=gap, shape="memory between the buffers", kind="gap")


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


def _temporary(size: int, values: list[Value], module: Module) -> Buffer:
    """One buffer, described by the value in it that tells most."""
    best = max(values, key=lambda value: _telling(value, module))
    origin = module.origin(best.name, best.index)
    return Buffer(
        bytes=size,
        shape=best.shape,
        kind="temporary",
        operation=origin.op_name if origin else None,
        source=origin.source if origin else None,
    )


def _telling(value: Value, module: Module) -> tuple[bool, bool, bool, bool]:
    origin = module.origin(value.name, value.index)
    maker: Instruction | None = module.instructions.get(value.name)
    return (
        module.writes_slice(value.name),
        maker is not None and maker.opcode not in _UNTELLING,
        origin is not None and origin.source is not None,
        origin is not None and origin.op_name is not None,
    )


def _whole(allocation: Allocation, module: Module, argument_names: Sequence[str]) -> Buffer:
    """An allocation that is held throughout: an argument, an output or a constant."""
    value = allocation.values[0] if allocation.values else None
    origin = module.origin(value.name, value.index) if value else None
    name = origin.op_name if origin else None
    if allocation.parameter is not None and allocation.parameter < len(argument_names):
        name = argument_names[allocation.parameter]
    return Buffer(
        bytes=allocation.bytes,
        shape=value.shape if value else "",
        kind=allocation.kind,
        operation=name,
        source=origin.source if origin else None,
    )
