"""What is wrong with a preset, and where. Problems are collected while reading and raised together as one PresetError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PresetError

_SHOWN = 60
_TOLD = 10
NEXT = f"Next: `{advise('command.typed', typed='presets full_remat')}` prints a complete preset to compare with."


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something was said.

    Attributes:
        source: A file as the user named it, or ``override policy.segments``.
        line: Line from 1, or None where the source has no lines.
        column: Column from 1, or None likewise.
    """

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake.

    Attributes:
        place: Where.
        given: What was given, one sentence; the nearest valid name where there is one.
        expected: What would have been right.
    """

    place: Place
    given: str
    expected: str

    def __str__(self) -> str:
        return f"{self.place}: {self.given}\n    {self.expected}"


def preset_error(problems: Iterable[Problem]) -> PresetError:
    """One error that reports every problem, in the order of the lines."""
    ordered = sorted(problems, key=lambda problem: (problem.place.line or 0, problem.place.column or 0))
    lines = [str(problem) for problem in ordered]
    if len(lines) > _TOLD:  # the last one is what stopped the reading, if anything did
        lines[_TOLD - 1 : -1] = [f"... {len(lines) - _TOLD} more ..."]
    head = [] if len(ordered) == 1 else [f"{len(ordered)} problems:"]
    return PresetError("\n".join([*head, *lines, NEXT]))


def shorten(text: object) -> str:
    """The text in quotes, cut where it would flood a terminal."""
    shown = repr(str(text)[: _SHOWN + 1])
    return shown if len(str(text)) <= _SHOWN else f"{shown[:_SHOWN]}...' ({len(str(text))} characters)"


def describe(value: Any) -> str:
    """What a value is in YAML's words: ``the text 'four'``, ``the number 4``, ``a list``."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        is_long = isinstance(value, int) and abs(value) >= 10**_SHOWN
        return f"a number with more than {_SHOWN} digits" if is_long else f"the number {value!r}"
    if isinstance(value, str):
        return f"the text {shorten(value)}"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else f"a Python {type(value).__name__}"
