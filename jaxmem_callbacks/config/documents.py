"""Files of presets as plain data, with the place of each key and value and the problems found in them.

The shipped files, and the user's, with their size and kind checked before they are read; then one YAML document of each.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PresetError, did_you_mean
from jaxmem_callbacks.records.units import format_bytes

_SHOWN = 60
_MOST_PROBLEMS = 10
NEXT = f"Next: `{advise('command.typed', typed='presets full_remat')}` prints a complete preset to compare with."


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something stands.

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
    if len(lines) > _MOST_PROBLEMS:  # the last one is what stopped the reading, if anything did
        lines[_MOST_PROBLEMS - 1 : -1] = [f"... {len(lines) - _MOST_PROBLEMS} more ..."]
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


KeyPath = tuple[str | int, ...]
MAX_DEPTH = 8
MAX_VALUES = 2000
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]{0,40})(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
_EXACT = 2**53
_DETAIL = 200  # the parser quotes tag handles and names whole


@dataclass(kw_only=True, slots=True)
class Document:
    """One mapping at the top of one source.

    Attributes:
        values: Mappings as dict, lists as tuple, scalars as str, int, float, bool or None.
        places: Path of a key, such as ``("policy", "remat")`` or ``("policy", "save", 1)``, -> where its value stands.
        keys: The same for the key itself.
        problems: Mistakes that do not stop the reading (duplicate keys).
    """

    values: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse_document(text: str, source: str) -> Document:
    """Read one YAML document whose top is a mapping.

    Args:
        text: The YAML.
        source: How the user knows it, for error messages.

    Raises:
        PresetError: not YAML, not one mapping, or YAML that a preset never needs (tags, aliases, depth, thousands of values).
    """
    return _Reader(text, source).document()


class _Reader:
    """Walks the event stream once."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._count = 0
        self._text = text
        self._found = Document(values={})
        self._events = self._parsed()

    def document(self) -> Document:
        event = next(self._events)
        while isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
            event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent) or self._is_blank(event):
            raise self._refused(
                Place(source=self._source), "this is empty.", "Expected: a mapping such as `policy: {remat: full}`."
            )
        if not isinstance(event, yaml.MappingStartEvent):
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"
            self._check(event, 0)
            raise self._refused(
                self._place(event), f"this is {kind}.", "Expected: a mapping such as `policy: {remat: full}`."
            )
        self._found.values = self._value(event, ())
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                raise self._refused(
                    self._place(event),
                    "a second YAML document begins here.",
                    "Expected: one document a file. Write two files and load both: they compose.",
                )
        return self._found

    def _parsed(self) -> Iterator[Any]:
        """The events; the parser's own errors become PresetErrors."""
        if "\0" in self._text:
            raise self._refused(
                self._at(self._text.index("\0")), "a NUL byte.", "Expected: a YAML file, not a binary one."
            )
        try:
            yield from yaml.parse(self._text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            given = f"the character U+{ord(self._text[error.position]):04X} is not allowed in YAML."
            raise self._refused(self._at(error.position), given, "Expected: text without control characters.") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = self._marked(mark) if mark else Place(source=self._source)
            detail = ", ".join(part for part in (error.context, error.problem) if part)[:_DETAIL]
            hint = " Indent with spaces, not tabs." if "'\\t'" in detail else ""
            raise self._refused(place, f"this is not YAML: {detail}.", f"Expected: `key: value` lines.{hint}") from None

    def _value(self, event: Any, path: KeyPath) -> Any:
        """The value that begins with this event, with everything in it."""
        self._check(event, len(path))
        self._found.places[path] = self._place(event)
        if isinstance(event, yaml.ScalarEvent):
            return plain_value(event.value) if event.implicit[0] else event.value
        return self._list(path) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(path)

    def _list(self, path: KeyPath) -> tuple[Any, ...]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return tuple(items)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._check(event, len(path))
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refused(
                    self._place(event), "a list or mapping stands as a key.", "Expected: a name as the key."
                )
            inner = (*path, event.value)
            if event.value in found:
                self._found.problems.append(self._duplicate(event, inner))
            else:
                self._found.keys[inner] = self._place(event)
            found[event.value] = self._value(next(self._events), inner)
        return found

    def _duplicate(self, event: Any, path: KeyPath) -> Problem:
        return Problem(
            place=self._place(event),
            given=f"the key {shorten(event.value)} is given twice, first at line {self._found.keys[path].line}.",
            expected="Expected: every key once. Delete one of the two lines.",
        )

    def _check(self, event: Any, depth: int) -> None:
        """Refuse what no preset needs and what an attacker would use."""
        self._count += 1
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
            given = f"the YAML alias or anchor {shorten(mark + str(event.anchor))}."
            raise self._refused(place, given, "Expected: plain values. Write the value out where it is used.")
        if event.tag is not None:
            raise self._refused(place, f"the YAML tag {shorten(event.tag)}.", "Expected: plain values. Delete the tag.")
        if depth > MAX_DEPTH:
            raise self._refused(
                place, f"nested more than {MAX_DEPTH} deep.", "Expected: two levels, as in `policy: {remat: full}`."
            )
        if self._count > MAX_VALUES:
            raise self._refused(
                place, f"more than {MAX_VALUES} keys and values.", "Expected: a preset of some twenty lines."
            )

    def _is_blank(self, event: Any) -> bool:
        return isinstance(event, yaml.ScalarEvent) and event.value == "" and event.implicit[0]

    def _place(self, event: Any) -> Place:
        return self._marked(event.start_mark)

    def _marked(self, mark: Any) -> Place:
        return Place(source=self._source, line=mark.line + 1, column=mark.column + 1)

    def _at(self, index: int) -> Place:
        line = self._text.count("\n", 0, index) + 1
        return Place(source=self._source, line=line, column=index - self._text.rfind("\n", 0, index))

    def _refused(self, place: Place, given: str, expected: str) -> PresetError:
        return preset_error([*self._found.problems, Problem(place=place, given=given, expected=expected)])


def plain_value(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means."""
    if text in {"", "~", "null", "Null", "NULL"}:
        return None
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    number = float(text) if _FLOAT.fullmatch(text) else math.nan
    if not math.isfinite(number):
        return text
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


SCHEMA_NAME = "preset.schema.json"


def shipped_folder(room: Path | None = None) -> Path:
    """The folder that holds the shipped parts and their JSON Schema.

    Args:
        room: The folder of ``jaxmem_callbacks/config``; None for this one.

    Raises:
        PresetError: neither place has it, so the installation is incomplete.
    """
    room = room or Path(__file__).resolve().parent
    places = (room / "shipped", room.parent.parent / "configs")
    for place in places:
        if (place / SCHEMA_NAME).is_file():
            return place
    msg = (
        f"The shipped presets are missing: no {SCHEMA_NAME} in {places[0]} or {places[1]}. "
        "The installation is incomplete. Next: install the package again from its checkout."
    )
    raise PresetError(msg)


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped parts, sorted."""
    return tuple(sorted(path.stem for path in shipped_folder().glob("*.yaml")))


def require_shipped(name: str) -> Path:
    """The file of a shipped part.

    Raises:
        PresetError: there is none of that name; names those that there are.
    """
    known = shipped_names()
    if name in known:
        return shipped_folder() / f"{name}.yaml"
    msg = (
        f"Unknown preset {name!r}.{did_you_mean(name, known)} Expected one of: {', '.join(known)}; or a path such as "
        f"./{name}.yaml.\nNext: `{advise('command.typed', typed='presets')}` describes each."
    )
    raise PresetError(msg)


def is_path(text: str) -> bool:
    """Whether a preset is named by a path, and not by the name of a shipped part."""
    return text.endswith((".yaml", ".yml")) or any(mark in text for mark in {"/", os.sep})


LIMIT_BYTES = 64 * 1024


def read_text(path: str) -> str:
    """The text of a YAML file.

    Raises:
        PresetError: missing, unreadable, no regular file (a folder, a FIFO, a device), larger than 64 KiB, not UTF-8.
    """
    data = _read(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        problem = Problem(
            place=Place(source=path, line=line, column=column),
            given=f"this is not UTF-8 text: byte 0x{data[error.start]:02x}.",
            expected="Expected: a YAML file in UTF-8. Save it so, or convert it with `iconv -t UTF-8`.",
        )
        raise preset_error([problem]) from None


def _read(path: str) -> bytes:
    """The bytes, refused by kind and size first; a FIFO is opened without waiting for its writer."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(path, f"the file cannot be read: {reason}.") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise _refused(path, f"this is {_kind(facts.st_mode)}, not a file.")
        if facts.st_size > LIMIT_BYTES:
            raise _too_large(path, facts.st_size)
        with os.fdopen(os.dup(handle), "rb") as stream:
            data = stream.read(LIMIT_BYTES + 1)  # files under /proc report a size of 0
    finally:
        os.close(handle)
    if len(data) > LIMIT_BYTES:
        raise _too_large(path, len(data))
    return data


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def _too_large(path: str, size: int) -> PresetError:
    return _refused(path, f"the file has {format_bytes(size)}, which is too large to be a preset.")


def _refused(path: str, given: str) -> PresetError:
    expected = f"Expected: the path of a YAML file of at most {format_bytes(LIMIT_BYTES)}."
    return preset_error([Problem(place=Place(source=path), given=given, expected=expected)])
