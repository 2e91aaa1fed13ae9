"""The compiler's figures of a program, and its buffer assignment, from dumps or serialised."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmem_callbacks.programs.reading.hlo import Module, constant_bytes, parse_module, recomputed
from jaxmem_callbacks.records.errors import CompileError
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.wire import fields_of_message

HOST_COLOR = 5
Kind = Literal["argument", "output", "constant", "temporary", "thread-local"]

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+),(?: color (\d+),)?(.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^\s+([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$")
# With very many arguments XLA packs them in one tuple parameter, and the index in the braces counts them instead.
_PARAMETER = re.compile(r"\bparameter (\d+)(?:, shape \|.*\| at ShapeIndex \{(\d+)?)?")
_SCHEDULED = re.compile(r"^\s+(\d+):([\w.\-]+)$")
_ASSIGNMENT = "-buffer-assignment.txt"
_FOLDER = "xla_dump_to"


def dump_options(folder: pathlib.Path) -> dict[str, Any]:
    """Compiler options that make XLA write its buffer assignment into ``folder``, whatever dumps the user's flags narrow down."""
    return {
        _FOLDER: str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_module_re": ".*",
        "xla_dump_max_hlo_modules": -1,
    }


def user_dump_folder(options: Mapping[str, Any]) -> pathlib.Path | None:
    """The folder that the user has XLA dump into, by an option of the compile or else by ``XLA_FLAGS``; None for no folder."""
    flags = re.findall(rf"--{_FOLDER}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    folder = str(options.get(_FOLDER) or (flags[-1] if flags else ""))
    return None if folder in {"", "-", "sponge"} or "://" in folder else pathlib.Path(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One value of an allocation.

    Attributes:
        name: The instruction that defines it.
        index: Its place in the instruction's tuple; empty for the whole.
        bytes: Size, padding included.
        offset: Place in its allocation.
        shape: Dtype, shape and layout.
        first: Position in the flattened schedule where it begins to live, or None where the dump does not show it.
        last: Position of its last use.
    """

    name: str
    index: tuple[int, ...]
    bytes: int
    offset: int
    shape: str
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One stretch of memory that the program asks for, with the values that take turns in it."""

    bytes: int
    kind: Kind
    color: int
    parameter: int | None = None
    values: tuple[Value, ...] = field(default=())


def read_allocations(folder: pathlib.Path) -> tuple[Allocation, ...]:
    """The allocations of the largest program dumped into ``folder``.

    Raises:
        CompileError: no such dump there.
    """
    ranges = _ranges(dump_file(folder, "-live-range.txt").read_text("utf-8"))
    found: list[Allocation] = []
    head: re.Match[str] | None = None
    values: list[Value] = []
    for line in [*dump_file(folder, _ASSIGNMENT).read_text("utf-8").splitlines(), ""]:
        if match := _VALUE.match(line):
            values.append(_value(match, ranges))
        elif (match := _ALLOCATION.match(line)) or not line:
            if head is not None:
                found.append(_allocation(head, values))
            head, values = match, []
            if not line and found:
                break
    if not found:
        raise _unknown_form(folder)
    return tuple(found)


def assigned_by_kind(folder: pathlib.Path, platform: str) -> dict[Kind, int]:
    """Bytes of the device's main memory that a program will ask for, by kind of allocation.

    libtpu before 0.0.52 counts up to a quarter more temporaries in its statistics than its buffer assignment has.

    Raises:
        CompileError: there is no dump, or it has another form.
    """
    lines = dump_file(folder, _ASSIGNMENT).read_text("utf-8").splitlines()
    every = tuple(_allocation(head, []) for head in map(_ALLOCATION.match, lines) if head)
    if not every:
        raise _unknown_form(folder)
    sizes: dict[Kind, int] = {}
    for each in device_allocations(every, platform):
        if each.kind != "thread-local":
            sizes[each.kind] = sizes.get(each.kind, 0) + each.bytes
    return sizes


def _unknown_form(folder: pathlib.Path) -> CompileError:
    msg = f"The compiler's buffer assignment in {folder} has an unknown form. Expected 'allocation N: size ...'."
    return CompileError(msg)


def read_schedule(folder: pathlib.Path) -> dict[int, str]:
    """Position in the flattened schedule -> the instruction there; empty where the dump has none."""
    text = dump_file(folder, "-live-range.txt").read_text("utf-8")
    section = text.partition("InstructionSequence:")[2].partition("BufferLiveRange:")[0]
    return {int(found[1]): found[2] for found in map(_SCHEDULED.match, section.splitlines()) if found}


def dump_file(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """The dump with this ending, of the program with the largest buffer assignment where a compile dumped several.

    Raises:
        CompileError: there is none.
    """
    plans = folder.glob(f"*after_optimizations{_ASSIGNMENT}")
    largest = max(plans, key=lambda file: file.stat().st_size, default=None)
    found = largest and largest.with_name(largest.name.removesuffix(_ASSIGNMENT) + ending)
    if found is None or not found.exists():
        msg = (
            f"The compiler wrote no '*after_optimizations{ending}', so what makes the peak is unknown for this program."
        )
        raise CompileError(msg)
    return found


def device_allocations(allocations: tuple[Allocation, ...], platform: str) -> tuple[Allocation, ...]:
    """Those in the device's main memory: not a TPU's on-chip memories, not pinned host memory."""
    return tuple(
        allocation
        for allocation in allocations
        if (allocation.color == 0 if platform == "tpu" else allocation.color != HOST_COLOR)
    )


def _allocation(head: re.Match[str], values: list[Value]) -> Allocation:
    text = head[4]
    parameter = _PARAMETER.search(text)
    kind: Kind = "temporary"
    if "live-out" in text:
        kind = "output"
    elif "constant" in text:
        kind = "constant"
    elif "thread-local" in text:
        kind = "thread-local"
    return Allocation(
        bytes=int(head[2]),
        color=int(head[3] or 0),
        kind="argument" if parameter else kind,
        parameter=int(parameter[2] or parameter[1]) if parameter else None,
        values=tuple(values),
    )


def _value(match: re.Match[str], ranges: dict[tuple[str, str], tuple[int, int]]) -> Value:
    index = match[2] or "{}"
    first, last = ranges.get((match[1], index), (None, None))
    return Value(
        name=match[1],
        index=tuple(int(part) for part in index[1:-1].split(",") if part),
        bytes=int(match[3]),
        offset=int(match[4]),
        shape=match[5],
        first=first,
        last=last,
    )


def _ranges(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    section = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    matches = (_RANGE.match(line) for line in section.splitlines())
    return {(m[1], m[2]): (int(m[3]), int(m[4])) for m in matches if m}


# Fields of BufferAssignmentProto and of its BufferAllocationProto.
_ALLOCATIONS = 3
_SIZE, _IS_THREAD_LOCAL, _COLOR = 2, 3, 8


def assigned_bytes(serialized: bytes, platform: str) -> int | None:
    """Bytes of all allocations that a program asks the device for, of every memory color; None where they cannot be read.

    Args:
        serialized: The assignment; empty where the compiler gives none.
        platform: ``cpu``, ``gpu``, ``cuda`` or ``tpu``; a TPU's other colors are its small on-chip memories.
    """
    try:
        every = [value for number, value in fields_of_message(serialized) if number == _ALLOCATIONS]
        allocations = [_numbers(value) for value in every if isinstance(value, bytes)]
    except (IndexError, ValueError):
        return None

    def is_here(allocation: dict[int, int]) -> bool:
        color = allocation.get(_COLOR, 0)
        return not allocation.get(_IS_THREAD_LOCAL) and (color == 0 if platform == "tpu" else color != HOST_COLOR)

    return sum(each.get(_SIZE, 0) for each in allocations if is_here(each)) if allocations else None


def _numbers(allocation: bytes) -> dict[int, int]:
    """The numbers of one allocation, up to the values that share it, of which a large program has very many."""
    up_to = itertools.takewhile(lambda field: field[0] <= _COLOR, fields_of_message(allocation))
    return {number: value for number, value in up_to if isinstance(value, int)}


def memory_figures(compiled: Any, platform: str) -> dict[str, int | None]:
    """The compiler's figures, in bytes on one device, by the names of `ProgramMemory`'s fields.

    ``total_bytes`` is the runtime's own total, which jaxlib has since 0.12; None before. ``assigned_bytes`` is the sum of its
    buffer assignment, None where it gives none. ``host_temp_bytes`` is what an offload policy keeps in host memory meanwhile.

    Raises:
        ValueError: the platform reports nothing.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        msg = "The compiler of this platform reports no memory figures. Compile for 'cpu', a TPU or a CUDA GPU."
        raise ValueError(msg)
    return figures_of(stats, platform)


def figures_of(stats: Any, platform: str) -> dict[str, int | None]:
    """The same of the statistics themselves, such as a loaded executable has them."""
    total = getattr(stats, "total_allocation_bytes", None)
    return {
        "argument_bytes": int(stats.argument_size_in_bytes),
        "output_bytes": int(stats.output_size_in_bytes),
        "alias_bytes": int(stats.alias_size_in_bytes),
        "temp_bytes": int(stats.temp_size_in_bytes),
        "host_temp_bytes": int(stats.host_temp_size_in_bytes),
        "total_bytes": int(total) if total else None,
        "assigned_bytes": assigned_bytes(getattr(stats, "serialized_buffer_assignment_proto", b""), platform),
    }


def program_memory(
    compiled: Any, *, name: str, platform: str, target: str, module: Module | None = None
) -> ProgramMemory:
    """The record of one compiled program.

    Args:
        compiled: What ``lowered.compile()`` gave.
        name: The function's name.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        target: ``attached`` or a target's name.
        module: What ``compiled.as_text()`` holds, where the caller has parsed it already.
    """
    figures: dict[str, Any] = {**memory_figures(compiled, platform)}
    figures |= figures_of_module(parse_module(compiled.as_text()) if module is None else module)
    return ProgramMemory(name=name, platform=platform, target=target, **figures)


def figures_of_module(module: Module) -> dict[str, int]:
    """The figures that the compiler's statistics leave out, by the names of `ProgramMemory`'s fields."""
    return {"constant_bytes": constant_bytes(module), "compiler_remat": len(recomputed(module))}
