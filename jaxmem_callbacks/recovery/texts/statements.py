"""Where a text says that memory ran out: a text enters, its statements leave, in the text's order, with what each states.

Rules are tried only near words that announce them, in windows of bounded length, so that a text of any size is read in time
that grows with its length.
"""

from __future__ import annotations

import bisect
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.texts import gpu, host, tpu
from jaxmem_callbacks.recovery.texts.prose import is_prose
from jaxmem_callbacks.recovery.texts.rule import Rule, size_of

RULES: tuple[Rule, ...] = (
    *gpu.STATUSES,
    *tpu.COMPILE,
    *tpu.RUN,
    *host.CPU,
    *host.HOST,
    *gpu.LINES,
    *gpu.FALLBACKS,
    *host.FALLBACKS,
)

# Every wording holds one of these, at most BEFORE characters after its beginning (a test tries each rule). Each begins with
# letters in one case, which Python searches for a hundred times faster than for one pattern of all of them.
_ANNOUNCING = tuple(
    re.compile(words)
    for words in (
        r"ut\s+of\s+(?:host\s+|device\s+)?memory",
        r"an\s+out\s+of\s+[mSVT]",
        r"OUT_OF_(?:(?:DEVICE_|HOST_)?MEMORY|RESOURCES|ME\+)",
        r"INSUFFICIENT_RESOURCES",
        r"llocation\s+still\s+failed",
        r"low\s+on\s+resource:",
        r"ut\s+Of\s+Memory",
        r"OutOfMemory",
        r"OOM\b",
        r"Oom\b",
        r"oom[-_](?:kill|reap)",
        r"iled\s+to\s+alloc",
        r"nable\s+to\s+alloc",
        r"ould\s+not\s+alloc",
        r"iled\s+to\s+(?:CUDA\s|malloc)",
        r"rrno\s+12\]",
        r"annot\s+allocate\s+memory",
        r"ou\s+tried\s+to\s+allocate",
        r"illed\s+process\s",
        r"ue\s+to\s+memory\s",
        r"error:\s+out\s+of\s",
        r"xceeded\s+\w{3,5}\s+capacity",
        r"OOMKilled",
        r"ALLOC(?:ATION)?_FAILED",
        r"AllocFailed",
        r"memory_error\b",
        r"alloc\s+of\s+size",
        r"emory\s+allocation\s+of",
        r"large\s+alloc\s",
        r"TERM_[MS]",
        r"xceed(?:s|ed)\s+job\s",
        r"limit\s+exceeded:",
        r"eyond\s+physical",
        r"exceeding\s+(?:physical\s+)?memory\s",
        r"container\s+oom\s",
        r"allocation\s+failed",
        r"Attempting\s+to\s+(?:alloc|reserve)",
        r"would\s+exceed",
        r"xceed(?:s|ed|ing)\s+(?:the\s+)?(?:avail|memory|limit|legit|total|scoped|(?:step|job)\s+mem)",
        r"PA\s+budget",
        r"sed\s+\d[\d.,]{0,20}\s{0,40}\w{0,5}\s+of\b",
        r"sing\s+\d[\d.,]{0,20}\s{0,40}\w{0,5}\s+of\b",
        r"bad_alloc",
        r"MemoryError",
        r"MemoryAllocation",
        r"rror\s+loading\s+program",
        r"rror\s+allocating",
        r"Scoped\s+allocation",
        r"instantiate\s+command",
        r"running\s+low\s+on\s+memory",
        r"unlikely\s+to\s+have\s+enough\s",
        r"Not\s+enough\s+memory\s+to\s",
        r"does\s+not\s+fit\s",
        r"igh-Smem\s",
        r"exceeds\s+[VSC]MEM\s",
        r"alternate\s+memory,\s",
        r"AllocationFailure\b",
    )
)
BEFORE, AFTER = 700, 3400
"""How far around an announcing word rules look: the longest instruction that libtpu prints between two of its sentences."""
_SENTENCE = 260
_WINDOW = 64_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One place of a text that says that memory ran out.

    Attributes:
        rule: Whose wording it is.
        start: Where it begins in the text.
        end: Where it ends.
        facts: What it states.
    """

    rule: Rule
    start: int
    end: int
    facts: OomFacts

    @property
    def rank(self) -> int:
        """How surely a program failed by these words, and how much they tell; 0 is a status with its own wording."""
        return 2 * _STRENGTHS.index(self.rule.strength) + self.rule.vague


_STRENGTHS = ("status", "log", "hint")


@dataclass(kw_only=True, slots=True)
class Budget:
    """How much of announced text is still read; what is beyond says the same again, or is made to cost time.

    Attributes:
        left: Characters.
    """

    left: int = 16 * 2**20


def statements(text: str, start: int = 0, end: int | None = None, *, budget: Budget | None = None) -> list[Statement]:
    """The statements of a text, in its order; of several about the same words, the first rule's.

    Args:
        text: All that is known.
        start: Statements begin here or later.
        end: And before here; None for the text's end.
        budget: What is still read, of several calls together; None for one that is this call's own.
    """
    budget = budget or Budget()
    taken = _Taken()
    for low, high in _windows(text, start, len(text) if end is None else end):
        if budget.left <= 0:
            break
        budget.left -= high - low
        reach = text[low : high + AFTER]
        for rule in RULES:
            if rule.needles and not any(word in reach for word in rule.needles):
                continue
            for match in rule.pattern.finditer(text, low, min(high + AFTER, len(text))):
                if match.start() >= high:
                    break
                if not _fits(rule, match):
                    taken.add(_statement(rule, match))
    return [item for item in taken.items if item.rule.name != _SURVIVED.name]


def _windows(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where statements may begin: bounded parts of a text that follow each other and never overlap."""
    low = high = start
    found = (words.finditer(text, start, min(end + BEFORE, len(text))) for words in _ANNOUNCING)
    for word in heapq.merge(*found, key=lambda match: match.start()):
        first, last = max(start, word.start() - BEFORE), min(word.end(), end)
        if first > high or high - low > _WINDOW:
            if high > low:
                yield low, high
            low = max(first, high)
        high = max(high, last)
    if high > low:
        yield low, high


class _Taken:
    """Statements that do not overlap, in the text's order. Of two about the same words, the one that came first stays."""

    def __init__(self) -> None:
        self.items: list[Statement] = []

    def add(self, item: Statement) -> None:
        """Keep a statement, unless another has its words."""
        place = bisect.bisect(self.items, item.start, key=lambda other: other.start)
        before = place > 0 and self.items[place - 1].end > item.start
        after = place < len(self.items) and self.items[place].start < item.end
        if not before and not after:
            self.items.insert(place, item)


_SURVIVED = Rule(name="goes on", pattern=re.compile(r"(?!)"))
"""Stands for words that a program goes on after or that prose names, so that no vaguer rule takes them for a failure."""


def _statement(rule: Rule, match: re.Match[str]) -> Statement:
    follows = match.end()
    survived = rule.unless is not None and rule.unless.match(match.string, follows, follows + _SENTENCE)
    survived = survived or is_prose(match.string, match.start(), follows)
    return Statement(
        rule=_SURVIVED if survived else rule,
        start=match.start(),
        end=follows,
        facts=OomFacts() if survived else _facts(rule, match),
    )


def _fits(rule: Rule, match: re.Match[str]) -> bool:
    """Whether a use is told that stays below its limit."""
    if not rule.over:
        return False
    used, limit = size_of(match["used"]), size_of(match["limit"])
    return used is None or limit is None or used < limit


def _facts(rule: Rule, match: re.Match[str]) -> OomFacts:
    """What a match states. The exact count, where one is printed beside a rounded size, is the size."""
    said = {name: value for name, value in match.groupdict().items() if value}
    sizes = {name.removesuffix("_exact"): size_of(value) for name, value in sorted(said.items()) if name not in _NAMES}
    requested, used, limit = (sizes.get(name) for name in ("requested", "used", "limit"))
    return OomFacts(
        phase=rule.phase,
        platform=rule.platform,
        requested_bytes=requested,
        free_bytes=sizes.get("free"),
        largest_free_bytes=sizes.get("largest"),
        limit_bytes=limit,
        used_bytes=used,
        driver_refused=rule.driver or None,
        allocator=said.get("allocator"),
        program=said.get("program"),
    )


_NAMES = {"allocator", "program"}
