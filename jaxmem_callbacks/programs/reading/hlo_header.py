"""The first line of an optimised HLO text enters; which results reuse which parameters leaves.

The line reads ``HloModule jit_f, ..., input_output_alias={ {1}: (0, {}, may-alias) }, buffer_donor={ (2, {}) },
entry_computation_layout={(f32[4]{0}, ...)->...}``. With very many arguments XLA packs them in one tuple parameter, and the
index in the second braces counts them instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
