"""Groups of buffers: arguments, gradients, saved activations, temporaries, by the dataflow of the module."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, final

from jaxmem_callbacks.programs.reading.buffer_assignment import Value
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module, element_count
from jaxmem_callbacks.records.peaks import GRADIENTS, PARAMETERS, SAVED, TEMPORARIES, UNKNOWN
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
        """The group of the buffer that a value lies in, and why where it is unknown."""
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
