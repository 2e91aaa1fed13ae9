"""Optimised HLO text: its header, instructions, shapes, constants and sources."""

from __future__ import annotations

import functools
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from jaxmem_callbacks.records.source_files import is_installed

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
# What follows: a layout's dimensions, the last one first, and the tile that the last ones are rounded up to.
_LAYOUT = re.compile(r"\{([\d,]*)(?::T\(([\d,]+)\))?")
_MARKS, _BRACES = re.compile(r"[(){}\[\],]"), re.compile(r"[{}]")
_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}")
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
    """Bytes of all arrays in a shape as they lie in memory, in tiles where the layout has them; 0 for an unknown dtype."""
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


def dimensions(shape: str) -> tuple[int, ...]:
    """Sizes of an array; of a tuple, those of its first array; empty where there is none."""
    found = _ARRAY.search(shape)
    return tuple(_numbers(found[3])) if found else ()


def top_level_parts(text: str) -> list[str]:
    """What the commas outside all brackets separate, such as a tuple's parts, which may be tuples and have layouts."""
    parts, depth, start = [], 0, 0
    for mark in _MARKS.finditer(text):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if mark[0] == "," and not depth:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]


def _braced(line: str, key: str) -> str:
    """The text in the braces after ``key``, inner braces included; empty where the key is absent."""
    _, found, after = line.partition(key + "{")
    depth = 1 if found else 0
    for mark in _BRACES.finditer(after):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return after[: mark.start()]
    return ""


def _bytes(kind: str, bits: str, elements: int) -> int | None:
    if not bits and kind not in _WITHOUT_BITS:
        return None
    return -(-elements * (int(bits) if bits else _WITHOUT_BITS[kind]) // 8)


def _elements(sizes: str) -> int:
    return math.prod(_numbers(sizes))


def _numbers(sizes: str) -> list[int]:
    return [int(size.lstrip("<=")) for size in sizes.split(",") if size]


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)(.*)")
_COMMENT = re.compile(r"/\*.*?\*/")
# What an instruction calls besides a fusion; a branch or body has its own instructions, scheduled with all others.
_CALLED = re.compile(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
CALLING = {"while", "call", "conditional", "async-start"}
_TUPLE_INDEX = re.compile(r"\), index=(\d+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
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
# What a checkpoint keeps is rounded to its own precision by JAX: the name of that does not describe what is kept.
_ROUNDED = "/reduce_precision"
# How a TPU's compiler joins what it fetched in parts, in place.
_JOINING = 'custom_call_target="ConcatBitcast"'


@dataclass(eq=False)  # frozen would make a large module take twice as long to parse
class Instruction:
    """One line of HLO, never changed. What only some readers ask for is parsed when it is first read.

    Attributes:
        name: Unique in its module.
        opcode: Such as ``fusion`` or ``dot``.
        computation: The computation that it stands in.
        shape: Its result's dtype, shape and layout.
        operand_text: Its operands, or the parameter's number.
        attributes: The rest of the line, from the end of the operands on.
        is_root: Whether it is its computation's result.
        frames: The tables that its source line is read from.
    """

    name: Final[str]
    opcode: Final[str]
    computation: Final[str]
    shape: Final[str]
    operand_text: Final[str]
    attributes: Final[str]
    is_root: Final[bool]
    frames: Final[StackFrames] = field(repr=False)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands, or the parameter's number."""
        parts = _COMMENT.sub("", self.operand_text).split(",")
        return tuple(part.strip().rpartition(" ")[2].lstrip("%") for part in parts if part.strip())

    @functools.cached_property
    def calls(self) -> str | None:
        """The fused computation, or None."""
        found = _CALLS.search(self.attributes) if self.opcode == "fusion" else None
        return found[1] if found else None

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that a loop, a call or a conditional runs."""
        found = _CALLED.findall(self.attributes) if self.opcode in CALLING else ()
        return tuple(name.strip().lstrip("%") for one, several in found for name in [*several.split(","), one] if name)

    @functools.cached_property
    def element(self) -> int | None:
        """Which element of a tuple it takes, or None."""
        found = _TUPLE_INDEX.search(self.attributes) if self.opcode == "get-tuple-element" else None
        return int(found[1]) if found else None

    @functools.cached_property
    def op_name(self) -> str | None:
        """JAX's name stack and primitive, or None."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found and found[1] else None

    @functools.cached_property
    def source(self) -> str | None:
        """``file:line`` of the user's code, or None."""
        if frame := _FRAME.search(self.attributes):
            return self.frames.source(int(frame[1]))
        found = _OLD_SOURCE.search(self.attributes)
        return f"{found[1]}:{found[2]}" if found else None


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Attributes:
        text: What was parsed.
        instructions: By name, in the order of the text.
        entry: Name of the entry computation; empty where there is none.
    """

    text: str = field(repr=False)
    instructions: Mapping[str, Instruction] = field(repr=False)
    entry: str

    @functools.cached_property
    def roots(self) -> dict[str, Instruction]:
        """Results, by computation."""
        return {each.computation: each for each in self.instructions.values() if each.is_root}

    @functools.cached_property
    def parameters(self) -> dict[tuple[str, int], str]:
        """Names of a computation's parameters, by it and their number."""
        parameters = (each for each in self.instructions.values() if each.opcode == "parameter")
        return {(each.computation, int(each.operands[0])): each.name for each in parameters}

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """By computation, the loop, call or conditional that runs it."""
        calling = (each for each in self.instructions.values() if each.opcode in CALLING)
        return {called: each for each in calling for called in each.called}

    @functools.cached_property
    def fusions(self) -> dict[str, Instruction]:
        """By fused computation, its fusion."""
        fusions = (each for each in self.instructions.values() if each.opcode == "fusion")
        return {each.calls: each for each in fusions if each.calls}

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """Parameter number -> number of the result that takes over its memory, from the header."""
        aliases: dict[int, int] = {}
        for output, parameter, index in _ALIAS.findall(_braced(self._header, "input_output_alias=")):
            number = int(index.split(",")[0]) if index.strip() else int(parameter)
            aliases[number] = int(output.split(",")[0]) if output.strip() else 0
        return aliases

    @functools.cached_property
    def parameter_count(self) -> int:
        """Arguments in ``entry_computation_layout={(a, b)->c}``, those of a packed tuple counted one by one."""
        inside = _braced(self._header, "entry_computation_layout=").partition(")->")[0].removeprefix("(")
        if inside.startswith("("):
            inside = inside[1:].removesuffix(")")
        return len(top_level_parts(inside)) if inside.strip() else 0

    @property
    def _header(self) -> str:
        return self.text.partition("\n")[0]

    def origin(self, name: str, index: tuple[int, ...] = ()) -> Instruction | None:
        """The instruction that describes best what a buffer holds.

        A fusion that writes into a larger buffer (how `scan` stacks residuals) is followed to the value written, since
        that is what the user saved; an instruction that only passes a buffer on is followed to its operand, and what a
        checkpoint rounds and keeps to what computed it.
        """
        found = self._unrounded_origin(name, index)
        return self._rounded(found) or found

    def _unrounded_origin(self, name: str, index: tuple[int, ...]) -> Instruction | None:
        """The same as `origin`, with rounding counted as a computation."""
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
            elif found.opcode in _PASSING and found.operands and _is_stacking(found):
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
                following = self._unrounded_origin(found.operands[0], (found.element,))
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


def _is_stacking(found: Instruction) -> bool:
    """Whether an instruction's name shows only how a loop stacks a value, or nothing."""
    return found.op_name is None or "dynamic_update" in found.op_name


def _is_rounding(found: Instruction) -> bool:
    return found.op_name is not None and found.op_name.endswith(_ROUNDED)


_TABLE = re.compile(r"^(\d+) (.*)$")
_TABLES = {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}
# What the worker's own call of a traced program adds in front of the user's names.
_EXPORTED = re.compile(r"jit\([^()]*\)/call_exported(?:/|(?=\"))")
_OURS = str(pathlib.Path(__file__).parents[2])
_COMMAND = str(pathlib.Path(_OURS) / "cli" / "_").removesuffix("_")
# Where a program is compiled for a target. What another installation compiled is read from the same cache.
_WORKER = "/jaxmem_callbacks/programs/targets/worker_main.py"
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


def parse_module(text: str | None) -> Module:
    """Read a module's instructions; lines that are none are passed over.

    Args:
        text: What ``compiled.as_text()`` gave, or a dump.
    """
    text = without_export_prefix(text or "")
    frames = StackFrames(text)
    instructions: dict[str, Instruction] = {}
    computation = entry = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if match := _COMPUTATION.match(line):
                computation = match[2]
                entry = computation if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, operands, attributes = match.groups()
            if opcode == "custom-call" and _JOINING in attributes:
                opcode = "concatenate"
            found = Instruction(name, opcode, computation, shape, operands, attributes, bool(root), frames)
            if "#" in operands:
                instructions |= {element.name: element for element in _tuple_elements(found)}
            instructions[name] = found
    return Module(text, instructions, entry)


def _tuple_elements(found: Instruction) -> Iterator[Instruction]:
    """The elements of tuples among an instruction's operands, which newer text writes as ``%while.1#7``."""
    for operand in found.operands:
        whole, mark, element = operand.rpartition("#")
        if mark and element.isdigit():
            yield Instruction(
                operand, "get-tuple-element", found.computation, "", whole, f"), index={element}", False, found.frames
            )


class StackFrames:
    """The module's stack frame tables. An instruction's frame leads through its callers; the user's innermost line is kept."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._sources: dict[int, str | None] = {}

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] = {}
        for line in self._text.partition("\n\n\n")[0].splitlines():
            if line in _TABLES:
                current = tables.setdefault(line, {})
            elif match := _TABLE.match(line):
                current[int(match[1])] = match[2]
        return tables

    @functools.cached_property
    def _files(self) -> dict[int, str]:
        return {key: value.strip('"') for key, value in self._tables.get("FileNames", {}).items()}

    @functools.cached_property
    def _locations(self) -> dict[int, dict[str, int]]:
        return {key: _fields(value) for key, value in self._tables.get("FileLocations", {}).items()}

    @functools.cached_property
    def _frames(self) -> dict[int, dict[str, int]]:
        return {key: _fields(value) for key, value in self._tables.get("StackFrames", {}).items()}

    @functools.cached_property
    def _no_parent(self) -> int:
        """What stands for "no parent": 1 where parents are written one higher than their ids, else 0."""
        return min((frame.get("parent_frame_id", 0) for frame in self._frames.values()), default=0)

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
