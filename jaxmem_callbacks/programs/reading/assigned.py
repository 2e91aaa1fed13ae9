"""What makes a program's peak, from what the compiler hands over with the program: no second compile, and no dump.

The serialised buffer assignment has every value's place and size, and the module has the schedule. Live ranges are computed here,
in the flattened schedule, as XLA does: a value lives from where it is made to its last use, through tuples and bitcasts; in a
loop's carry until the loop takes it over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, final

from jaxmem_callbacks.programs.reading.buffer_assignment import Allocation, Kind, Value
from jaxmem_callbacks.programs.reading.buffers import Arguments, peak_of_allocations, schedule_of
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, top_level_parts
from jaxmem_callbacks.records.peaks import Peak, StepSchedule
from jaxmem_callbacks.records.wire import fields_of_message, varints

# Fields of BufferAssignmentProto, LogicalBufferProto, its Location, BufferAllocationProto and its Assigned.
_BUFFERS, _ALLOCATIONS = 1, 3
_BUFFER_ID, _DEFINED_AT = 1, 3
_AT_INDEX, _AT_INSTRUCTION = 3, 4
_SIZE, _THREAD_LOCAL, _IS_PARAMETER, _PARAMETER, _LIVE_OUT, _COLOR, _ASSIGNED, _PARAMETER_INDEX, _CONSTANT = (
    *(2, 3, 5, 6, 7, 8, 9, 10, 12),
)
_OF_BUFFER, _OFFSET, _OF_SIZE = 1, 2, 3
# Of HloModuleProto, HloComputationProto and HloInstructionProto.
_COMPUTATIONS, _INSTRUCTIONS, _NAME, _ID = 3, 2, 1, 35
_MOST_BYTES = (
    24 * 2**20
)  # of both messages; a larger program's peak takes seconds to read, and is left to `StepMemory.peak`
_CONDITION, _NUMBERED = re.compile(r"condition=%?([\w.\-]+)"), re.compile(r"^/\*index=\d+\*/")
Place = tuple[str, tuple[int, ...]]  # an instruction, and where in its tuple
_PASSED_ON = {"bitcast", "optimization-barrier"}


def assigned_peak(
    compiled: Any, module: Module, platform: str, arguments: Arguments
) -> tuple[Peak, StepSchedule] | None:
    """What makes the peak of a compiled program, and its bytes over the schedule.

    Args:
        compiled: What ``lowered.compile()`` gave.
        module: Its text, parsed.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        arguments: What its parameters hold.

    Returns:
        None where the compiler hands over no assignment, as a TPU's does not, or where the program is very large.
    """
    stats = compiled.memory_analysis()
    assignment = getattr(stats, "serialized_buffer_assignment_proto", b"") if stats is not None else b""
    if not assignment:
        return None
    modules = compiled.runtime_executable().hlo_modules()
    names = modules[0].as_serialized_hlo_module_proto() if len(modules) == 1 else b""
    if not names or len(assignment) + len(names) > _MOST_BYTES:
        return None
    liveness = Liveness(module)
    allocations = tuple(_allocations(assignment, _names(names), liveness))
    order = {position: name for name, position in liveness.positions.items()}
    peak, position = peak_of_allocations(allocations, module, arguments, platform, order)
    schedule = schedule_of(allocations, module, arguments, platform, length=len(order), peak_at=position)
    return peak, schedule


def _names(module: bytes) -> dict[int, str]:
    """Id -> name of every instruction."""
    found: dict[int, str] = {}
    for computation in _messages(module, _COMPUTATIONS):
        for instruction in _messages(computation, _INSTRUCTIONS):
            fields = {number: value for number, value in fields_of_message(instruction) if number in (_NAME, _ID)}
            name, number = fields.get(_NAME), fields.get(_ID)
            if isinstance(name, bytes) and isinstance(number, int):
                found[number] = name.decode()
    return found


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    return (value for number, value in fields_of_message(data) if number == wanted and isinstance(value, bytes))


def _allocations(assignment: bytes, names: Mapping[int, str], liveness: Liveness) -> Iterator[Allocation]:
    places: dict[int, Place] = {}
    for buffer in _messages(assignment, _BUFFERS):
        fields = dict(fields_of_message(buffer))
        place = fields.get(_DEFINED_AT, b"")
        at = list(fields_of_message(place)) if isinstance(place, bytes) else []
        name = names.get(next((value for key, value in at if key == _AT_INSTRUCTION and isinstance(value, int)), -1))
        if name is not None:
            places[_number(fields, _BUFFER_ID)] = name, _index(at)
    liveness.defined = set(places.values())
    for allocation in _messages(assignment, _ALLOCATIONS):
        values: list[Value] = []
        known: dict[int, Any] = {}
        for key, value in fields_of_message(allocation):
            if key == _ASSIGNED and isinstance(value, bytes):
                assigned = dict(fields_of_message(value))
                place = places.get(_number(assigned, _OF_BUFFER))
                if place is not None:
                    values.append(liveness.value(*place, _number(assigned, _OF_SIZE), _number(assigned, _OFFSET)))
            elif key != _ASSIGNED:
                known[key] = value
        yield Allocation(
            bytes=known.get(_SIZE, 0),
            kind=_kind(known),
            color=known.get(_COLOR, 0),
            parameter=_parameter(known),
            values=tuple(values),
        )


def _number(fields: Mapping[int, int | bytes], key: int) -> int:
    value = fields.get(key, 0)
    return value if isinstance(value, int) else 0


def _index(at: list[tuple[int, int | bytes]]) -> tuple[int, ...]:
    """A place in a tuple, written as numbers one by one or packed."""
    found: list[int] = []
    for key, value in at:
        if key == _AT_INDEX:
            found += [value] if isinstance(value, int) else varints(value)
    return tuple(found)


def _parameter(known: Mapping[int, Any]) -> int | None:
    if not known.get(_IS_PARAMETER):
        return None
    index = known.get(_PARAMETER_INDEX, b"")  # with very many arguments XLA packs them in one tuple
    inside = list(varints(index)) if isinstance(index, bytes) else [index]
    return inside[0] if inside else known.get(_PARAMETER, 0)


def _kind(known: Mapping[int, Any]) -> Kind:
    if known.get(_IS_PARAMETER):
        return "argument"
    if known.get(_LIVE_OUT):
        return "output"
    if known.get(_CONSTANT):
        return "constant"
    return "thread-local" if known.get(_THREAD_LOCAL) else "temporary"


@final
class Liveness:
    """Where in the flattened schedule values are made and last used.

    Args:
        module: A scheduled program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inside: dict[str, list[Instruction]] = {}
        self._users: dict[str, list[tuple[Instruction, int]]] = {}
        for each in module.instructions.values():
            self._inside.setdefault(each.computation, []).append(each)
            for place, operand in enumerate(each.operands if each.opcode != "parameter" else ()):
                self._users.setdefault(operand, []).append((each, place))
        self.positions: dict[str, int] = {}
        self._begins: dict[str, int] = {}  # a loop -> the first position inside
        self._ends: dict[str, int] = {}  # a computation that is called -> the position behind it
        self._conditions: dict[str, str] = {}  # a loop -> its condition
        self.defined: set[Place] = set()  # where the assignment has a value of its own
        self._flatten(module.entry)

    def value(self, name: str, index: tuple[int, ...], size: int, offset: int) -> Value:
        """One value of an allocation, with its live range where the schedule has it."""
        found = self._module.instructions.get(name)
        first = self.positions.get(name)
        return Value(
            name=name,
            index=index,
            bytes=size,
            offset=offset,
            shape="" if found is None else _shape_at(found.shape, index),
            first=first,
            last=None if first is None else self._last(name, index, first),
        )

    def _flatten(self, computation: str) -> None:
        for each in self._inside.get(computation, ()):
            begin = len(self.positions)
            condition = _CONDITION.search(each.attributes) if each.opcode == "while" else None
            for called in (*([condition[1]] if condition else []), *each.called):
                if called not in self._ends:
                    self._flatten(called)
                    self._ends[called] = len(self.positions)
            if condition:
                self._conditions[each.name] = condition[1]
            self._begins[each.name] = begin
            self.positions.setdefault(each.name, len(self.positions))

    def _last(self, name: str, index: tuple[int, ...], first: int) -> int:
        last, waiting, seen = first, [(name, index)], {(name, index)}
        while waiting:
            place, inside = waiting.pop()
            found = self._module.instructions[place]
            is_carried = found.opcode == "parameter" and found.computation in self._conditions.values()
            if found.is_root or is_carried:
                last = max(last, self._ends.get(found.computation, len(self.positions)))
            for user, position in self._users.get(place, ()):
                following = self._following(user, position, inside)
                if following is None:
                    last = max(last, self._used(user))
                    continue
                waiting += [each for each in following if each not in seen]
                seen.update(following)
        return last

    def _used(self, user: Instruction) -> int:
        """When a user is done: a loop where it has taken the value over, an asynchronous one where it is waited for."""
        if user.opcode == "while":
            return self._begins.get(user.name, 0)
        ends = [self.positions.get(user.name, 0)]
        if user.opcode.endswith("-start"):
            ends += [self.positions.get(each.name, 0) for each, _ in self._users.get(user.name, ())]
        return max(ends)

    def _following(self, user: Instruction, position: int, index: tuple[int, ...]) -> list[Place] | None:
        """Where a user has the same value, which may be nowhere; None for a real use."""
        if user.opcode == "tuple":
            return [(user.name, (position, *index))]
        if user.opcode == "get-tuple-element" and index:
            return [(user.name, index[1:])] if user.element == index[0] else []
        if user.opcode == "while" and index and (user.name, index) not in self.defined:
            # No step of the loop changes it, so it is one value before, in and after the loop.
            computations = (*user.called, self._conditions.get(user.name, ""))
            inside = [self._module.parameters.get((called, 0)) for called in computations]
            return [(name, index) for name in (*inside, user.name) if name is not None]
        return [(user.name, index)] if user.opcode in _PASSED_ON else None


def _shape_at(shape: str, index: tuple[int, ...]) -> str:
    """The shape of a tuple's element."""
    for element in index:
        parts = top_level_parts(shape.strip()[1:-1])
        if not shape.strip().startswith("(") or element >= len(parts):
            return shape
        shape = _NUMBERED.sub("", parts[element].strip())
    return shape
