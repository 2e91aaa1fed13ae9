"""What stands around a failing line and completes it: program, allocator, the pool's figures, the phase. A text enters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import OomFacts, OomPlatform
from jaxmem_callbacks.recovery.texts.rule import size_of, wording_pattern

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
# best_fit_allocator.cc, ReserveBottomOfMemory, where free blocks lie apart.
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
    # Of host memory only that of pinned memory is one, by a name that says so.
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
