"""The error of an absent target's compiler in, what it says about memory out: needed and available bytes."""

from __future__ import annotations

import re

from jaxmem_callbacks.records.errors import CompileError

_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required[^(]*\({_SIZE}\) exceeds available[^(]*\({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE),
)
_TEXT_LIMIT = 3000


def refused_for_memory(title: str, error: str, remark: str = "") -> tuple[int | None, int | None]:
    """Bytes that the program needs and that there are, where a compiler refused it for its memory.

    Args:
        title: What was compiled for which target.
        error: The compiler's own words.
        remark: What may be wrong with the compiler itself, for an error of another kind.

    Returns:
        Needed and available bytes; None for what the text does not say.

    Raises:
        CompileError: it is an error of another kind.
    """
    if "RESOURCE_EXHAUSTED" not in error:
        advice = (
            "Expected operations and options that it takes without a device. Find in its words below which one it does not, and "
            "leave it out or replace it: docs/targets.md, 'What cannot be compiled for an absent device', tells by what."
        )
        msg = f"{title}: the compiler refused the program. {remark}{'. ' if remark else ''}{advice}\n{error[:_TEXT_LIMIT]}"
        raise CompileError(msg)
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(error):
            return _bytes(match[1], match[2]), _bytes(match[3], match[4])
    return None, None


def _bytes(number: str, letter: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(letter.upper() or " "))
