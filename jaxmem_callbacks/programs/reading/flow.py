"""A parsed module in; out come in which pass of the step a value is made, and who reads it, through loops, tuples and copies.

The passes are read from the names that JAX's transforms leave: ``jvp(`` is the forward pass, ``transpose(jvp(`` the
backward pass, and what has neither stands outside the gradient: the optimizer, metrics, what is made of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from jaxmem_callbacks.programs.reading.hlo import Instruction, Module

Pass = Literal["forward", "backward", "outside"]
Place = tuple[str, int | None]  # an instruction, and which element of its tuple

# The outermost transform tells: a gradient inside a loss that is differentiated belongs to the forward pass.
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
    """The pass that an operation's name tells; None without a name, or for a name that is a parameter's."""
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
class Flow:
    """How values flow through a module.

    Args:
        module: What `parse_module` gave.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._users: dict[str, list[tuple[Instruction, int]]] = {}
        self._inside: dict[str, list[Instruction]] = {}
        self._callers = module.callers
        self._judged: dict[str, Pass | None] = {}
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
        told: set[Pass] = {each for each in map(pass_of_name, names) if each is not None}
        if not told and (around := self._pass(self._callers.get(found.computation), 0)):
            told = {around}
        return frozenset(told)

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
        if found.name not in self._judged:
            self._judged[found.name] = None  # for whatever comes back to it
            self._judged[found.name] = self._pass_anew(found, depth)
        return self._judged[found.name]

    def _pass_anew(self, found: Instruction, depth: int) -> Pass | None:
        """By its own name, by its operations, by what it is made of, by the loop it stands in."""
        told: Pass | None = pass_of_name(found.op_name)
        if told is None and found.calls is not None:
            named = {pass_of_name(each.op_name) for each in self._inside.get(found.calls, ())}
            told = next((each for each in _MIXED if each in named), None)
        if told is None and found.opcode not in {"parameter", "constant"}:
            made_of = {self._pass(self._module.instructions.get(name), depth + 1) for name in found.operands[:_WIDEST]}
            told = next((each for each in _MIXED if each in made_of), None)
        return told or self._pass(self._callers.get(found.computation), depth + 1)

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
