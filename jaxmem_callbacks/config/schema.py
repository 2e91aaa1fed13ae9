"""The schema of presets: pydantic models derived from the records. Data in, checked data or problems out.

Keys are the fields of ``StepPolicy``, ``MonitorSettings``, ``EnvironmentSettings`` and ``RecoverySettings``. A size is written
``limit: 700MiB``: the ending ``_bytes`` of the record's name may be left out, because the value carries its unit.
``python -m jaxmem_callbacks.config.schema`` rewrites the shipped JSON Schema, which editors read.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from jaxmem_callbacks.config.documents import SCHEMA_NAME, KeyPath, Place, Problem, describe, shipped_folder, shorten
from jaxmem_callbacks.records.errors import did_you_mean
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.policies import (
    MAXTEXT_REMAT,
    PLATFORMS,
    REMAT_SYNONYMS,
    SHARDING_SYNONYMS,
    StepPolicy,
    canonical_chunks,
    canonical_remat,
    canonical_sharding,
    compiler_options_from,
)
from jaxmem_callbacks.records.presets import (
    LEAST_GROWTH_STEPS,
    EnvironmentSettings,
    MonitorSettings,
    RecoverySettings,
    Rung,
)
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.records.units import KIB, MIB, parse_bytes

SECTIONS: dict[str, type] = {
    "policy": StepPolicy,
    "monitor": MonitorSettings,
    "environment": EnvironmentSettings,
    "recovery": RecoverySettings,
}
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_SHOWN = 60
_SIZE_TEXT = r"^\s*[0-9]+(\.[0-9]+)?\s*(([KkMmGgTtPp][iI]?)?[Bb])?\s*$"

# What the records' types cannot express: the allowed range, and the same in words.
RANGES: dict[str, tuple[Any, str]] = {
    "policy.microbatches": (Field(ge=1), " of at least 1"),
    "policy.keep": (Field(ge=0, le=1), " from 0 to 1"),
    "monitor.every_steps": (Field(ge=1), " of at least 1"),
    "monitor.window_s": (Field(gt=0), " of seconds above 0"),
    "monitor.scan_s": (Field(gt=0), " of seconds above 0"),
    "monitor.host_s": (Field(gt=0), " of seconds above 0"),
    "monitor.driver_s": (Field(gt=0), " of seconds above 0"),
    "monitor.heap_map_s": (Field(gt=0), " of seconds above 0"),
    "monitor.figure_s": (Field(gt=0), " of seconds above 0"),
    "monitor.processes_s": (Field(gt=0), " of seconds above 0"),
    "monitor.trace_steps": (Field(ge=0), " of at least 0"),
    "monitor.near_oom_headroom": (Field(ge=0, lt=1), " from 0 to below 1"),
    "monitor.near_oom_steps": (Field(ge=1), " of at least 1"),
    "monitor.near_oom_profiles": (Field(ge=0), " of at least 0"),
    "monitor.growth_steps": (Field(ge=LEAST_GROWTH_STEPS), f" of at least {LEAST_GROWTH_STEPS}"),
    "monitor.growth_min_arrays": (Field(ge=1), " of at least 1"),
    "monitor.imbalance_share": (Field(gt=0, le=1), " above 0 and up to 1"),
    "monitor.fragmentation_share": (Field(gt=0, le=1), " above 0 and up to 1"),
    "environment.fraction": (Field(gt=0, le=1), " above 0 and up to 1"),
    "recovery.every_steps": (Field(ge=1), " of at least 1"),
    "recovery.max_microbatches": (Field(ge=1), " of at least 1"),
    "recovery.agree_s": (Field(gt=0), " of seconds above 0"),
}


def _size(value: Any) -> int:
    """Bytes from an int, a whole float or text with a unit."""
    try:
        whole: Any = int(value) if isinstance(value, float) and value.is_integer() else value
        return parse_bytes(whole)
    except OverflowError:
        msg = "larger than any memory"
        raise ValueError(msg) from None


def _size_type(minimum: int, *, of: int = 1) -> Any:
    """The pydantic type of a size of at least ``minimum`` bytes that is a multiple of ``of``."""
    whole = {"type": "integer", "minimum": minimum} | ({"multipleOf": of} if of > 1 else {})
    schema = {"anyOf": [whole, {"type": "string", "pattern": _SIZE_TEXT}]}
    return Annotated[int, Field(ge=minimum, multiple_of=of), BeforeValidator(_size), WithJsonSchema(schema)]


_REMAT_WORDS = sorted(
    {word for name, synonyms in REMAT_SYNONYMS.items() for word in (name, *synonyms)}.union(MAXTEXT_REMAT)
)
_SHARDING_WORDS = sorted(word for name, synonyms in SHARDING_SYNONYMS.items() for word in (name, *synonyms))
_MESH_AXES: dict[str, Any] = {
    "anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}
_SHARDING_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": _SHARDING_WORDS},
        {"type": "object", "additionalProperties": _MESH_AXES, "minProperties": 1},
        {
            "type": "array",
            "items": {"type": "array", "prefixItems": [{"type": "string"}, _MESH_AXES], "minItems": 2, "maxItems": 2},
            "minItems": 1,
        },
    ]
}
_OPTIONS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"platform": {"type": "string", "enum": list(PLATFORMS)}, "jax": {"type": "string"}},
    "required": ["platform", "jax"],
    "additionalProperties": False,
    "patternProperties": {"^xla_": {"type": ["boolean", "number", "string"]}},
    "minProperties": 3,
}
_OPTIONS: Any = Annotated[
    Any, AfterValidator(lambda given: compiler_options_from(given).written), WithJsonSchema(_OPTIONS_SCHEMA)
]
_CHUNKS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "minProperties": 1},
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer", "minimum": 1}],
                "minItems": 2,
                "maxItems": 2,
            },
            "minItems": 1,
        },
    ]
}
_SEGMENTS: Any = Annotated[int, Field(ge=1)] | Literal["blocks"]
_SHARDING: Any = Annotated[Any, AfterValidator(canonical_sharding), WithJsonSchema(_SHARDING_SCHEMA)]
# Fields whose YAML form is not that of their Python type.
_TYPES: dict[str, Any] = {
    "policy.remat": Annotated[
        str, AfterValidator(canonical_remat), WithJsonSchema({"type": "string", "enum": _REMAT_WORDS})
    ],
    "policy.segments": _SEGMENTS | None,
    "policy.sharding": _SHARDING | None,
    "policy.compiler_options": _OPTIONS | None,
    "policy.chunks": Annotated[Any, AfterValidator(canonical_chunks), WithJsonSchema(_CHUNKS_SCHEMA)],
    "monitor.limit_bytes": _size_type(1) | None,
    "monitor.fragmentation_min_bytes": _size_type(0),
    "monitor.growth_min_bytes": _size_type(1),
    "monitor.replication_min_bytes": _size_type(1),
    "monitor.imbalance_min_bytes": _size_type(0),
    "monitor.jsonl_part_bytes": _size_type(KIB) | None,
    "environment.collective_pool_bytes": _size_type(MIB, of=MIB) | None,
    "recovery.buffer_bytes": _size_type(0),
}
_EXPECTED: dict[str, str] = {
    "description": "a text",
    "policy.remat": f"one of: {', '.join(sorted(REMAT_SYNONYMS))}",
    "policy.segments": "a whole number of at least 1, blocks, or null",
    "policy.chunks": "a whole number of at least 1, or numbers by scope such as {head: 16, mlp: 4}",
    "policy.sharding": f"one of: {', '.join(sorted(SHARDING_SYNONYMS))}; or rules such as {{embed: fsdp, mlp: tensor}}",
    "policy.compiler_options": (
        "options with the platform and the JAX line that they are for, such as "
        "{platform: gpu, jax: '0.12', xla_gpu_enable_latency_hiding_scheduler: false}, or null"
    ),
    "monitor.jsonl_part_bytes": "a size of at least 1KiB, such as 256MiB, or null",
    "environment.collective_pool_bytes": "a size in whole MiB, such as 512MiB, or null",
    "recovery.ladder": f"a list of some of: {', '.join(get_args(Rung))}",
    "policy.state_offload": "optimizer, or null",
    "policy.donate": "auto, a list of argument names such as [state], or [] for none",
}


def attribute_docs(record: type) -> dict[str, str]:
    """Field -> its words in the record's ``Attributes:`` section (empty under ``python -OO``)."""
    _, _, section = (record.__doc__ or "").partition("Attributes:\n")
    pairs = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in pairs}


def _section_model(section: str, record: type) -> type[BaseModel]:
    """The record as a strict pydantic model."""
    hints, docs = get_type_hints(record), attribute_docs(record)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        key = f"{section}.{field.name}"
        hint = _TYPES.get(key, hints[field.name])
        bounds = [RANGES[key][0]] if key in RANGES else []
        fields[field.name] = (Annotated[hint, *bounds, Field(description=docs.get(field.name))], field.default)
    make = cast("Callable[..., type[BaseModel]]", create_model)
    return make(section.capitalize(), __config__=_STRICT, **fields)


_MODELS = {section: _section_model(section, record) for section, record in SECTIONS.items()}
PresetFile: type[BaseModel] = cast("Callable[..., type[BaseModel]]", create_model)(
    "PresetFile",
    __config__=_STRICT,
    description=(Annotated[str, Field(description="What it does, when to use it, what it costs.")], ""),
    **{
        section: (
            Annotated[model, Field(description=(SECTIONS[section].__doc__ or "").split("\n")[0])],
            Field(default_factory=model),
        )
        for section, model in _MODELS.items()
    },
)


def short_key(name: str) -> str:
    """A field's name as YAML files write it: without ``_bytes``."""
    return name.removesuffix("_bytes")


def full_key(section: str, key: str) -> str:
    """The record's field for a key of a section; the key itself where there is none."""
    names = {short_key(field.name): field.name for field in dataclasses.fields(SECTIONS[section])}
    return names.get(key, key)


def check(values: Mapping[str, Any], place_of: Callable[[KeyPath, str], Place]) -> tuple[dict[str, Any], list[Problem]]:
    """Check the content of one source.

    Args:
        values: Section -> field (full names) -> value, lists as tuples.
        place_of: Where the ``"key"`` or the ``"value"`` of a key path stands, for the problems.

    Returns:
        The values with sizes as bytes and remat names canonical, only those that were given; and what is wrong with them
        (the values are then of no use).
    """
    try:
        return PresetFile.model_validate(dict(values)).model_dump(exclude_unset=True), []
    except ValidationError as error:
        found: dict[KeyPath, Problem] = {}
        for flaw in error.errors(include_url=False):
            path, value = _reached(values, flaw["loc"])
            kind = "key" if flaw["type"] == "extra_forbidden" else "value"
            found.setdefault(path, _problem(path, value, flaw, place_of(path, kind)))
        return {}, list(found.values())


def _reached(values: Any, loc: tuple[int | str, ...]) -> tuple[KeyPath, Any]:
    """The part of pydantic's location that exists in the data (it also names the members of unions), and its value."""
    path: list[int | str] = []
    for part in loc:
        is_key = isinstance(values, dict) and part in values
        if is_key or (isinstance(values, tuple) and isinstance(part, int)):
            values = cast("Any", values)[part]
            path.append(part)
    return tuple(path), values


def _problem(path: KeyPath, value: Any, flaw: Mapping[str, Any], place: Place) -> Problem:
    if flaw["type"] == "extra_forbidden":
        return _unknown_key(path, value, place)
    key = ".".join(str(part) for part in path if isinstance(part, str))
    dotted = short_key(key) + "".join(f"[{part}]" for part in path if isinstance(part, int))
    if key == "policy.remat" and isinstance(value, str):
        return Problem(place=place, given=f"`{key}`: {_first_sentences(flaw)}", expected=f"Expected: {expected(key)}.")
    given = f"`{dotted}` is {describe(value)}.{_suggestion(key, value)}"
    wanted = "a text" if isinstance(path[-1], int) else expected(key)
    return Problem(place=place, given=given, expected=f"Expected: {wanted}.")


def _first_sentences(flaw: Mapping[str, Any]) -> str:
    """A PolicyError's own words without its list of names, which is repeated sorted."""
    return str(flaw["ctx"]["error"]).partition(" Expected one of:")[0]


def _unknown_key(path: KeyPath, value: Any, place: Place) -> Problem:
    *parents, key = (str(part) for part in path)
    model = _MODELS[parents[0]] if parents else PresetFile
    allowed = sorted(short_key(name) for name in model.model_fields)
    inside = f" in `{parents[0]}`" if parents else ""
    homes = [section for section, inner in _MODELS.items() if full_key(section, key) in inner.model_fields]
    hint = (
        f" It belongs under `{homes[0]}`{_typed_there(homes[0], key, value, place)}."
        if homes
        else did_you_mean(key, allowed)
    )
    given = f"unknown key {shorten(key)}{inside}.{hint}"
    return Problem(place=place, given=given, expected=f"Allowed here: {', '.join(allowed)}.")


def _typed_there(section: str, key: str, value: Any, place: Place) -> str:
    """What to type for a keyword argument that is a section's key; nothing in a file, whose line is named."""
    if place.line is not None:
        return ""
    words = expected(f"{section}.{full_key(section, key)}")
    if isinstance(value, str) and words.startswith("one of: "):
        near = difflib.get_close_matches(value, re.findall(r"\w+", words.removeprefix("one of: ")), n=1, cutoff=0.5)
        value = near[0] if near else value
    shown = repr(value)
    return f": type {section}={{{key!r}: {shown if len(shown) <= _SHOWN else '...'}}}"


def _suggestion(key: str, value: Any) -> str:
    """What to type instead, where it can be guessed."""
    if key == "policy.remat" and isinstance(value, bool):
        return f" Write `{'full' if value else 'none'}`."
    if key in SECTIONS or not isinstance(value, str):
        return f" Delete the line or write `{key}: {{}}`." if key in SECTIONS and value is None else ""
    hint = expected(key)
    if hint.startswith("true or false") and value.lower() in {"yes", "on", "no", "off"}:
        return f" Write `{'true' if value.lower() in {'yes', 'on'} else 'false'}`."
    if value.strip().lower() == "auto" and "auto" in hint:
        return " Write `auto`."
    if "list" in hint and re.fullmatch(r"\w+", value):
        return f" Write `[{value}]`."
    return did_you_mean(value, re.findall(r"\w+", hint.removeprefix("one of: "))) if hint.startswith("one of") else ""


def expected(key: str) -> str:
    """The values a dotted key takes, in words."""
    section, _, name = key.partition(".")
    if not name and section in SECTIONS:
        return f"a mapping with keys from: {', '.join(sorted(map(short_key, _MODELS[section].model_fields)))}"
    if key in _EXPECTED:
        return _EXPECTED[key]
    hint = get_type_hints(SECTIONS[section])[name]
    words = _type_words(hint, is_size=name.endswith("_bytes")) + (RANGES[key][1] if key in RANGES else "")
    return f"{words}, or null" if type(None) in get_args(hint) else words


def _type_words(hint: Any, *, is_size: bool) -> str:
    if is_size:
        return "a size such as 700MiB or a whole number of bytes"
    inner = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is not Literal and len(inner) == 1:
        return _type_words(inner[0], is_size=False)
    if get_origin(hint) is Literal:
        return f"one of: {', '.join(sorted(get_args(hint)))}"
    plain = next((part for part in inner if part is int), hint)
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(plain, "a list of names such as [context, out_proj]")


def json_schema() -> dict[str, Any]:
    """The schema of one YAML part; both spellings of a size are allowed, ``limit`` and ``limit_bytes``."""
    schema = PresetFile.model_json_schema()
    for section in schema["$defs"].values():
        fields: dict[str, Any] = section["properties"]
        section["properties"] = {
            key: value | {"title": short_key(name)} for name, value in fields.items() for key in (short_key(name), name)
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "jaxmem_callbacks preset"}


def schema_text() -> str:
    """The schema as the shipped file has it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the schema to the file given, or to the shipped one.

    Returns:
        0.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    path = Path(given[0]) if given else shipped_folder() / SCHEMA_NAME
    write_file(path, schema_text())
    put(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
