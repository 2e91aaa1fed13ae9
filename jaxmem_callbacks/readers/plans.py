"""A plan's own JSON enters, made by any process; its record leaves, with all that a run is compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.terminal import read_json

_EXPECTED = (
    "Expected a whole plan, as jaxmem plan saves it in a file that ends in .json, or the text of plan.to_json() in one"
)
_SHOWN = 3


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
        more = " and more" if len(fields) > _SHOWN else ""
        msg = f"it has no `candidates`, but {', '.join(f'`{name}`' for name in list(fields)[:_SHOWN])}{more}"
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
