"""Optimised HLO text: its header, instructions, shapes, constants and sources."""

from __future__ import annotations

import math
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxmem_callbacks.records.source_files import is_installed

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
# What follows: a layout's dimensions, the last one first, and the tile that the last ones are rounded up to.
_LAYOUT = re.compile(r"\{([\d,]*)(?::T\(([\d,]+)\))?")
_WITHOUT_BITS = {"pred": 8, "token": 0, "opaque": 0}


def element_count(shape: str) -> int:
    """Elements of an array; of a tuple, those of its first array; 0 where there is none."""
    found = _ARRAY.search(shape)
    return _elements(found[3]) if found else 0


def unpadded_bytes(shape: str) -> int | None:
    """Bytes of all arrays in a shape as if their elements lay side by side; None where a dtype is unknown."""
    total = 0
    arrays = _ARRAY.findall(shape)
    for kind, bits, sizes in arrays:
        size = _bytes(kind, bits, _elements(sizes))
        if size is None:
            return None
        total += size
    return total if arrays else None


def padded_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape as they lie in memory, in tiles where the layout says so; 0 for an unknown dtype."""
    total = 0
    for found in _ARRAY.finditer(shape):
        layout = _LAYOUT.match(shape, found.end())
        order, tile = layout.groups() if layout else ("", None)
        if tile is None:
            elements = _elements(found[3])
        else:
            sizes, tiles = _numbers(found[3]), _numbers(tile)[::-1]
            minor = [sizes[place] for place in _numbers(order)]
            minor += [1] * (len(tiles) - len(minor))
            tiles += [1] * (len(minor) - len(tiles))
            elements = math.prod(-(-size // by) * by for size, by in zip(minor, tiles, strict=True))
        total += _bytes(found[1], found[2], elements) or 0
    return total


def _bytes(kind: str, bits: str, elements: int) -> int | None:
    if not bits and kind not in _WITHOUT_BITS:
        return None
    return -(-elements * (int(bits) if bits else _WITHOUT_BITS[kind]) // 8)


def _elements(sizes: str) -> int:
    return math.prod(_numbers(sizes))


def _numbers(sizes: str) -> list[int]:
    return [int(size.lstrip("<=")) for size in sizes.split(",") if size]


_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the header says.

    Attributes:
        reused: Parameter number -> number of the result that takes over its memory.
        parameters: How many parameters the program has.
    """

    reused: dict[int, int]
    parameters: int


def read_header(hlo_text: str) -> Header:
    """Parse the first line of ``compiled.as_text()``."""
    line = hlo_text.partition("\n")[0]
    reused: dict[int, int] = {}
    for output, parameter, index in _ALIAS.findall(_braced(line, "input_output_alias=")):
        number = int(index.split(",")[0]) if index.strip() else int(parameter)
        reused[number] = int(output.split(",")[0]) if output.strip() else 0
    return Header(reused=reused, parameters=_parameter_count(line))


def _braced(line: str, key: str) -> str:
    """The text in the braces after ``key``, inner braces included; empty where the key is absent."""
    start = line.find(key + "{")
    if start < 0:
        return ""
    depth = 0
    for end in range(start + len(key), len(line)):
        depth += {"{": 1, "}": -1}.get(line[end], 0)
        if depth == 0:
            return line[start + len(key) + 1 : end]
    return ""


def _parameter_count(line: str) -> int:
    """Arguments in ``entry_computation_layout={(a, b)->c}``, those of a packed tuple counted one by one."""
    inside = _braced(line, "entry_computation_layout=").partition(")->")[0].removeprefix("(")
    if inside.startswith("("):
        inside = inside[1:].removesuffix(")")
    depth, commas = 0, 0
    for letter in inside:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(letter, 0)
        commas += letter == "," and depth == 0
    return commas + 1 if inside.strip() else 0


_CONSTANT_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CONSTANT = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) constant\(")
# Part of the code that a fusion becomes, and so nowhere in memory.
_FUSED = re.compile(r" fusion\(.*?\bcalls=%?([\w.\-]+)")
# A layout's memory space, such as a TPU's on-chip memory or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


def constant_bytes(hlo_text: str | None) -> int:
    """Bytes of a program's constants in the device's main memory, padding included.

    Args:
        hlo_text: What ``compiled.as_text()`` gave.
    """
    shapes: dict[str, list[str]] = {}
    fused: set[str] = set()
    computation = ""
    for line in (hlo_text or "").splitlines():
        if line and not line[0].isspace():
            begun = _CONSTANT_COMPUTATION.match(line)
            computation = begun[1] if begun else computation
        elif " constant(" in line and (found := _CONSTANT.match(line)):
            shapes.setdefault(computation, []).append(found[1])
        elif " fusion(" in line and (found := _FUSED.search(line)):
            fused.add(found[1])
    return sum(
        padded_bytes(shape)
        for place, found in shapes.items()
        if place not in fused
        for shape in found
        if not _ELSEWHERE.search(shape)
    )


_CUSTOM = re.compile(r"fusion\(.*kind=kCustom.*?calls=%?([\w.\-]+)")
_LIBRARY_PASSING = ("bitcast", "tuple")
_NO_VALUES = ("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "broadcast")


def library_bytes(hlo_text: str) -> int:
    """Bytes of the largest value inside a custom fusion, its results left out; 0 where there is none."""
    fused = set(_CUSTOM.findall(hlo_text))
    if not fused:
        return 0
    module = parse_module(hlo_text)
    results = {name for computation in fused for name in _results(module, computation)}
    return max(
        (
            unpadded_bytes(each.shape) or 0
            for each in module.instructions.values()
            if each.computation in fused and each.opcode not in _NO_VALUES and each.name not in results
        ),
        default=0,
    )


def _results(module: Module, computation: str) -> Iterator[str]:
    """The instructions whose values a fusion returns."""
    root = module.roots.get(computation)
    waiting = [] if root is None else [root]
    while waiting:
        each = waiting.pop()
        yield each.name
        if each.opcode in _LIBRARY_PASSING:
            waiting += [module.instructions[name] for name in each.operands if name in module.instructions]


# `%fusion.3.remat = ...`: the compiler's own rematerialisation marks what it computes again in the instruction's name.
# An instruction that reads nothing, such as a broadcast constant, is made where it is used for free, whatever its name.
_REMAT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]*\.remat[\w.\-]* = (?:\([^=]*?\)|\S+) [\w-]+\((?!\))", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
# What an instruction calls besides a fusion; a branch or body has its own instructions, scheduled with all others.
_CALLED = re.compile(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_CALLING = {"while", "call", "conditional", "async-start"}
_TUPLE_INDEX = re.compile(r"\), index=(\d+)")
_TABLE = re.compile(r"^(\d+) (.*)$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# What the worker's own call of a traced program adds in front of the user's names.
_EXPORTED = re.compile(r"jit\([^()]*\)/call_exported(?:/|(?=\"))")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# Instructions that only pass a buffer on; what they hold was made by their first operand.
_PASSING = {
    "bitcast",
    "convert",
    "copy",
    "reshape",
    "transpose",
    "get-tuple-element",
    "copy-start",
    "copy-done",
    "slice-done",
}
# What a checkpoint keeps is rounded to its own precision by JAX: the name of that says nothing of what is kept.
_ROUNDED = "/reduce_precision"
# How a TPU's compiler joins what it fetched in parts, in place.
_JOINING = 'custom_call_target="ConcatBitcast"'
_OURS = str(pathlib.Path(__file__).parents[2])
_COMMAND = str(pathlib.Path(_OURS) / "cli" / "_").removesuffix("_")
# Where a program is compiled for a target. What another installation compiled is read from the same cache.
_WORKER = "/jaxmem_callbacks/programs/targets/worker_main.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: Unique in its module.
        opcode: Such as ``fusion`` or ``dot``.
        operands: Names of its operands, or the parameter's number.
        computation: The computation that it stands in.
        shape: Its result's dtype, shape and layout.
        calls: The fused computation, or None.
        called: Computations that a loop, a call or a conditional runs.
        element: Which element of a tuple it takes, or None.
        op_name: JAX's name stack and primitive, or None.
        source: ``file:line`` of the user's code, or None.
    """

    name: str
    opcode: str
    operands: tuple[str, ...]
    computation: str = ""
    shape: str = ""
    calls: str | None = None
    called: tuple[str, ...] = ()
    element: int | None = None
    op_name: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A parsed module.

    Attributes:
        instructions: By name.
        roots: By computation.
        parameters: Names of a computation's parameters, by it and their number.
        callers: By computation, the loop, call or conditional that runs it.
        fusions: By fused computation, its fusion.
        entry: Name of the entry computation.
    """

    instructions: dict[str, Instruction]
    roots: dict[str, Instruction]
    parameters: dict[tuple[str, int], str]
    callers: dict[str, Instruction] = field(default_factory=dict)
    fusions: dict[str, Instruction] = field(default_factory=dict)
    entry: str = ""

    def origin(self, name: str, index: tuple[int, ...] = ()) -> Instruction | None:
        """The instruction that says best what a buffer holds.

        A fusion that writes into a larger buffer (how `scan` stacks residuals) is followed to the value written, since
        that is what the user saved; an instruction that only passes a buffer on is followed to its operand, and what a
        checkpoint rounds and keeps to what computed it.
        """
        found = self._told(name, index)
        return self._rounded(found) or found

    def _told(self, name: str, index: tuple[int, ...]) -> Instruction | None:
        """The same as `origin`, rounding taken for a computation."""
        found = self.instructions.get(name)
        if found is None or found.calls is None:
            return self._maker(found)
        root = self.roots.get(found.calls)
        if root is not None and root.opcode == "tuple" and index and index[0] < len(root.operands):
            root = self.instructions.get(root.operands[index[0]])
        inner = self._maker(root)
        if inner is not None and inner.opcode == "parameter":
            inner = self._maker(self._argument(found, inner))
        return inner if inner is not None and inner.op_name else found

    def writes_slice(self, name: str) -> bool:
        """Whether an instruction stores a part of a larger buffer."""
        found = self.instructions.get(name)
        if found is None:
            return False
        root = self.roots.get(found.calls) if found.calls else found
        parts = (
            [root]
            if root is None or root.opcode != "tuple"
            else [self.instructions.get(part) for part in root.operands]
        )
        return any(part is not None and self._slice_update(part) for part in parts)

    def _slice_update(self, found: Instruction) -> Instruction | None:
        for _ in range(8):
            if found.opcode == "dynamic-update-slice":
                return found
            following = (
                self.instructions.get(found.operands[0]) if found.operands and found.opcode in _PASSING else None
            )
            if following is None:
                return None
            found = following
        return None

    def _maker(self, found: Instruction | None) -> Instruction | None:
        """Follow passing instructions and slice updates back to the instruction that made the value."""
        for _ in range(16):
            if found is None:
                return None
            update = self._slice_update(found)
            if update is not None and len(update.operands) > 1:
                following = self.instructions.get(update.operands[1])
            elif found.opcode in _PASSING and found.operands and _dull(found):
                following = self.instructions.get(found.operands[0])
                if following is not None and following.calls and found.element is not None:
                    return self.origin(following.name, (found.element,))  # one of a fusion's results
            elif found.opcode == "parameter":
                following = self._given(found)
            else:
                return found
            if following is None:
                return found
            found = following
        return found

    def _rounded(self, found: Instruction | None) -> Instruction | None:
        """What computed the value that ``found`` rounds; None where it rounds nothing, or nothing with a name."""
        if found is None or not _is_rounding(found):
            return None
        for _ in range(16):
            if found.opcode == "parameter":
                fusion = self.fusions.get(found.computation)
                following = self._given(found) if fusion is None else self._argument(fusion, found)
            elif found.calls:
                following = self.roots.get(found.calls)
            elif found.opcode == "get-tuple-element" and found.element is not None:
                following = self._told(found.operands[0], (found.element,))
            elif found.operands and (_is_rounding(found) or found.opcode in _PASSING):
                following = self.instructions.get(found.operands[0])
            else:
                return None
            if following is None or (following.op_name and not _is_rounding(following)):
                return following if following and "/" in (following.op_name or "") else None
            found = following
        return None

    def _given(self, parameter: Instruction) -> Instruction | None:
        """What a call gives for a parameter of the computation that it runs; None for loops, branches and the program itself."""
        caller = self.callers.get(parameter.computation)
        if caller is None or caller.opcode not in {"call", "async-start"}:
            return None
        number = int(parameter.operands[0])
        return self.instructions.get(caller.operands[number]) if number < len(caller.operands) else None

    def _argument(self, fusion: Instruction, parameter: Instruction) -> Instruction | None:
        number = int(parameter.operands[0]) if parameter.operands and parameter.operands[0].isdigit() else -1
        return self.instructions.get(fusion.operands[number]) if 0 <= number < len(fusion.operands) else None


def _dull(found: Instruction) -> bool:
    """Whether an instruction's name says only how a value is stacked by a loop, or nothing."""
    return found.op_name is None or "dynamic_update" in found.op_name


def _is_rounding(found: Instruction) -> bool:
    return found.op_name is not None and found.op_name.endswith(_ROUNDED)


_CELL = "<ipython-input-"  # how a shell without a kernel names the code of its cells


def user_source(frames: Iterable[tuple[str, int]]) -> str | None:
    """``file:line`` of the first of these frames, innermost first, that is the user's; else the first of a package's.

    What calls this library's own command is nobody's line: the console's script, or what runs a module.
    """
    first: str | None = None
    for file, line in frames:
        if file.startswith(_COMMAND):
            break
        if (file.startswith((_OURS, "<")) and not file.startswith(_CELL)) or file.endswith(_WORKER):
            continue
        if not is_installed(file):
            return f"{file}:{line}"
        first = first or f"{file}:{line}"
    return first


def _as_cell(source: str | None) -> str | None:
    """A line of a notebook's cell as people know it, ``In [3]:2``; any other as it is, and that of an earlier kernel's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if source is None or not shell:
        return source
    file, _, line = source.rpartition(":")
    # ("Cell", "In[3]"); the shell counts cells, whose code is compiled under the names of files.
    known = getattr(shell.compile, "format_code_name", lambda _: None)(file)
    return source if known is None else f"{known[1].replace('[', ' [')}:{line}"


def without_export_prefix(text: str) -> str:
    """HLO text of a program that went through `jax.export`, with the names that a direct compile would have."""
    return _EXPORTED.sub("", text)


def count_compiler_remat(text: str | None) -> int:
    """Instructions that the compiler chose to compute again by itself, near its memory limit."""
    return len(_REMAT.findall(text or ""))


def parse_module(text: str) -> Module:
    """Read a module's instructions and source tables; lines that are neither are passed over."""
    text = without_export_prefix(text)
    frames = _Frames(text)
    instructions: dict[str, Instruction] = {}
    roots: dict[str, Instruction] = {}
    parameters: dict[tuple[str, int], str] = {}
    computation = entry = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            match = _COMPUTATION.match(line)
            computation = match[2] if match else computation
            entry = computation if match and match[1] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        found = _instruction(match, line, frames, computation)
        instructions |= {taken.name: taken for taken in _tuple_elements(found)}
        instructions[found.name] = found
        if match[1]:
            roots[computation] = found
        if found.opcode == "parameter":
            parameters[computation, int(found.operands[0])] = found.name
    callers = {called: each for each in instructions.values() for called in each.called}
    fusions = {each.calls: each for each in instructions.values() if each.calls}
    return Module(
        instructions=instructions, roots=roots, parameters=parameters, callers=callers, fusions=fusions, entry=entry
    )


def _instruction(match: re.Match[str], line: str, frames: _Frames, computation: str) -> Instruction:
    calls, op_name, frame, old = (pattern.search(line) for pattern in (_CALLS, _OP_NAME, _FRAME, _OLD_SOURCE))
    source = frames.source(int(frame[1])) if frame else (f"{old[1]}:{old[2]}" if old else None)
    name, shape, opcode, operands = match.group(2, 3, 4, 5)
    element = _TUPLE_INDEX.search(line) if opcode == "get-tuple-element" else None
    return Instruction(
        name=name,
        opcode="concatenate" if _JOINING in line else opcode,
        operands=tuple(
            part.strip().rpartition(" ")[2].lstrip("%")
            for part in _COMMENT.sub("", operands).split(",")
            if part.strip()
        ),
        computation=computation,
        shape=shape,
        calls=calls[1] if calls and opcode == "fusion" else None,
        called=_called(line) if opcode in _CALLING else (),
        element=int(element[1]) if element else None,
        op_name=re.sub(r"\\(.)", r"\1", op_name[1]) if op_name and op_name[1] else None,
        source=source,
    )


def _tuple_elements(found: Instruction) -> Iterator[Instruction]:
    """The elements of tuples among an instruction's operands, which newer text writes as ``%while.1#7``."""
    for operand in found.operands:
        whole, mark, element = operand.rpartition("#")
        if mark and element.isdigit():
            yield Instruction(
                name=operand,
                opcode="get-tuple-element",
                operands=(whole,),
                computation=found.computation,
                element=int(element),
            )


def _called(line: str) -> tuple[str, ...]:
    return tuple(
        name.strip().lstrip("%")
        for one, several in _CALLED.findall(line)
        for name in [*several.split(","), one]
        if name
    )


class _Frames:
    """The module's stack frame tables. An instruction's frame leads through its callers; the user's innermost line is kept."""

    def __init__(self, text: str) -> None:
        head = text.partition("\n\n\n")[0]
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] = {}
        for line in head.splitlines():
            if line in {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}:
                current = tables.setdefault(line, {})
            elif match := _TABLE.match(line):
                current[int(match[1])] = match[2]
        self._files = {key: value.strip('"') for key, value in tables.get("FileNames", {}).items()}
        self._locations = {key: _fields(value) for key, value in tables.get("FileLocations", {}).items()}
        self._frames = {key: _fields(value) for key, value in tables.get("StackFrames", {}).items()}
        # What stands for "no parent": 1 where parents are written one higher than their ids, else 0.
        self._sources: dict[int, str | None] = {}
        self._no_parent = min((frame.get("parent_frame_id", 0) for frame in self._frames.values()), default=0)

    def source(self, frame: int) -> str | None:
        """``file:line`` of the innermost frame outside installed packages and this library; else the innermost package's."""
        if frame not in self._sources:
            self._sources[frame] = _as_cell(user_source(self._chain(frame)))
        return self._sources[frame]

    def _chain(self, frame: int) -> Iterator[tuple[str, int]]:
        """Files and lines from a frame outwards."""
        seen: set[int] = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            fields = self._frames[frame]
            location = self._locations.get(fields.get("file_location_id", 0), {})
            file = self._files.get(location.get("file_name_id", 0))
            if file is not None:
                yield file, location.get("line", 0)
            frame = fields.get("parent_frame_id", 0) - self._no_parent


def _fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
