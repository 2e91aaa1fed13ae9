"""Rules about failure texts: a wording, the facts in it, and the lines around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxmem_callbacks.records.oom import OomFacts, OomPlatform, Phase

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
        phase: The phase that the wording alone implies.
        platform: Whose memory it is about.
        strength: ``status`` is the error that a program meets, ``log`` a line beside it, ``hint`` one that a program may
            survive. The failing status speaks first.
        unless: What must not follow within a sentence or two: words after which the program goes on.
        over: Whether the use that it states must reach the stated limit, since the same words are printed for programs that fit.
        vague: Whether the wording only states that memory ran out, so that any other wording at the same place is preferred.
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


# pjrt_stream_executor_client.cc and the TPU runtime name the executable; compilers name the module.
_PROGRAM = wording_pattern(
    r"(?:executable_name=['\"](?P<a>[^'\"\s]{1,200})['\"]|Error loading program ['\"](?P<b>[^'\"\n]{1,200})['\"]"
    r"|HLO module: (?P<c>[\w.$<>-]{1,200}))"
)
_ALLOCATOR = wording_pattern(
    r"(?:Allocator \((?P<a>[^)\s]{1,80})\) ran out of memory|BFCAllocator dump for (?P<b>[\w.-]{1,80})"
    r"|(?P<c>[\w.-]{1,80}) cuMemAllocAsync failed|by allocator (?P<d>[\w.-]{1,80}))"
)
# allocator.cc, AllocatorStats::DebugString: counts of bytes, and sizes with units since 2026.
_STATS = wording_pattern(r"Limit: <limit> InUse: <used>")
# bfc_allocator.cc, DumpMemoryLog: before 2026 what the pool holds, under two names, and since then a summary.
_POOL = wording_pattern(r"(?:Total bytes in pool|total_region_allocated_bytes_): <pool> memory_limit_: <limit>")
_SUMMARY = wording_pattern(
    r"Allocator memory summary: rounded request <requested>, total free in pool <free>,"
    r" largest free chunk(?: usable by \w{1,12} end)? <largest>, unallocated bytes (?P<rest>[\d.]{1,20}\s?\w{0,5}),"
    r" pool size <pool>, pool limit <limit>"
)
# best_fit_allocator.cc, ReserveBottomOfMemory, where free blocks are scattered.
_WERE_IT_WHOLE = wording_pattern(r"If fragmentation is eliminated, the maximum reservable bytes would be <compacted>")
_CUDA = wording_pattern(r"Free memory/Total memory: <free>/<limit>")
# A pool that grows asks the driver for more than the request, in lines before the failing one.
_DRIVER = wording_pattern(
    r"(?:from device: [^\n]{0,80}?(?:OUT_OF_MEMORY|OutOfMemory|out of memory)|[Cc]ould not allocate device of size:)"
)
_TUNING = wording_pattern(
    r"(?:[Aa]utotuning failed|[Aa]utotuner|_algorithm_picker|[Bb]est cudnn convolution algorithm|No valid config found)"
)
_FRAGMENTED = wording_pattern(
    r"(?:[Dd]ue to (?:memory )?fragmentation|because of (?:memory )?fragmentation|is (?:too )?fragmented"
    r"|caused by (?:memory )?fragmentation\b)"
)
# A hint is no finding: "If this is caused by memory fragmentation, ...", "If the cause is memory fragmentation maybe ...".
_HINT = re.compile(r"\b(?:[Ii]f|[Mm]aybe|[Mm]ay be|might be|possibly|could be)\b[^.]{0,90}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What stands around a failing line.

    Attributes:
        facts: What it states.
        places: Name of a fact to where in the text it stands.
    """

    facts: OomFacts
    places: dict[str, int]


def details(text: str, *, platform: OomPlatform | None) -> Around:
    """The figures and names beside a failure.

    Args:
        text: The failing lines with their surroundings.
        platform: Whose memory ran out; a GPU pool's figures complete a GPU's failure only.
    """
    gpu = platform == "gpu"
    stats, held, summary, cuda = (pattern.search(text) if gpu else None for pattern in (_STATS, _POOL, _SUMMARY, _CUDA))
    tuning, driver = (pattern.search(text) if gpu else None for pattern in (_TUNING, _DRIVER))
    allocators = _ALLOCATOR.finditer(text) if platform in ("gpu", "host", None) else ()
    # Of host memory only that of pinned memory is one, which its name shows.
    allocator = next((found for found in allocators if platform != "host" or "host" in str(_name(found))), None)
    program, fragmented = _PROGRAM.search(text), _says_fragmented(text)
    # 0 is no limit, since the driver's pool has none of its own; nor is a number beyond all memory.
    bounded = next((match for match in (stats, summary, held, cuda) if _size(match, "limit")), None)
    compacted = _WERE_IT_WHOLE.search(text)
    found = {
        "phase": tuning,
        "free_bytes": summary or cuda,
        "largest_free_bytes": summary,
        "compacted_bytes": compacted,
        "limit_bytes": bounded,
        "used_bytes": stats,
        "pool_bytes": summary or held,
        "fragmentation": fragmented,
        "driver_refused": driver,
        "allocator": allocator,
        "program": program,
    }
    facts = OomFacts(
        phase="compile" if tuning else None,
        free_bytes=_size(found["free_bytes"], "free"),
        largest_free_bytes=_size(summary, "largest"),
        compacted_bytes=_size(compacted, "compacted"),
        limit_bytes=_size(bounded, "limit"),
        used_bytes=_size(stats, "used"),
        pool_bytes=_size(found["pool_bytes"], "pool"),
        fragmentation=True if fragmented else None,
        driver_refused=True if driver else None,
        allocator=_name(allocator),
        program=_name(program),
    )
    return Around(
        facts=facts,
        places={name: match.start() for name, match in found.items() if match is not None},
    )


def _size(found: re.Match[str] | None, name: str) -> int | None:
    return None if found is None else size_of(found[name])


def _name(found: re.Match[str] | None) -> str | None:
    """The first name of a match. A module is named at a sentence's end, whose point is no part of it."""
    return None if found is None else next(name for name in found.groups() if name).rstrip(".")


def _says_fragmented(text: str) -> re.Match[str] | None:
    return next(
        (
            found
            for found in _FRAGMENTED.finditer(text)
            if not _HINT.search(text, max(0, found.start() - 120), found.start())
        ),
        None,
    )
