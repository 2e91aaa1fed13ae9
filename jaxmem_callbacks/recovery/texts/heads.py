"""What most lines beside each other begin with is no part of what they say: lines enter, the same without that leave.

Launchers, containers, clocks and loggers each write a form of their own. No form is known here: a head is what ends in a mark,
such as `:` or `]`, and stands before most lines of the neighbourhood, whatever its numbers are. Where it opens a JSON string,
what closes the object goes with it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

_BLOCK = 32  # lines that are neighbours, with those of the block before and behind
_LEAST, _SHARE = 2, 0.6
_DEEPEST = 5
_MARK = re.compile(
    r"[^\n]{0,100}?(?:[^\s|]\s{0,20}\|[ \t]|[\]:)\u203a>](?:[ \t]|(?<=:)(?![\d:/\s]))|(?<=\S[ \t])-[ \t])"
)
# Two names, of a pod and its container, and a clock.
_POD = re.compile(r"\s{0,8}(?=[^\s-]{1,60}-)[\w./-]{3,80}[ ][\w./-]{1,60}[ ](?:\d{4}-\d\d-\d\dT[\d:.]{8,20}Z?[ ])?")
_JSON = re.compile(r"\s{0,8}\{[^\n]{0,300}?\"(?:msg|message|MESSAGE|log|text|line)\"\s{0,4}:\s{0,4}\"")
_JSON_END = re.compile(
    r"\"(?:\s{0,4},\s{0,4}\"[\w.@-]{1,40}\"\s{0,4}:\s{0,4}(?:\"[^\"\n]{0,80}\"|[\w.+-]{1,40})){0,8}\s{0,4}\}{1,3}\s*\Z"
)
_LONGEST_END = 400
# Numbers, levels and the letter that stands for one differ from line to line.
_DIFFERS = re.compile(r"\d+|\b[IWEFD](?=\d{4}\s)|\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|FATAL|CRITICAL)\b")
_TELLING = (
    *(
        "ut of ",
        "OUT_OF",
        "xhausted",
        "EXHAUSTED",
        "OOM",
        "oom",
        "xceed",
        "MemoryError",
        "Attempting to ",
        "InUse:",
        "Size:",
    ),
    *("led to alloc", "nable to alloc", "not alloc", "bad_alloc", "MemoryAlloc", "OutOfM", "ALLOC_F", "illed"),
)
# Words of a failure are what is said, however often.
_SAID = re.compile(r"[Mm]emory|MEMORY|xhaust|EXHAUST|OOM|[Oo]om\b|Error\b|[Kk]ill|xceed|alloc|ALLOC|InUse|Limit|Size")


def without_heads(lines: Iterable[str]) -> Iterator[str]:
    """The lines without what they share at their heads, a block at a time. A line's head depends on its neighbours alone.

    Args:
        lines: Lines with their ends.
    """
    numbered = iter(lines)
    blocks = iter(lambda: list(itertools.islice(numbered, _BLOCK)), [])
    before, here = _Block([]), _Block(next(blocks, []))
    while here.lines:
        behind = _Block(next(blocks, []))
        heads = set[str]().union(*(block.heads for block in (before, here, behind) if block.tells or here.tells))
        yield "".join(_without(line, heads) for line in here.lines) if heads else here.text
        before, here = here, behind


class _Block:
    """Lines beside each other; where they tell of no failure, heads stand in nobody's way."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.text = lines, "".join(lines)
        self.tells = any(words in self.text for words in _TELLING)

    @functools.cached_property
    def heads(self) -> set[str]:
        """The forms of heads that most of the lines have."""
        return _shared(self.lines)


def _shared(lines: list[str]) -> set[str]:
    """The forms of heads that most of the lines have, each with what stands before it."""
    most = max(_LEAST, _SHARE * sum(not line.isspace() for line in lines))
    places, found = [(line, "", 0) for line in lines], set[str]()
    for _ in range(_DEEPEST):
        places = [(line, *more) for line, form, end in places if (more := _longer(line, form, end)) is not None]
        counts = collections.Counter(form for _, form, _ in places)
        common = {form for form, count in counts.items() if count >= most}
        if not common:
            break
        found |= common
        places = [place for place in places if place[1] in common]
    return found


def _longer(line: str, form: str, end: int) -> tuple[str, int] | None:
    """The form and the end of a head with one more mark."""
    found = None if end else _JSON.match(line) or _POD.match(line)
    found = found or _MARK.match(line, end)
    if found is None or _SAID.search(found[0]):
        return None
    return form + _DIFFERS.sub("0", found[0]), found.end()


def _without(line: str, heads: set[str]) -> str:
    form, end = "", 0
    for _ in range(_DEEPEST):
        more = _longer(line, form, end)
        if more is None or more[0] not in heads:
            break
        form, end = more
    if not end or not form.endswith('"'):
        return line[end:]
    low = max(end, len(line) - _LONGEST_END)
    closing = _JSON_END.search(line, low)
    return line[end:] if closing is None else line[end : closing.start()] + "\n" * line.endswith("\n")
