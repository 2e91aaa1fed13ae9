"""The form of one rule about failure texts: a wording enters, the facts that it states leave. No rule is told here.

A space in a wording stands for any run of white space, since logs and documents break lines where they like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jaxmem_callbacks.records.oom import OomPlatform, Phase
from jaxmem_callbacks.recovery.texts.needles import needles

# A size as XLA prints it: `123`, `1.5GiB`, `21.90G`, `176.00MiB`, `12 bytes`, `16.0 TiB`. Named by the field it belongs to.
# Others write `1,073,741,824` and `1.5e10`. A number is taken whole, so that none is read in part that `size_of` does not know.
_NUMBER = r"(?>\d{1,40}(?:[.,_']\d{1,40}){0,8}(?:[eE][+-]?\d{1,3}\b)?)"
# A letter alone is no unit at the next line's beginning, where logs write their level (`E`).
_UNIT = r"(?:\s{0,40}(?:[kKMGTPE]i?B|[Bb]ytes?|B)\b|[\x20\t]{0,40}[kKMGTPE]\b)?"
_SIZES = ("requested", "free", "largest", "compacted", "limit", "used", "pool")
_PLACEHOLDER = re.compile(r"(?<!\?P)<(" + "|".join(_SIZES) + r")(_exact)?>")
_SIZE = re.compile(rf"(?P<number>{_NUMBER})\s{{0,40}}(?P<unit>[kKMGTPE])?")
_KNOWN = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?:_\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_POWERS = {unit: 1024**power for power, unit in enumerate("KMGTPE", start=1)}

Strength = Literal["status", "log", "hint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One wording of one source.

    Attributes:
        name: What the wording is, in a word or two.
        pattern: Where it is found; groups named after fields carry sizes and names.
        phase: What the wording alone says of the phase.
        platform: Whose memory it is about.
        strength: ``status`` is the error that a program meets, ``log`` a line beside it, ``hint`` one that a program may
            survive. The failing status speaks first.
        unless: What must not follow within a sentence or two: words after which the program goes on.
        over: Whether the use that it states must reach the stated limit, since the same words also tell of programs that fit.
        vague: Whether the wording only says that memory ran out, so that any other wording at the same place tells more.
        driver: Whether it is a GPU's driver that refuses in these words.
        needles: Words one of which stands in every match; empty where none is known.
    """

    name: str
    pattern: re.Pattern[str]
    phase: Phase | None = None
    platform: OomPlatform | None = None
    strength: Strength = "status"
    unless: re.Pattern[str] | None = None
    over: bool = False
    vague: bool = False
    driver: bool = False
    needles: tuple[str, ...] = ()


def rule(  # noqa: PLR0913 - a row of a table, with its fields by name
    name: str,
    wording: str,
    *,
    phase: Phase | None = None,
    platform: OomPlatform | None = None,
    strength: Strength = "status",
    unless: str | None = None,
    over: bool = False,
    vague: bool = False,
    driver: bool = False,
) -> Rule:
    """A rule of a wording, in which ``<requested>`` and its like stand for sizes and a space for any white space."""
    return Rule(
        name=name,
        pattern=wording_pattern(wording),
        phase=phase,
        platform=platform,
        strength=strength,
        unless=None if unless is None else wording_pattern(unless),
        over=over,
        vague=vague,
        driver=driver,
        needles=needles(wording),
    )


def wording_pattern(wording: str) -> re.Pattern[str]:
    """The compiled form of a wording.

    No repetition in it holds another that can match the same, and every gap is bounded, so that it is found or given up in time
    that grows with the text alone.
    """
    sized = _PLACEHOLDER.sub(lambda found: f"(?P<{found[1]}{found[2] or ''}>{_NUMBER}{_UNIT})", wording)
    return re.compile(sized.replace(" ", r"\s+"), re.DOTALL)


def size_of(text: str) -> int | None:
    """Bytes of a printed size; its letters are powers of 1024. None for a number that is none, or beyond all memory."""
    found = _SIZE.match(text)
    if found is None or not _KNOWN.fullmatch(found["number"]):
        return None
    number, power = found["number"].replace(",", ""), _POWERS.get((found["unit"] or "").upper(), 1)
    size = int(number) * power if number.isdecimal() else float(number) * power
    return round(size) if size < 2**63 else None
