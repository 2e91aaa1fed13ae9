"""Frozen records from JSON, decoded by their types; plans among them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.terminal import read_json

_Record = TypeVar("_Record")
_SHOWN = 60
# JSON has no NaN and no infinity; a line has them as text.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LARGEST = 2**127  # whole numbers are shown by floats, which end a little above
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799  # the years 1 to 9999
_RIGHT: dict[Any, Any] = {float: (int, float), type(None): type(None)}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def record_from(kind: type[_Record], data: Any, where: str = "") -> _Record:
    """Make a record of what `json` read.

    Args:
        kind: A frozen dataclass.
        data: A mapping of its fields' names to their values.
        where: The path to ``data``, for errors.

    Raises:
        ValueError: a field of another type, or none where one is needed; the message names it.
    """
    if not isinstance(data, Mapping):
        _refuse(where, data, "an object")
    given = cast("Mapping[str, Any]", data)
    values: dict[str, Any] = {}
    for name, hint, needed in _fields(kind):
        at = f"{where}.{name}" if where else name
        if name in given:
            values[name] = _value(hint, given[name], at)
        elif needed:
            msg = f"`{at}` is missing"
            raise ValueError(msg)
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:  # what a record itself refuses, such as a policy that contradicts itself
        msg = f"`{where or kind.__name__}`: {error}"
        raise ValueError(msg) from error


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type, and whether the field has no default."""
    hints = get_type_hints(kind)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cast("Any", kind))
    )


@functools.cache
def _taken_as_is(hint: Any) -> frozenset[type]:
    """Plain types that a field takes unchanged: most of what a run's file holds, and not worth a second look."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return frozenset(member for member in members if member in (int, float, str, bool))


def _value(hint: Any, data: Any, where: str) -> Any:
    if (type(data) in _taken_as_is(hint) or hint is Any) and not _is_beyond(data, where):
        return data
    if dataclasses.is_dataclass(hint):
        return record_from(cast("type[Any]", hint), data, where)
    origin = get_origin(hint)
    if origin is not None:
        return _COMPOSED.get(origin, _any_text)(hint, data, where)
    if hint is float and isinstance(data, str) and data in _NOT_FINITE and not _is_time(where):
        return _NOT_FINITE[data]
    if hint in (int, float, Any) and not isinstance(data, bool) and _is_beyond(data, where):
        _refuse(where, data, "a time of the years 1 to 9999" if _is_time(where) else "a number below 2**127")
    right = _RIGHT.get(hint, hint)
    if not isinstance(data, right) or (isinstance(data, bool) and hint is not bool):
        _refuse(where, data, _WORDS.get(hint, "null"))
    return data


def _is_time(where: str) -> bool:
    return where.endswith("time_s")


def _is_beyond(data: Any, where: str) -> bool:
    """Whether a number is one that no figure and no calendar has: what is written of it would fail, in another place."""
    if not isinstance(data, int | float):
        return False
    if _is_time(where):
        return not _FIRST_S <= data <= _LAST_S
    return isinstance(data, int) and abs(data) >= _LARGEST


def _any_text(hint: Any, data: Any, where: str) -> Any:  # noqa: ARG001 - as the others of its table
    """A Literal: a newer version may know more words, so any text is one."""
    if not isinstance(data, str):
        _refuse(where, data, "a text")
    return data


def _one_of(hint: Any, data: Any, where: str) -> Any:
    members = get_args(hint)
    if data is None and type(None) in members:
        return None
    problems: list[str] = []
    for member in members:
        try:
            return _value(member, data, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0])


def _items(hint: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        _refuse(where, data, "a list")
    given, inner = cast("Sequence[Any]", data), get_args(hint)
    if get_origin(hint) is tuple and inner[-1] is not Ellipsis:
        if len(given) != len(inner):
            _refuse(where, data, f"a list of {len(inner)}")
        return tuple(_value(each, one, f"{where}[{n}]") for n, (each, one) in enumerate(zip(inner, given, strict=True)))
    return tuple(_value(inner[0], one, f"{where}[{n}]") for n, one in enumerate(given))


def _mapping(hint: Any, data: Any, where: str) -> dict[Any, Any]:
    if not isinstance(data, Mapping):
        _refuse(where, data, "an object")
    inner = get_args(hint)[1]
    return {name: _value(inner, one, f"{where}.{name}") for name, one in cast("Mapping[str, Any]", data).items()}


_COMPOSED: dict[Any, Callable[[Any, Any, str], Any]] = {
    Union: _one_of,
    types.UnionType: _one_of,
    Literal: _any_text,
    tuple: _items,
    Sequence: _items,
    Mapping: _mapping,
    dict: _mapping,
}


def _refuse(where: str, data: Any, expected: str) -> NoReturn:
    try:
        shown = without_secrets(repr(data))  # before it is cut, after which a secret may not look like one
    except (RecursionError, ValueError):  # too deep, or more digits than Python writes
        shown = reprlib.repr(data)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    msg = f"`{where}` is {shown}, expected {expected}" if where else f"{shown} is not {expected}"
    raise ValueError(msg)


_EXPECTED = (
    "Expected a whole plan, as jaxmem plan saves it in a file that ends in .json, or the text of plan.to_json() in one"
)
_SHOWN_FIELDS = 3


def read_plan(path: Path) -> PlanRecord:
    """The plan in a file.

    Raises:
        RunFileError: nothing there, or no plan; the message says what it is instead, as far as that shows.
    """
    if str(path).lstrip().startswith("{"):
        msg = (
            f"A plan is read by the path of its file, and this is a text. {_EXPECTED}. Is it that text? Save it first."
        )
        raise RunFileError(msg)
    try:
        return plan_from(read_json(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} {_why(path, error)}."
        raise RunFileError(msg) from error


def plan_from(data: Any) -> PlanRecord:
    """The plan in what `json` read; what a newer version added is left out.

    Raises:
        ValueError: a field of another type, or none where one is needed; a choice that is none of its candidates.
    """
    fields = cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}
    if fields and "candidates" not in fields:
        more = " and more" if len(fields) > _SHOWN_FIELDS else ""
        msg = f"it has no `candidates`, but {', '.join(f'`{name}`' for name in list(fields)[:_SHOWN_FIELDS])}{more}"
        raise ValueError(msg)
    record = record_from(PlanRecord, data)
    if not 0 <= record.chosen < len(record.candidates):
        msg = f"`chosen` is {record.chosen}, expected the place of one of {len(record.candidates)} candidates, from 0"
        raise ValueError(msg)
    return record


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}. {_EXPECTED}"
    if path.suffix in (".yaml", ".yml"):
        return f"is a preset, for jm.load_preset: it has the policy of a plan and none of its figures. {_EXPECTED}"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return f"is no JSON: {error}. {_EXPECTED}"
    return f"is no plan: {error}. {_EXPECTED}; make one of another version of jaxmem_callbacks again with this one"
