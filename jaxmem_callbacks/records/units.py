"""Bytes and shares of work as people write and read them.

Inside the library a size is an int and a share a float; only this file turns them into text or back.
"""

from __future__ import annotations

import numbers
import re

_FACTORS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

GIB = 2**30
MIB = 2**20
KIB = 2**10


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, NumPy's included, and no switch."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def parse_bytes(text: int | str, *, unit_needed: bool = False) -> int:
    """Bytes written as ``72GiB``, ``1.5 GB``, ``4096 B`` or a plain int.

    Binary (KiB, MiB, GiB, TiB) and decimal (kB, MB, GB, TB) units differ by the ``i``.

    Args:
        text: The size.
        unit_needed: Whether text without a unit is refused, where it may as well mean GiB or a share.

    Raises:
        ValueError: negative, no number, or a unit that is not in the table; the message shows one that is.
    """
    if is_whole(text):
        size = int(text)
        if size < 0:
            msg = f"A size is not negative: got {size}. Expected bytes as an int, or text such as '72GiB'."
            raise ValueError(msg)
        return size
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    units = {name.lower(): factor for name, factor in _FACTORS.items()}
    if match is None or (match[2] or "B").lower() not in units:
        known = ", ".join(_FACTORS)
        msg = f"Not a size: {text!r}. Expected a number with one of {known}, for example '72GiB' or '512MiB'."
        raise ValueError(msg)
    if unit_needed and not match[2]:
        msg = f"The size {text!r} has no unit. Type '{match[1]}GiB', or '{match[1]}B' for bytes."
        raise ValueError(msg)
    return round(float(match[1]) * units[(match[2] or "B").lower()])


def format_bytes(count: int | None) -> str:
    """``1536`` as ``1.5 KiB``; None as ``unknown``. Binary units, at most one decimal under 100."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:  # noqa: PLR2004 - the base of the binary units
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"  # noqa: PLR2004
        size /= 1024
    return f"{size:.1f} TiB"


def format_extra(share: float, *, signed: bool = True) -> str:
    """Extra work as a share of what is done anyway: ``+9.8%``. What is more than nothing never reads as nothing: ``+<0.1%``."""
    text = f"{share:+.1%}" if signed else f"{share:.1%}"
    return text.replace("0.0", "<0.1") if share > 0 and text.lstrip("+") == "0.0%" else text
