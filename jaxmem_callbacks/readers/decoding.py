"""Frozen records from JSON, checked by pydantic against the types of their fields; plans among them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.terminal import read_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_Record = TypeVar("_Record")
_LETTERS = 60
# JSON has no NaN and no infinity; a line has them as text.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LARGEST = 2**127  # whole numbers are printed by way of floats, which end a little above
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799  # the years 1 to 9999
_EXPECTED = {  # by pydantic's name of the error; `_refuse` has the others' words
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}


def record_from(kind: type[_Record], data: Any, where: str = "") -> _Record:
    """Make a record of what `json` read. What a newer version added is no error: other fields are left out, other words kept.

    Args:
        kind: A frozen dataclass.
        data: A mapping of its fields' names to their values.
        where: The path to ``data``, for errors.

    Raises:
        ValueError: a field of another type, or none where one is needed; the message names it.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(_problem(error.errors(include_url=False), data, where, kind.__name__)) from error


@functools.cache
def _adapter(kind: type[_Record]) -> TypeAdapter[_Record]:
    from pydantic import TypeAdapter  # takes a tenth of a second, for which only readers of files wait

    return TypeAdapter(_checked(kind))


def _checked(hint: Any) -> Any:
    """The type that pydantic checks in a hint's place: no number is made of a text or a switch, and any word is a Literal's."""
    from pydantic import BeforeValidator, Strict

    members, origin = get_args(hint), get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _record_type(cast("type[Any]", hint))
    if origin in (Union, types.UnionType):
        in_order = sorted(members, key=lambda member: member is not str)  # "nan" is a text where a text may be
        return Union[tuple(map(_checked, in_order))]  # noqa: UP007 - of a tuple
    if origin is tuple and members[-1] is not Ellipsis:
        return Annotated[
            tuple[tuple(map(_checked, members))],  # pyright: ignore[reportInvalidTypeForm] - of a tuple
            BeforeValidator(functools.partial(_of_length, len(members))),
        ]
    if origin in (tuple, Sequence):
        return tuple[_checked(members[0]), ...]
    if origin in (Mapping, dict):
        return dict[str, _checked(members[1])]
    return {
        int: Annotated[int, Strict(), BeforeValidator(_in_range)],
        float: Annotated[float, Strict(), BeforeValidator(_finite_or_named)],
        bool: Annotated[bool, Strict()],
        Any: Annotated[Any, BeforeValidator(_in_range)],
        types.NoneType: None,
    }.get(hint, Annotated[str, Strict()])


def _record_type(kind: type[Any]) -> Any:
    """A record's fields by the types that are checked, and then the record, whose own checks come last."""
    from pydantic import AfterValidator, BeforeValidator

    hints = get_type_hints(kind)
    fields = [
        (
            field.name,
            Annotated[_checked(hints[field.name]), BeforeValidator(_in_calendar)]
            if field.name.endswith("time_s")
            else _checked(hints[field.name]),
            dataclasses.field(default=field.default, default_factory=field.default_factory),
        )
        for field in dataclasses.fields(kind)
    ]
    checked = dataclasses.make_dataclass(kind.__name__, fields, kw_only=True)
    return Annotated[checked, AfterValidator(lambda given: _made(kind, vars(given)))]


def _made(kind: type[_Record], fields: Mapping[str, Any]) -> _Record:
    try:
        return kind(**fields)
    except TypeError as error:  # which pydantic lets through, unlike a ValueError
        raise ValueError(str(error)) from error


def _of_length(count: int, data: Any) -> Any:
    if isinstance(data, list | tuple) and len(cast("Sequence[Any]", data)) != count:
        _refuse(f"a list of {count}")
    return data


def _in_range(data: Any) -> Any:
    """Refuse a number that no figure has: what is written of it would fail, in another place."""
    if isinstance(data, int) and abs(data) >= _LARGEST:
        _refuse("a number below 2**127")
    return data


def _finite_or_named(data: Any) -> Any:
    return _NOT_FINITE.get(data, data) if isinstance(data, str) else _in_range(data)


def _in_calendar(data: Any) -> Any:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if (is_number and not _FIRST_S <= data <= _LAST_S) or (isinstance(data, str) and data in _NOT_FINITE):
        _refuse("a time of the years 1 to 9999")
    return data


def _refuse(expected: str) -> NoReturn:
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError("expected", "{expected}", {"expected": expected})  # noqa: EM101 - its kind, as of pydantic's own


def _problem(errors: Sequence[ErrorDetails], data: Any, where: str, name: str) -> str:
    """The first error in words. A union has one for each of its members, and may be any of them."""
    *steps, last = errors[0]["loc"] or ("",)
    if errors[0]["type"] == "missing":
        owner = _place(steps, data, where)[0]
        return f"`{owner}.{last}` is missing" if owner else f"`{last}` is missing"
    place, given = _place(errors[0]["loc"], data, where)
    if errors[0]["type"] == "value_error":  # what a record itself refuses, such as a policy that contradicts itself
        return f"`{place or name}`: {errors[0].get('ctx', {})['error']}"
    here = [each for each in errors if _place(each["loc"], data, where)[0] == place]
    ours = [each for each in here if each["type"] == "expected"]
    expected = " or ".join(dict.fromkeys(_EXPECTED.get(each["type"], each["msg"]) for each in ours or here))
    try:
        shown = without_secrets(repr(given))  # before it is cut, after which a secret may not look like one
    except (RecursionError, ValueError):  # too deep, or more digits than Python writes
        shown = reprlib.repr(given)
    shown = shown if len(shown) <= _LETTERS else f"{shown[:_LETTERS]}..."
    return f"`{place}` is {shown}, expected {expected}" if place else f"{shown} is not {expected}"


def _place(steps: Sequence[int | str], data: Any, where: str) -> tuple[str, Any]:
    """The path of an error and what is there. Steps that the data does not have are names of a union's members."""
    for step in steps:
        if isinstance(data, list | tuple) and isinstance(step, int):
            where, data = f"{where}[{step}]", data[step]
        elif isinstance(data, Mapping) and step in data:
            where, data = f"{where}.{step}" if where else str(step), data[step]
    return where, data


_A_PLAN = (
    "Expected a whole plan, as jaxmem plan saves it in a file that ends in .json, or the text of plan.to_json() in one"
)
_SHOWN_FIELDS = 3


def read_plan(path: Path) -> PlanRecord:
    """The plan in a file.

    Raises:
        RunFileError: nothing there, or no plan; the message states what it is instead, as far as that shows.
    """
    if str(path).lstrip().startswith("{"):
        msg = f"A plan is read by the path of its file, and this is a text. {_A_PLAN}. Is it that text? Save it first."
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
        return f"cannot be read: {error.strerror or error}. {_A_PLAN}"
    if path.suffix in (".yaml", ".yml"):
        return f"is a preset, for jm.load_preset: it has the policy of a plan and none of its figures. {_A_PLAN}"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return f"is no JSON: {error}. {_A_PLAN}"
    return f"is no plan: {error}. {_A_PLAN}; make one of another version of jaxmem_callbacks again with this one"
