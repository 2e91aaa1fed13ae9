"""Finds the shipped YAML parts: inside an installed wheel, or in ``configs/`` of a source checkout."""

from __future__ import annotations

import os
from pathlib import Path

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PresetError, did_you_mean

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
        PresetError: there is none of that name; says which there are.
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
