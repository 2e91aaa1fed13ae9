"""Presets composed of parts from left to right, and written back as YAML."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxmem_callbacks.config.documents import (
    Document,
    KeyPath,
    Place,
    Problem,
    is_path,
    parse_document,
    plain_value,
    preset_error,
    read_text,
    require_shipped,
    shipped_names,
)
from jaxmem_callbacks.config.schema import SECTIONS, check, full_key, short_key
from jaxmem_callbacks.records.errors import EnvironmentSettingError, PolicyError, PresetError
from jaxmem_callbacks.records.policies import CompilerOptions, StepPolicy
from jaxmem_callbacks.records.presets import EnvironmentSettings, MonitorSettings, Preset, RecoverySettings

DEFAULT = "monitor_only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The content of one source, checked.

    Attributes:
        name: The shipped name or the file's stem; empty for overrides.
        values: Section -> field -> value, and the description; only what was given.
        keys: Where each key stands.
        source: What was given to ``load_preset``; empty for overrides and texts.
    """

    name: str
    values: Mapping[str, Any]
    keys: Mapping[KeyPath, Place]
    source: str = ""


def load_preset(*names_or_paths: str | os.PathLike[str], **overrides: Any) -> Preset:
    """Load and compose presets.

    Args:
        *names_or_paths: Shipped names (``"full_remat"``) or YAML files (a ``Path``, or text that ends in ``.yaml`` or has a
            path separator). Without any: ``monitor_only``.
        **overrides: ``policy={...}``, ``monitor={...}``, ``environment={...}``, ``recovery={...}`` and
            ``description="..."`` with the keys of the YAML; they win over every part.

    Returns:
        The parts together; lists are replaced, not joined.

    Raises:
        PresetError: every mistake of the sources, each with file, line, column, what was expected and the nearest valid name.

    Example:
        >>> load_preset("donate", "full_remat", policy={"segments": 4}).policy.segments
        4
    """
    parts = [_load_part(name) for name in names_or_paths or (DEFAULT,)]
    if overrides:
        parts.append(_override_part(overrides))
    return compose(parts)


def list_presets() -> tuple[str, ...]:
    """Names of the shipped parts, sorted; ``load_preset`` takes them."""
    return shipped_names()


def parse_preset(text: str, source: str = "text") -> Preset:
    """One preset from YAML text, such as a plan's; ``source`` names it in errors.

    Raises:
        PresetError: as ``load_preset``.
    """
    return compose([_text_part(text, source, name=Path(source).stem)])


def compose(parts: list[Part]) -> Preset:
    """The parts as one preset; a contradiction between them is reported with the place of every key of its section.

    Raises:
        PresetError: the composed policy or environment contradicts itself.
    """
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for part in parts:
        for section, values in merged.items():
            values.update(part.values.get(section, {}))
    try:
        policy = StepPolicy(**merged["policy"])
    except PolicyError as error:
        raise _contradiction(parts, "policy", error) from None
    try:
        environment = EnvironmentSettings(**merged["environment"])
    except EnvironmentSettingError as error:
        raise _contradiction(parts, "environment", error) from None
    described = [part.values["description"].strip() for part in parts if part.values.get("description")]
    if parts[-1].name == "" and "description" in parts[-1].values:
        described = [parts[-1].values["description"]]
    return Preset(
        name="+".join(part.name for part in parts if part.name),
        description=" ".join(described),
        policy=policy,
        monitor=MonitorSettings(**merged["monitor"]),
        environment=environment,
        recovery=RecoverySettings(**merged["recovery"]),
        said=tuple(f"{section}.{key}" for section in SECTIONS for key in sorted(merged[section])),
        sources=tuple(part.source for part in parts if part.source),
    )


def _load_part(name_or_path: Any) -> Part:
    if not isinstance(name_or_path, str | os.PathLike) or isinstance(os.fspath(name_or_path), bytes):
        given = f"a preset is named by {type(name_or_path).__name__}."
        expected = "Expected: a shipped name, a path, or policy={...}, monitor={...} and environment={...} as keyword arguments."
        raise preset_error([Problem(place=Place(source="load_preset"), given=given, expected=expected)])
    path = os.fspath(name_or_path)
    is_name = isinstance(name_or_path, str) and not is_path(path)
    part = _shipped_part(path) if is_name else _text_part(read_text(path), path, name=Path(path).stem)
    return replace(part, source=path)


def _shipped_part(name: str) -> Part:
    file = require_shipped(name)
    return _text_part(read_text(str(file)), file.name, name=name)


def _text_part(text: str, source: str, name: str) -> Part:
    document = parse_document(text, source)
    return _checked(document, name, Place(source=source))


def _override_part(overrides: Mapping[str, Any]) -> Part:
    for key in overrides:
        section, _, field = key.partition("__")
        if field and section in SECTIONS:
            place = Place(source=f"override {key}")
            given, expected = "a joined name.", f"Expected: load_preset(..., {section}={{{field!r}: ...}})."
            raise preset_error([Problem(place=place, given=given, expected=expected)])
    values: Any = _plain_data(overrides)
    keys: dict[KeyPath, Place] = {(key,): Place(source=f"override {key}") for key in values}
    for section, inner in values.items():
        if isinstance(inner, dict):
            keys |= {(section, key): Place(source=f"override {section}.{key}") for key in inner}
    return _checked(Document(values=values, keys=keys), "", Place(source="overrides"))


def _plain_data(value: Any) -> Any:
    """Mappings as dict with text keys and lists as tuple, as YAML would give them."""
    if isinstance(value, Mapping):
        return {str(key): _plain_data(inner) for key, inner in value.items()}
    return tuple(map(_plain_data, value)) if isinstance(value, list | tuple) else value


def _checked(document: Document, name: str, whole: Place) -> Part:
    """Full field names, then the schema; raises everything that is wrong with this source at once."""
    problems = list(document.problems)
    values = {
        section: _with_full_keys(section, inner, document, problems) for section, inner in document.values.items()
    }

    def place_of(path: KeyPath, kind: str) -> Place:
        at_key = document.keys.get(path, whole)
        return at_key if kind == "key" else document.places.get(path, at_key)

    cleaned, found = check(values, place_of)
    if problems or found:
        raise preset_error([*problems, *found])
    return Part(name=name, values=cleaned, keys=document.keys)


def _with_full_keys(section: str, inner: Any, document: Document, problems: list[Problem]) -> Any:
    """``limit`` as ``limit_bytes``, with its place; both at once are a problem."""
    if section not in SECTIONS or not isinstance(inner, dict):
        return inner
    full: dict[str, Any] = {}
    for key, value in inner.items():
        name = full_key(section, key)
        for places in (document.keys, document.places):
            if (section, key) in places:
                places.setdefault((section, name), places[section, key])
        if name in full:
            given = f"`{section}.{short_key(name)}` is given twice, also spelled `{name}`."
            expected = f"Expected: `{short_key(name)}` once. Delete one of the two lines."
            problems.append(Problem(place=document.keys[section, key], given=given, expected=expected))
        full[name] = value
    return full


def _contradiction(parts: list[Part], section: str, error: PolicyError | EnvironmentSettingError) -> PresetError:
    """A section that contradicts itself, at the place where each key was given last."""
    last: dict[str, Place] = {}
    for part in parts:
        last |= {key: part.keys[section, key] for key in part.values.get(section, {}) if (section, key) in part.keys}
    where = ", ".join(f"`{key}` at {place}" for key, place in last.items())
    place = list(last.values())[-1]
    return preset_error(
        [Problem(place=place, given=f"this {section} is refused. {error}", expected=f"Given here: {where}.")]
    )


_WIDTH = 76
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class _Dumper(yaml.SafeDumper):
    """Quotes also the texts that only YAML 1.2 takes for numbers, such as ``1e3``, and escapes what is not printable."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(plain_value(text), str) else "'"
    style = style if text.isprintable() else '"'  # only double quotes escape; PyYAML 6.0 writes a plain NEL as a space
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def preset_to_yaml(preset: Preset, *, defaults: Literal["omit", "show"] = "omit") -> str:
    """Write a preset as a YAML part.

    Args:
        preset: Its name is not written: a file's name is its preset's name.
        defaults: ``omit`` writes the keys that were given or that differ from the defaults; ``show`` writes all and marks
            the defaults by a comment.

    Returns:
        YAML; ``parse_preset`` gives the same description, policy and settings.
    """
    lines = [f"description: {_paragraph(preset.description)}"] if preset.description else []
    for section in SECTIONS:
        record = getattr(preset, section)
        written = [
            line
            for field in dataclasses.fields(SECTIONS[section])
            if (line := _line(preset, section, record, field, defaults))
        ]
        lines += [f"{section}:", *written] if written else []
    return "\n".join(lines or ["{}"]) + "\n"


def _line(preset: Preset, section: str, record: Any, field: dataclasses.Field[Any], defaults: str) -> str:
    value = getattr(record, field.name)
    is_given = f"{section}.{field.name}" in preset.said or value != field.default
    if not is_given and defaults == "omit":
        return ""
    text = _size(value) if field.name.endswith("_bytes") else _inline(value)
    return f"  {short_key(field.name)}: {text}" + ("" if is_given else "  # default")


def _size(count: int | None) -> str:
    """The largest unit that expresses it exactly."""
    for unit, factor in _UNITS:
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return _inline(count)


def _paragraph(text: str) -> str:
    """A description as a folded block where that is exact, else on one line."""
    if text.isprintable() and " ".join(text.split()) == text:
        lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
        return "\n  ".join([">-", *lines])
    return _inline(text)


def _inline(value: Any) -> str:
    """One value on one line, quoted where YAML 1.1 or 1.2 would read it as something else."""
    plain = value.written if isinstance(value, CompilerOptions) else list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
