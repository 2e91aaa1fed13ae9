"""What every match of a wording holds: a wording enters, words leave, one of which stands in whatever it matches.

A text is searched for a word a hundred times faster than for a pattern, so that most rules are never tried on most texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:P<\w+>|[:>=!i]:?|<[=!]))?)|(?P<close>\))|(?P<either>\|)|(?P<other><\w+>|\[\^?\]?(?:\\.|[^\]\\])*\]|\\\w|[.^$\s])"
    r"|\\?(?P<letter>.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d*,?\d*\})\??")
_SURE = ("(", "(?:", "(?>")


def needles(wording: str) -> tuple[str, ...]:
    """The words, or none where a match need hold none that is known."""
    return _branches(_tokens(wording))[0]


def _tokens(wording: str) -> Iterator[tuple[str, str, str]]:
    """Kind, text and quantifier of each part."""
    place = 0
    while found := _TOKEN.match(wording, place):
        kind = found.lastgroup or ""
        place = found.end()
        often = None if kind in ("open", "either") else _QUANTIFIER.match(wording, place)
        place = place if often is None else often.end()
        yield kind, found[kind], "" if often is None else often[0]


def _branches(tokens: Iterator[tuple[str, str, str]]) -> tuple[tuple[str, ...], str]:
    """What one of several branches holds, up to the end or the bracket that closes them, and how often they may come."""
    branches, best, word, often = list[tuple[str, ...]](), (), "", ""
    for kind, text, often in tokens:
        optional = often[:1] in ("?", "*") or often.startswith(("{0", "{,"))
        if kind == "letter" and not optional:
            word += text
            if not often:
                continue
        best, word = _surest(best, word), ""
        if kind == "open":
            held, times = _branches(tokens)
            sure = (
                (text in _SURE or text.startswith("(?P<"))
                and times[:1] not in ("?", "*")
                and not times.startswith("{0")
            )
            best = _surest(best, *held) if sure else best
        elif kind == "either":
            branches.append(best)
            best = ()
        elif kind == "close":
            break
    branches.append(_surest(best, word) if word else best)
    return (tuple(each for branch in branches for each in branch) if all(branches) else ()), often


def _surest(best: tuple[str, ...], *others: str) -> tuple[str, ...]:
    """Of two sets of words the one whose shortest is longer."""
    held = tuple(other for other in others if other)
    return held if min(map(len, held), default=0) > min(map(len, best), default=0) else best
