"""What makes a program's peak: the buffers alive at the moment when its temporaries fill most memory.

The figure is the compiler's plan, not a measurement. Temporaries share one stretch of memory whose size is the program's
``temp_bytes``; each value has a place in it and a live range in the flattened schedule (loop bodies once). The peak is the
position where the values alive cover most of it. What is left over there is reported as a buffer of kind ``gap``: memory that
the plan needs because values of other moments do not fit together more closely. So temporaries plus gap are the size of
the stretch exactly.

Each buffer is in a group (arguments, gradients, saved activations, temporaries) by the dataflow of the module.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

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
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, element_count, parse_module, unpadded_bytes
from jaxmem_callbacks.records.peaks import (
    AT_THE_PEAK,
    CONSTANTS,
    GAPS,
    GRADIENTS,
    PARAMETERS,
    RESULTS,
    SAVED,
    TEMPORARIES,
    UNKNOWN,
    WHOLE_HEAP,
    Buffer,
    Peak,
    StepBlock,
    StepSchedule,
    peak_of,
)
from jaxmem_callbacks.transforms.arg_roles import kind_of_path

Pass = Literal["forward", "backward", "outside"]
Place = tuple[str, int | None]  # an instruction, and which element of its tuple

# The outermost transform decides: a gradient inside a loss that is differentiated belongs to the forward pass.
_TRANSFORM = re.compile(r"(?<![\w])(transpose|jvp)\(")
# Instructions whose result is their operand's memory, or a copy on its way to another one.
_PASSING = {"bitcast", "optimization-barrier", "copy-start"}
# What the compiler puts in between by itself hands a value on; with a name it is the user's, and what it makes is another value.
_PASSING_UNNAMED = {"convert", "copy", "reshape", "transpose", "slice", "concatenate"}
_COLLECTIVES = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"}
_DEEPEST = 12
_WIDEST = 4
# What is made by or of several passes belongs to the first of these.
_MIXED: tuple[Pass, ...] = ("backward", "forward", "outside")


def pass_of_name(op_name: str | None) -> Pass | None:
    """The pass that an operation's name shows; None without a name, or for a name that is a parameter's."""
    if not op_name or "/" not in op_name:
        return None
    found = _TRANSFORM.search(op_name)
    if found is None:
        return "outside"
    return "backward" if found[1] == "transpose" else "forward"


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a value.

    Attributes:
        passes: In which passes it is read.
        is_result: Whether it reaches a result of the program.
    """

    passes: frozenset[Pass]
    is_result: bool


@final
class HloDataflow:
    """How values flow through a module.

    Args:
        module: What `parse_module` gave.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._users: dict[str, list[tuple[Instruction, int]]] = {}
        self._inside: dict[str, list[Instruction]] = {}
        self._callers = module.callers
        self._known_passes: dict[str, Pass | None] = {}
        for each in module.instructions.values():
            self._inside.setdefault(each.computation, []).append(each)
            for position, operand in enumerate(each.operands):
                self._users.setdefault(operand, []).append((each, position))

    def made_in(self, name: str, index: tuple[int, ...] = ()) -> Pass | None:
        """The pass in which a value is made; None where neither it nor what it is made of has a name."""
        origin = self._module.origin(name, index)
        found = self._module.instructions.get(name)
        return self._pass(origin, 0) or self._pass(found, 0)

    def content(self, name: str, index: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]]:
        """What a place really holds: of a loop's carry, what its body writes there or, where that is nothing, its beginning."""
        for _ in range(_DEEPEST):
            found = self._module.instructions.get(name)
            if found is None:
                break
            if found.opcode == "get-tuple-element" and found.element is not None:
                name, index = found.operands[0], (found.element,)
                continue
            following = self._awaited(found) or (self._written(found, index[0]) if index else None)
            if following is None:
                break
            name, index = following
        return name, index

    def _awaited(self, found: Instruction) -> tuple[str, tuple[int, ...]] | None:
        """What an asynchronous operation made, where ``found`` waits for it."""
        start = self._module.instructions.get(found.operands[0]) if found.opcode == "async-done" else None
        root = self._module.roots.get(start.called[0]) if start is not None and start.called else None
        return None if root is None or root.opcode == "tuple" else (root.name, ())

    def _written(self, found: Instruction, element: int) -> tuple[str, tuple[int, ...]] | None:
        """What the body of a loop writes into an element of its carry; ``found`` is the loop or its body's parameter."""
        is_loop = found.opcode == "while"
        loop = found if is_loop else self._callers.get(found.computation)
        if loop is None or loop.opcode != "while" or not (is_loop or found.opcode == "parameter"):
            return None
        root = self._module.roots.get(loop.called[0])
        if root is None or root.opcode != "tuple" or element >= len(root.operands):
            return None
        written = self._module.instructions.get(root.operands[element])
        carry = self._module.parameters.get((loop.called[0], 0))
        if written is None or written.opcode != "get-tuple-element" or written.operands[0] != carry:
            return root.operands[element], ()
        first = self._module.instructions.get(loop.operands[0]) if loop.operands else None
        if first is None or first.opcode != "tuple" or written.element != element or element >= len(first.operands):
            return None
        return first.operands[element], ()

    def argument_in(self, name: str) -> Instruction | None:
        """The program's parameter that a value is no more than a copy of, in another layout or dtype perhaps; else None."""
        found = self._module.instructions.get(name)
        for _ in range(_DEEPEST):
            if found is None or found.opcode == "parameter":
                break
            if pass_of_name(found.op_name) is not None or not found.operands:
                return None
            found = self._module.instructions.get(found.operands[0])
        is_argument = found is not None and found.opcode == "parameter" and found.computation == self._module.entry
        return found if is_argument else None

    def is_filled(self, name: str, depth: int = 0) -> bool:
        """Whether a value is made of constants only, such as zeros to begin a sum with."""
        found = self._module.instructions.get(name)
        if found is None or found.opcode == "parameter" or depth > _WIDEST:
            return False
        if not found.operands:
            return found.opcode in {"constant", "iota"}
        if found.called or pass_of_name(found.op_name) is not None:
            return False
        return found.opcode == "constant" or all(self.is_filled(each, depth + 1) for each in found.operands)

    def readers(self, starts: Iterable[Place], through: Callable[[Instruction], bool] | None = None) -> Readers:
        """Who reads values, followed through whatever only hands them on.

        Args:
            starts: The values.
            through: Further instructions to follow instead of taking them for readers.
        """
        passes: set[Pass] = set()
        is_result = False
        waiting = list(starts)
        seen = set(waiting)
        while waiting:
            for following in self._follow(waiting.pop()):
                if following is None:
                    is_result = True
                elif isinstance(following, tuple):
                    if following not in seen:
                        seen.add(following)
                        waiting.append(following)
                else:
                    passes |= self.passes(following)
                    if through is not None and through(following) and (following.name, None) not in seen:
                        seen.add((following.name, None))
                        waiting.append((following.name, None))
        return Readers(frozenset(passes), is_result)

    def passes(self, found: Instruction) -> frozenset[Pass]:
        """All passes that an instruction works for: a fusion may hold operations of several."""
        names = [each.op_name for each in self._inside.get(found.calls or "", ())] + [found.op_name]
        named: set[Pass] = {each for each in map(pass_of_name, names) if each is not None}
        if not named and (around := self._pass(self._callers.get(found.computation), 0)):
            named = {around}
        return frozenset(named)

    def inside(self, found: Instruction) -> list[Instruction]:
        """The operations of a fusion, or the instruction itself."""
        return self._inside.get(found.calls, [found]) if found.calls else [found]

    def is_in_loop(self, found: Instruction) -> bool:
        """Whether an instruction stands in a loop's body."""
        caller = self._callers.get(found.computation)
        return caller is not None and (caller.opcode == "while" or self.is_in_loop(caller))

    def is_collective(self, found: Instruction) -> bool:
        """Whether an instruction only moves a value between devices."""
        return found.opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES

    def _pass(self, found: Instruction | None, depth: int) -> Pass | None:
        if found is None or depth > _DEEPEST:
            return None
        if found.name not in self._known_passes:
            self._known_passes[found.name] = None  # for whatever comes back to it
            self._known_passes[found.name] = self._pass_anew(found, depth)
        return self._known_passes[found.name]

    def _pass_anew(self, found: Instruction, depth: int) -> Pass | None:
        """By its own name, by its operations, by what it is made of, by the loop it stands in."""
        found_pass: Pass | None = pass_of_name(found.op_name)
        if found_pass is None and found.calls is not None:
            inside = {pass_of_name(each.op_name) for each in self._inside.get(found.calls, ())}
            found_pass = next((each for each in _MIXED if each in inside), None)
        if found_pass is None and found.opcode not in {"parameter", "constant"}:
            made_of = {self._pass(self._module.instructions.get(name), depth + 1) for name in found.operands[:_WIDEST]}
            found_pass = next((each for each in _MIXED if each in made_of), None)
        return found_pass or self._pass(self._callers.get(found.computation), depth + 1)

    def _follow(self, place: Place) -> Iterator[Place | Instruction | None]:
        """Where a value goes next: a place that holds it, an instruction that reads it, or None for the program's result."""
        name, element = place
        found = self._module.instructions.get(name)
        if found is None:
            return
        for user, position in self._users.get(name, ()):
            if user.opcode == "tuple":
                yield user.name, position
            elif user.opcode == "get-tuple-element":
                if element is None or user.element == element:
                    yield user.name, None
            elif user.called:
                yield from self._into(user, position, element)
            elif self._hands_on(user, position):
                yield user.name, None if found.opcode.endswith("-start") else element
            else:
                yield user
        root = self._module.roots.get(found.computation)
        if root is found:
            yield from self._out_of(found.computation, element)

    def _into(self, user: Instruction, position: int, element: int | None) -> Iterator[Place]:
        """Into the body of a loop, a function or a branch."""
        for number, computation in enumerate(user.called):
            argument = position if user.opcode in {"call", "async-start"} else 0
            if user.opcode == "conditional" and number != position - 1:
                continue
            parameter = self._module.parameters.get((computation, argument))
            if parameter is not None:
                yield parameter, element
        if user.opcode == "while":
            yield user.name, element

    def _out_of(self, computation: str, element: int | None) -> Iterator[Place | None]:
        caller = self._callers.get(computation)
        if caller is None:
            if computation == self._module.entry:
                yield None
            return
        yield caller.name, element
        if caller.opcode == "while":
            parameter = self._module.parameters.get((computation, 0))
            if parameter is not None:
                yield parameter, element

    def _hands_on(self, user: Instruction, position: int) -> bool:
        if user.opcode in _PASSING or user.opcode.endswith("-done"):
            return True
        if user.opcode in _PASSING_UNNAMED and pass_of_name(user.op_name) is None:
            return True
        return user.opcode == "dynamic-update-slice" and position == 0


NAMELESS = "neither the buffer's operation nor what it is made of has a name in the compiled program"
# What a sum of gradients over microbatches consists of.
_SUMMING = {
    "add",
    "parameter",
    "bitcast",
    "convert",
    "copy",
    "reshape",
    "transpose",
    "constant",
    "broadcast",
    "tuple",
} | {
    "dynamic-update-slice",
    "dynamic-slice",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One array argument of a program.

    Attributes:
        path: Such as ``state.params['w']``.
        kind: What it holds, in the words of `transforms.arg_roles`.
        elements: Its elements on all devices together; 0 where unknown.
    """

    path: str
    kind: str
    elements: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a program, by the number of its parameter and by the name that the program has for it."""

    by_number: Mapping[int, Argument] = field(default_factory=dict)
    by_name: Mapping[str, Argument] = field(default_factory=dict)

    def find(self, number: int | None, name: str | None) -> Argument:
        """The argument at a parameter; one that nobody described is judged by its name."""
        known = self.by_number.get(-1 if number is None else number) or self.by_name.get(name or "")
        return known or Argument(path=name or "", kind=kind_of_path(name or ""))


@final
class BufferClassifier:
    """Classifies the buffers of one program.

    Args:
        module: The optimised program.
        arguments: What its parameters are.
    """

    def __init__(self, module: Module, arguments: Arguments) -> None:
        self._module = module
        self._flow = HloDataflow(module)
        self._arguments = arguments

    def content(self, value: Value) -> Value:
        """What a value really holds: of a loop's carry, what its body writes there."""
        name, index = self._flow.content(value.name, value.index)
        return replace(value, name=name, index=index)

    def classify(self, value: Value) -> tuple[str, str | None]:
        """The group of the buffer that a value is in, and why where it is unknown."""
        if value.shape.startswith("("):
            return TEMPORARIES, None  # a table of addresses
        held = self.content(value)
        made = self._flow.made_in(held.name, held.index)
        places = list(dict.fromkeys([_place(value), _place(held)]))
        if made == "backward":
            return (GRADIENTS if self._is_gradient(places, held) else TEMPORARIES), None
        if made == "outside":
            return (GRADIENTS if self._is_sum_of_gradients(held) else TEMPORARIES), None
        readers = self._flow.readers(places)
        if made == "forward":
            return (SAVED if "backward" in readers.passes else TEMPORARIES), None
        if self.copied_argument(value) or self._flow.is_filled(held.name) or _never_saved(readers):
            return TEMPORARIES, None
        return UNKNOWN, NAMELESS

    def copied_argument(self, value: Value) -> str | None:
        """The path of the argument that a value is only a copy of, such as one in the compiler's own layout; else None."""
        held = self.content(value)
        parameter = self._flow.argument_in(held.name)
        if parameter is None or self._flow.made_in(held.name, held.index) is not None:
            return None
        return self._arguments.find(int(parameter.operands[0]), parameter.op_name).path or None

    def _is_gradient(self, places: Iterable[Place], best: Value) -> bool:
        """Whether a value of the backward pass is as large as a parameter and reaches what is outside the gradient."""
        size = element_count(best.shape)
        if size not in self._parameter_sizes:
            return False

        def same_size(user: Instruction) -> bool:
            if self._flow.is_collective(user):
                return True
            backward = self._flow.passes(user) <= {"backward"}
            return backward and size in {element_count(user.shape), *self._sizes_of(user)}

        readers = self._flow.readers(places, through=same_size)
        return readers.is_result or "outside" in readers.passes

    def _is_sum_of_gradients(self, best: Value) -> bool:
        """Whether a loop outside the gradient adds up gradients in a value, as accumulation over microbatches does."""
        maker = self._module.instructions.get(best.name)
        if maker is None or element_count(best.shape) not in self._parameter_sizes or not self._flow.is_in_loop(maker):
            return False
        inside = self._flow.inside(maker)
        adds = [each for each in inside if each.opcode == "add"]
        fed = [self._flow.made_in(operand) for operand in maker.operands]
        is_sum = bool(adds) and all(each.opcode in _SUMMING for each in inside)
        return is_sum and "backward" in fed

    def _sizes_of(self, user: Instruction) -> set[int]:
        """Sizes of a fusion's results."""
        root = self._module.roots.get(user.calls or "")
        if root is None or root.opcode != "tuple":
            return set()
        parts = (self._module.instructions.get(part) for part in root.operands)
        return {element_count(part.shape) for part in parts if part is not None}

    @functools.cached_property
    def _parameter_sizes(self) -> set[int]:
        """Elements of each parameter, of its part on one device and of the whole."""
        sizes = {each.elements for each in self._arguments.by_number.values() if each.kind == PARAMETERS}
        for (computation, number), name in self._module.parameters.items():
            found = self._module.instructions[name]
            if computation == self._module.entry:
                argument = self._arguments.find(number, found.op_name)
                if argument.kind == PARAMETERS:
                    sizes |= {element_count(found.shape), argument.elements}
        return sizes - {0, 1}


def _never_saved(readers: Readers) -> bool:
    """Whether a value of an unknown pass is read, and by no backward pass."""
    return bool(readers.passes) and "backward" not in readers.passes


def _place(value: Value) -> Place:
    return value.name, value.index[0] if value.index else None


_Ranked = tuple[tuple[int, bool, tuple[bool, ...]], Value, str | None]
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
    """A program compiled for the attached devices, to look at and not to run, and what makes its peak.

    Raises:
        CompileError: the compiler wrote no buffer assignment.
    """
    import jax

    # A command that ends meanwhile leaves the compiler writing there.
    with tempfile.TemporaryDirectory(prefix="jaxmem-", ignore_cleanup_errors=True) as place:
        folder = pathlib.Path(place)
        platform = jax.default_backend()
        options = dump_options(folder) | past_the_cache() | options_without_run(platform)
        return lowered.compile(compiler_options=options), read_peak(folder, platform, arguments)


def read_peak(folder: pathlib.Path, platform: str, arguments: Arguments | None = None) -> Peak:
    """What makes the peak of the program whose dumps are in ``folder``.

    Args:
        folder: Where a compile with `dump_options` wrote.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        arguments: What the program's parameters hold; judged by their names where this does not hold them.

    Raises:
        CompileError: there are no such dumps.
    """
    module = parse_module(dump_file(folder, ".txt").read_text("utf-8", "replace"))
    order = read_schedule(folder)
    return peak_of_allocations(read_allocations(folder), module, arguments or Arguments(), platform, order)[0]


def peak_of_allocations(
    every: tuple[Allocation, ...], module: Module, arguments: Arguments, platform: str, order: dict[int, str]
) -> tuple[Peak, int]:
    """What makes the peak of a program whose allocations are known, and the position in the schedule where it is.

    Args:
        every: All allocations.
        module: The optimised program.
        arguments: What its parameters hold.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        order: Position in the flattened schedule -> the instruction there.
    """
    here = device_allocations(every, platform)
    temporaries = [allocation for allocation in here if allocation.kind == "temporary"]
    slots = _slots(temporaries)
    position = _peak_position(slots)
    reader = _Reader(module, arguments, BufferClassifier(module, arguments), position)
    known = set(map(id, here))
    others = [each for each in every if id(each) not in known]
    buffers = [
        *reader.alive(temporaries),
        *(reader.whole(each) for each in here if each.kind in {"argument", "output", "constant"}),
        *reader.beside("host", [each for each in others if each.color == HOST_COLOR]),
        *reader.beside("on-chip", [each for each in others if each.color != HOST_COLOR]),
    ]
    has_ranges = not slots or any(value.first is not None for values in slots.values() for value in values)
    moment = reader.moment(order) if slots and has_ranges else None
    return peak_of(buffers, basis=AT_THE_PEAK if has_ranges else WHOLE_HEAP, moment=moment), position


_BLOCKS, _CURVE = 160, 400


def schedule_of(  # noqa: PLR0913 - what is known of a program, each once
    every: tuple[Allocation, ...],
    module: Module,
    arguments: Arguments,
    platform: str,
    *,
    length: int,
    peak_at: int,
) -> StepSchedule:
    """A program's bytes over its schedule, and its largest blocks.

    Args:
        every: All allocations.
        module: The optimised program.
        arguments: What its parameters hold.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``.
        length: Positions in the schedule.
        peak_at: The one where its temporaries take most.
    """
    here = device_allocations(every, platform)
    temporaries = [allocation for allocation in here if allocation.kind == "temporary"]
    held = sum(each.bytes for each in here if each.kind in {"argument", "output", "constant"})
    bases = [held + sum(each.bytes for each in temporaries[:number]) for number in range(len(temporaries))]
    spans = [
        (size, *span, bases[number] + offset, values)
        for (number, offset, size), values in _slots(temporaries).items()
        for span in _merged((v.first, v.last) for v in values if v.first is not None and v.last is not None)
    ]
    reader = BufferClassifier(module, arguments)
    blocks: list[StepBlock] = []
    for size, first, last, base, values in sorted(spans, key=lambda span: -span[0] * (span[2] - span[1] + 1))[:_BLOCKS]:
        alive = [each for each in values if each.first is not None and first <= each.first <= last]
        shown = _Reader(module, arguments, reader, peak_at).described(size, alive or values)
        blocks.append(StepBlock(first=first, last=last, base=base, buffer=shown))
    return StepSchedule(
        length=length, peak_at=peak_at, held_bytes=held, curve=_curve(spans, held, length), blocks=tuple(blocks)
    )


def _curve(spans: Sequence[tuple[Any, ...]], held: int, length: int) -> tuple[tuple[int, int], ...]:
    """Position -> bytes from there on, the highest of each stretch."""
    changes: dict[int, int] = {}
    for size, first, last, *_ in spans:
        changes[first] = changes.get(first, 0) + size
        changes[last + 1] = changes.get(last + 1, 0) - size
    points, total = [(0, held)], held
    for position in sorted(changes):
        total += changes[position]
        points.append((min(position, length), total))
    size = -(-len(points) // _CURVE)
    return tuple(
        (points[at][0], max(count for _, count in points[at : at + size])) for at in range(0, len(points), size)
    )


def past_the_cache() -> dict[str, Any]:
    """An option without effect on the program that makes JAX's persistent cache, where one is on, compile it again.

    Dump options are no part of that cache's key, so a program found there is never compiled and never dumped.
    """
    import jax

    config: Any = jax.config  # its flags are declared on one JAX line and not on the other
    on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    return {"xla_debug_buffer_assignment_show_max": time.monotonic_ns() % 2**31} if on else {}


def options_without_run(platform: str) -> dict[str, Any]:
    """Options of a compile whose program is never run, but for those that the user's ``XLA_FLAGS`` set.

    A CPU's compiler places buffers first and makes code then. How well that is optimised changes no byte, and takes long.
    """
    name = "xla_backend_optimization_level"
    return {name: 0} if platform == "cpu" and name not in os.environ.get("XLA_FLAGS", "") else {}


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
        """The value that an argument's or a constant's memory is for; in that of a donated argument others are too."""
        own = self.module.parameters.get((self.module.entry or "", allocation.parameter or 0))
        filling = [value for value in allocation.values if value.bytes == allocation.bytes]
        arguments = [value for value in filling if allocation.kind == "argument" and value.name == own]
        return next(iter(arguments or filling or allocation.values), None)

    def _result(self, allocation: Allocation) -> tuple[Value | None, str]:
        """What is at the position in memory that is kept for a result, which may be lent to others until then."""
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
        ranked = max(reversed([self._ranked(value) for value in alive]), key=lambda ranked: ranked[0])
        if not ranked[0][1]:  # nothing but a loop's beginning: what the loop makes of it is in the same place
            return self.described(size, _same_buffer(values, self.position))
        return self._described(size, ranked)

    def described(self, size: int, values: Iterable[Value]) -> Buffer:
        """One buffer, described by the most informative of the values that take turns in it."""
        return self._described(size, max((self._ranked(value) for value in values), key=lambda ranked: ranked[0]))

    def _described(self, size: int, ranked: _Ranked) -> Buffer:
        rank, best, why = ranked
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

    def _ranked(self, value: Value) -> _Ranked:
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
