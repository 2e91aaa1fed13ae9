"""A shape or an operation as a compiler prints it enters; as much as a row of a table has room for leaves."""

from __future__ import annotations

import re

_LAYOUT, _INDEX = re.compile(r"\{[^{}]*\}"), re.compile(r"/\*.*?\*/")
_LONGEST_TUPLE = 32


def short_shape(shape: str) -> str:
    """A shape without its layout; of a long tuple the number of its parts.

    Args:
        shape: Such as ``f32[256,64]{1,0}`` or ``(s32[], f32[8]{0})``.
    """
    plain = _INDEX.sub("", _LAYOUT.sub("", shape))
    if not plain.startswith("(") or len(plain) <= _LONGEST_TUPLE:
        return plain
    return f"(...) of {len(_split(plain[1:-1], ','))} parts"


def short_operation(operation: str, room: int) -> str:
    """An operation's first and last parts, as many as ``room`` letters hold, and at least one of each.

    Args:
        operation: Such as ``jit(step)/while/body/Block_3/exp``, which in 24 letters is ``jit(step)/.../Block_3/exp``. What
            has no parts, such as the path of an argument, stays whole: cut, it would name nothing.
        room: Letters in the row.
    """
    first, *rest = _split(operation, "/")
    if len(operation) <= room or len(rest) < 2:  # noqa: PLR2004 - nothing between the first and the last
        return operation
    shorter = ("/".join([first, "...", *rest[start:]]) for start in range(1, len(rest)))
    return next((text for text in shorter if len(text) <= room), f"{first}/.../{rest[-1]}")


def _split(text: str, mark: str) -> list[str]:
    """The text's parts between marks that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
