"""Optimised HLO text, parsed: its header, instructions, shapes, constants and sources, and what can be counted in it.

Counted are values of kernel libraries, collectives, and operations that the compiler does again by itself.
"""

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
    """Bytes of all arrays in a shape as if their elements were side by side; None where a dtype is unknown."""
    total = 0
    arrays = _ARRAY.findall(shape)
    for kind, bits, sizes in arrays:
        size = _bytes(kind, bits, _elements(sizes))
        if size is None:
            return None
        total += size
    return total if arrays else None


def padded_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape as they are in memory, in tiles where the layout has them; 0 for an unknown dtype."""
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


# A layout's memory space, such as a TPU's on-chip memory or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


def constant_bytes(module: Module) -> int:
    """Bytes of a program's constants in the device's main memory, padding included.

    Those in a fusion are part of its code, and so nowhere in memory.
    """
    return sum(
        padded_bytes(each.shape)
        for each in module.instructions.values()
        if each.opcode == "constant" and each.computation not in module.fusions and not _ELSEWHERE.search(each.shape)
    )


_LIBRARY_PASSING = ("bitcast", "tuple")
_NO_VALUES = ("parameter", "bitcast", "constant", "tuple", "get-tuple-element", "broadcast")


def library_bytes(module: Module) -> int:
    """Bytes of the largest value inside a custom fusion, its results left out; 0 where there is none."""
    fused = {computation for computation, each in module.fusions.items() if "kind=kCustom" in each.attributes}
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


_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w*o\w*)->")


def recomputed(module: Module) -> list[Instruction]:
    """Instructions that the compiler's own rematerialisation added near its memory limit, which their names show.

    One that reads nothing, such as a broadcast constant, is made where it is used for free, whatever its name.
    """
    return [each for each in module.instructions.values() if ".remat" in each.name and each.operand_text]


def recomputed_flops(module: Module) -> int:
    """Operations on one device of the instructions that XLA's rematerialisation added; 0 where it added none."""
    again = recomputed(module)
    fused = {each.calls for each in again if each.calls}
    inside = dict.fromkeys(fused, 0)
    for each in module.instructions.values() if fused else ():
        if each.computation in fused:
            inside[each.computation] += product_flops(each, module)
    return sum(
        (product_flops(each, module) or math.prod(dimensions(each.shape))) + inside.get(each.calls or "", 0)
        for each in again
    )


def product_flops(each: Instruction, module: Module) -> int:
    """Operations of a matrix product or convolution, also where a library is called for it, else 0."""
    shape = dimensions(each.shape)
    found = [module.instructions.get(name) for name in each.operands]
    operands = [() if operand is None else dimensions(operand.shape) for operand in found]
    product = _CONTRACTED.search(each.attributes)
    if product and operands and operands[0]:
        axes = re.findall(r"\d+", product[1] or product[2] or "")
        return 2 * math.prod(shape) * math.prod(operands[0][int(axis)] for axis in axes)
    labels = _KERNEL_LABELS.search(each.attributes)
    if labels and len(operands) > 1:
        # A gradient by the kernel has the kernel as its result and takes the convolution's results; one by the input takes them
        # in the place of the input. Either way each of them is a sum over the kernel, less its output channels.
        results, kernel = shape, operands[1]
        if "convBackwardFilter" in each.attributes:
            results, kernel = operands[1], shape
        elif "convBackwardInput" in each.attributes:
            results = operands[0]
        made = kernel[labels[1].index("o")] if kernel else 1
        return 2 * math.prod(results) * math.prod(kernel) // max(made, 1)
    return 0


COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
_COUNTED = {"fusion", *CALLING, *COLLECTIVES, *(f"{each}-start" for each in COLLECTIVES)}
_TYPED_SHAPE = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count[^}]*?"n":"(\d+)"')
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Collectives:
    """What one program's collectives do on one device.

    Attributes:
        count: How often one runs, loops multiplied in.
        moved_bytes: Through the device's links.
    """

    count: int
    moved_bytes: int


def collectives_of(module: Module, device_count: int) -> Collectives:
    """Collectives of an optimised program; loops whose trip count the compiler does not know count once.

    Of a condition's branches the one that moves most is counted.
    """
    by_computation: dict[str, list[Instruction]] = {}
    for each in module.instructions.values():
        if each.opcode in _COUNTED:
            by_computation.setdefault(each.computation, []).append(each)
    known: dict[str, Collectives] = {}

    def total(computation: str) -> Collectives:
        if computation not in known:
            count = moved = 0
            for each in by_computation.get(computation, ()):
                if each.opcode.removesuffix("-start") in COLLECTIVES:
                    count, moved = count + 1, moved + moved_bytes(each, device_count)
                for either, trips in calls_of(each):
                    inner = max(map(total, either), key=lambda branch: branch.moved_bytes)
                    count, moved = count + trips * inner.count, moved + trips * inner.moved_bytes
            known[computation] = Collectives(count, moved)
        return known[computation]

    return total(module.entry)


def calls_of(each: Instruction) -> Iterator[tuple[tuple[str, ...], int]]:
    """Computations of which one runs, and how often: a loop's body, or the branches of a condition."""
    if each.opcode == "conditional":
        yield each.called, 1
        return
    trips = _TRIPS.search(each.attributes)
    times = int(trips[1]) if trips else 1
    for name in [*each.called, *_CONDITION.findall(each.attributes), *([each.calls] if each.calls else ())]:
        yield (name,), times


def _devices_together(each: Instruction, device_count: int) -> int:
    """How many devices take part together; all of them where the instruction names no groups."""
    groups = _GROUP.search(each.attributes)
    if groups is None:
        return device_count
    return len(groups[1].split(",")) if groups[1] else int(groups[2])


def moved_bytes(each: Instruction, device_count: int) -> int:
    """Bytes of a collective through the links; the size is that of the results, of a scatter parts of its operands."""
    operation, size, devices = (
        each.opcode.removesuffix("-start"),
        _result_bytes(each),
        _devices_together(each, device_count),
    )
    share = (devices - 1) / max(devices, 1)
    whole = size * devices if operation == "reduce-scatter" else size
    return int(whole * share * (2 if operation == "all-reduce" else 1)) if operation != "collective-permute" else size


def _width(kind: str) -> int:
    """Bytes of one element, from a type's name such as ``bf16``; what names no bits is one byte."""
    bits = _BITS.search(kind)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _result_bytes(each: Instruction) -> int:
    """Bytes of the results. An asynchronous start has its operands before them, except a reduction to all, which has none."""
    text = each.shape
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        text = top_level_parts(text[1:-1])[1]
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _width(kind) for kind, dims in _TYPED_SHAPE.findall(text)
    )
