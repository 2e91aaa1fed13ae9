"""A step's memory enters, an aligned table in plain text leaves: every number with its unit, meaning and source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from jaxmem_callbacks.records.programs import ArgumentMemory, Buffer, ProgramMemory
from jaxmem_callbacks.records.terminal import columns, wrapped
from jaxmem_callbacks.records.units import format_bytes

# Constants of so many bytes, and of this share of what the step needs, are worth a word.
_LARGE = 2**20
_LARGE_SHARE = 0.01


def memory_table(program: ProgramMemory, arguments: Sequence[ArgumentMemory], warnings: Sequence[str]) -> str:
    """The whole account of one step."""
    hardware = f"attached {program.platform}" if program.target == "attached" else program.target
    lines = [
        f"What one step of {program.name} needs, in bytes on one device (source: the compiler for {hardware})",
        "",
        *columns(_figures(program, arguments), ("left", "right", "left")),
        "",
        *argument_table(arguments),
        *_tiles(program, arguments),
    ]
    if warnings:
        lines += ["", *(f"! {warning}" for warning in warnings)]
    return "\n".join(lines)


def _tiles(program: ProgramMemory, arguments: Sequence[ArgumentMemory]) -> list[str]:
    """Why sizes by argument add up to less than the figures above them: a TPU rounds arrays up to tiles."""
    elements = sum(row.bytes for row in arguments)
    told, padded = format_bytes(elements), format_bytes(program.argument_bytes)
    if program.platform != "tpu" or program.argument_bytes <= elements or told == padded:
        return []
    remark = (
        f"Sizes by argument are those of the elements, {told}; a TPU's tiles pad them to {padded}, as in the figures above. "
        "peak() tells the padding of each array."
    )
    return ["", *wrapped([remark])]


def disagreement_words(program: ProgramMemory) -> tuple[str, ...]:
    """A sentence for each other figure of the same bytes that differs by more than 1 %, and which of them is right."""
    step = format_bytes(program.step_bytes)
    less = (
        "It leaves out memory that XLA keeps apart, as a flag such as xla_gpu_temp_buffer_use_separate_color asks for"
    )
    more = "It counts memory that no value is given"
    return tuple(
        f"{program.name} needs {step} by {program.step_source}, and {words} {format_bytes(count)}. "
        f"{less if count < program.step_bytes else more}; the program asks for {step}."
        for words, count in program.disagreements
    )


def large_constants(name: str, step_bytes: int | None, constant_bytes: int | None) -> tuple[str, ...]:
    """What to do about arrays in a program that are worth it; empty where none are."""
    held = constant_bytes or 0
    if held < max(_LARGE, _LARGE_SHARE * (step_bytes or 0)):
        return ()
    size = format_bytes(held)
    msg = f"{size} of constants: {name} closes over arrays, which each compiled program holds. Give them as arguments."
    return (msg,)


def argument_table(rows: Sequence[ArgumentMemory]) -> list[str]:
    """One line for each argument and kind, and their sums by kind."""
    head = ("argument", "holds", "arrays", "size", "donated", "really reused")
    body = [(row.name, row.kind, *_cells([row])) for row in rows]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    sums = [("", f"all {kind}", *_cells([row for row in rows if row.kind == kind])) for kind in kinds]
    shown = sums if len(rows) > len(kinds) else []
    return columns([head, *body, *shown], ("left", "left", "right", "right", "right", "right"))


def buffer_table(buffers: Sequence[Buffer]) -> list[str]:
    """The buffers of the peak, largest first, with the place in the user's code that they come from."""
    head = ("size", "padding", "group", "shape", "from", "source")
    body = [
        (format_bytes(b.bytes), _padding(b), b.group, b.shape, b.operation or "unknown", _near(b.source))
        for b in buffers
    ]
    return columns([head, *body], ("right", "right", "left", "left", "left", "left"))


def _padding(buffer: Buffer) -> str:
    waste = buffer.waste_bytes
    return format_bytes(waste) if waste else "unknown" if waste is None else "none"


def _near(source: str | None) -> str:
    """``file:line`` as short as it can be told from the working folder."""
    if source is None:
        return "unknown"
    with contextlib.suppress(FileNotFoundError):  # whoever works in a folder that is gone has no shorter name
        return source.removeprefix(str(Path.cwd()) + os.sep)
    return source


def _figures(program: ProgramMemory, arguments: Sequence[ArgumentMemory]) -> list[tuple[str, ...]]:
    donated = (
        f"outputs that reuse donated arguments ({format_bytes(sum(row.donated_bytes for row in arguments))} donated)"
    )
    host = ("on the host", format_bytes(program.host_temp_bytes), "offloaded values, besides what the device needs")
    return [
        ("step", format_bytes(program.step_bytes), program.step_source),
        ("arguments", format_bytes(program.argument_bytes), "what the step is given and uses"),
        ("outputs", format_bytes(program.output_bytes), "what it returns, reused arguments included"),
        ("aliased", format_bytes(program.alias_bytes), donated),
        ("temporaries", format_bytes(program.temp_bytes), "activations, residuals, workspace"),
        (
            "constants",
            format_bytes(program.constant_bytes),
            "arrays in the program, such as data that the step closes over",
        ),
        *([host] if program.host_temp_bytes else []),
        ("recomputed", str(program.compiler_remat), "instructions that the compiler recomputes by its own choice"),
    ]


def _cells(rows: Sequence[ArgumentMemory]) -> tuple[str, str, str, str]:
    reused = [row.alias_bytes for row in rows]
    known = [bytes_ for bytes_ in reused if bytes_ is not None]
    return (
        str(sum(row.leaves for row in rows)),
        format_bytes(sum(row.bytes for row in rows)),
        format_bytes(sum(row.donated_bytes for row in rows)),
        format_bytes(sum(known) if len(known) == len(reused) else None),
    )
