"""The JSON Schema of presets, for editors. ``python -m jaxmem_callbacks.config.json_schema`` rewrites the shipped file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem_callbacks.config.documents import SCHEMA_NAME, shipped_folder
from jaxmem_callbacks.config.schema import PresetFile, short_key
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.terminal import put


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
