"""``--search KEY=VALUE`` as typed enters; the mapping that `jm.plan` takes as ``search`` leaves. Nothing is judged here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def add_search_argument(parser: argparse.ArgumentParser) -> None:
    """The option, which may be given several times."""
    parser.add_argument(
        "--search",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="what else may be varied: microbatches=2,4  sharding=zero1,fsdp  donate  offload  batch=largest  "
        "batch.multiple_of=8  batch.at_most=512  remat=no; a key alone means all of it; may be given several times",
    )


def search_of(texts: Sequence[str]) -> dict[str, Any] | None:
    """What the options say together; None where there are none.

    Args:
        texts: Such as ``["microbatches=1,2,4", "donate", "batch.at_most=512"]``.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        outer, _, inner = key.strip().partition(".")
        if inner:
            before = found.get(outer)
            found[outer] = (before if isinstance(before, dict) else {}) | {inner: _value(value)}
        elif not isinstance(found.get(outer), dict):
            found[outer] = _value(value) if value else True
    return found or None


def _value(text: str) -> Any:
    """One value, or several with commas between: numbers and switches as such."""
    parts = [part.strip() for part in text.split(",")]
    values = [int(part) if re.fullmatch(r"-?\d+", part) else _WORDS.get(part.lower(), part) for part in parts]
    return values[0] if len(values) == 1 else values
