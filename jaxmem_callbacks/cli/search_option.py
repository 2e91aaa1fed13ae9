"""``--search KEY=VALUE`` as typed enters; the mapping that `jm.plan` takes as ``search`` leaves, or what to type in a shell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from jaxmem_callbacks.planning.request import SHARDINGS, parse_search
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PlanError, did_you_mean

# Key -> what a shell says after it, and an example.
EXPECTED = {
    "remat": ("yes or no", "remat=no"),
    "own_checkpoints": ("the key alone, yes or no", "own_checkpoints"),
    "offload": ("the key alone, yes or no", "offload"),
    "microbatches": (
        "whole numbers of at least 1 with commas between, or the key alone for every power of two that divides the rows",
        "microbatches=2,4",
    ),
    "donate": ("the key alone, yes or no", "donate"),
    "sharding": (
        f"some of {', '.join(SHARDINGS)} with commas between, or the key alone for all",
        "sharding=zero1,fsdp",
    ),
    "batch": (
        "batch=largest, or batch.multiple_of and batch.at_most as whole numbers of at least 1, or batch.argnames as names",
        "batch.at_most=512",
    ),
}
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def add_search_argument(parser: argparse.ArgumentParser) -> None:
    """The option, which may be given several times."""
    parser.add_argument(
        "--search",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="what else may be varied: microbatches=2,4  sharding=zero1,fsdp  donate  offload  own_checkpoints  batch=largest  "
        "batch.multiple_of=8  batch.at_most=512  remat=no; a key alone means all of it; may be given several times",
    )


def search_of(texts: Sequence[str]) -> dict[str, Any] | None:
    """What the options say together; None where there are none.

    Args:
        texts: Such as ``["microbatches=1,2,4", "donate", "batch.at_most=512"]``.

    Raises:
        PlanError: a key or a value that `jm.plan` would refuse, in a shell's words.
    """
    for text in texts:
        _require_meant(text)
    found = _read(texts)
    if found.get("offload") is True and found.get("remat") is False:
        msg = (
            "Offload without remat: what is moved into host memory is what remat stores, so there is nothing to move. Take "
            "remat=no out of what is searched."
        )
        raise PlanError(msg)
    batch = found.get("batch")
    least = batch.get("multiple_of", 1) if isinstance(batch, dict) else 1
    if isinstance(batch, dict) and "at_most" in batch and batch["at_most"] < least:
        msg = (
            f"batch.at_most={batch['at_most']} is below batch.multiple_of={least}, so no batch is left. Type "
            f"{advise('option.typed', option='search', value=f'batch.at_most={least}')}, or more."
        )
        raise PlanError(msg)
    return found or None


def _require_meant(text: str) -> None:
    """Refuse one option that means nothing.

    Raises:
        PlanError: says what was expected there, and what to type.
    """
    try:
        parse_search(_read([text]))
    except PlanError:
        key, typed = text.partition("=")[0].partition(".")[0].strip(), "--search " + text
        if key in EXPECTED:
            expected, example = EXPECTED[key]
            words = text.partition("=")[2].split(",") if key == "sharding" else []
            near = did_you_mean(next((word for word in words if word not in SHARDINGS), ""), SHARDINGS)
            msg = f"{typed}: expected {expected}.{near} Type {advise('option.typed', option='search', value=example)}."
        else:
            msg = (
                f"{typed}: there is no key {key!r}.{did_you_mean(key, EXPECTED)} Expected one of: "
                f"{', '.join(EXPECTED)}. Type for example "
                f"{advise('option.typed', option='search', value='batch.at_most=512')}."
            )
        raise PlanError(msg) from None


def _read(texts: Sequence[str]) -> dict[str, Any]:
    """The mapping that options say together; nothing is judged here."""
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        outer, _, inner = key.strip().partition(".")
        if inner:
            before = found.get(outer)
            found[outer] = (before if isinstance(before, dict) else {}) | {inner: _value(value)}
        elif not isinstance(found.get(outer), dict):
            found[outer] = _value(value) if value else True
    return found


def _value(text: str) -> Any:
    """One value, or several with commas between: numbers and switches as such."""
    parts = [part.strip() for part in text.split(",")]
    values = [int(part) if re.fullmatch(r"-?[0-9]+", part) else _WORDS.get(part.lower(), part) for part in parts]
    return values[0] if len(values) == 1 else values
