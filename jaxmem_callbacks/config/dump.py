"""A Preset in, its YAML out: what it says, or with every default spelled out. ``parse_preset`` reads it back."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any, Literal

import yaml

from jaxmem_callbacks.config.documents import plain_value
from jaxmem_callbacks.config.schema import SECTIONS, short_key
from jaxmem_callbacks.records.presets import Preset

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
        defaults: ``omit`` writes the keys that were said or that differ from the defaults; ``show`` writes all and marks
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
    is_said = f"{section}.{field.name}" in preset.said or value != field.default
    if not is_said and defaults == "omit":
        return ""
    text = _size(value) if field.name.endswith("_bytes") else _inline(value)
    return f"  {short_key(field.name)}: {text}" + ("" if is_said else "  # default")


def _size(count: int | None) -> str:
    """The largest unit that says it exactly."""
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
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=2**20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
