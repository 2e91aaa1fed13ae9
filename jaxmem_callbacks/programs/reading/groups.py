"""A buffer's values in, what it is to the training step out: an argument's kind, a gradient, a saved activation, a temporary.

Judged from evidence in the optimised program only: names that JAX's transforms leave, sizes, and who reads a value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from jaxmem_callbacks.programs.reading.dumps import Value
from jaxmem_callbacks.programs.reading.flow import Flow, Place, Readers
from jaxmem_callbacks.programs.reading.hlo import Instruction, Module
from jaxmem_callbacks.programs.reading.shapes import element_count
from jaxmem_callbacks.records.peaks import GRADIENTS, PARAMETERS, SAVED, TEMPORARIES, UNKNOWN
from jaxmem_callbacks.transforms.arg_roles import kind_of_path

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
        kind: What it holds, in the words of `transforms.kinds`.
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
class Groups:
    """Judges the buffers of one program.

    Args:
        module: The optimised program.
        arguments: What its parameters are.
    """

    def __init__(self, module: Module, arguments: Arguments) -> None:
        self._module = module
        self._flow = Flow(module)
        self._arguments = arguments

    def content(self, value: Value) -> Value:
        """What a value really holds: of a loop's carry, what its body writes there."""
        name, index = self._flow.content(value.name, value.index)
        return replace(value, name=name, index=index)

    def of(self, value: Value) -> tuple[str, str | None]:
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
