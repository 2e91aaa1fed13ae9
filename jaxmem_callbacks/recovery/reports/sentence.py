"""What happened in one sentence: a verdict and the bounds of memory enter; words, cause and what was lacking leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.records.oom_report import Cause, MemoryLimit
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.verdicts.judging import Verdict
from jaxmem_callbacks.recovery.verdicts.limits import ADDRESS_SPACE, DATA, GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A failure in words.

    Attributes:
        sentence: What asked for how much, what was free, and why it did not fit.
        cause: Why it did not fit.
        lacking_bytes: What was lacking at least, or None.
    """

    sentence: str
    cause: Cause
    lacking_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Free:
    """What was free: in all, in one piece, and where."""

    bytes: int | None
    largest: int | None
    words: str


def told(verdict: Verdict, devices: Sequence[MemoryLimit]) -> Told:
    """What happened.

    Args:
        verdict: The failure.
        devices: What the allocators of the devices say now.
    """
    asked, what = _asked(verdict)
    free = _free(verdict, devices)
    cause, why = _cause(verdict, asked, free)
    room = free.largest if cause == "fragmentation" else free.bytes
    lacking = asked - room if asked is not None and room is not None and asked > room else None
    facts = verdict.facts
    when = " while it was compiled" if facts.phase == "compile" else ""
    sentence = f"{_who(verdict)} {what}{when}; {free.words}: {why}."
    return Told(sentence=sentence, cause=cause, lacking_bytes=lacking)


def _who(verdict: Verdict) -> str:
    if verdict.failing is not None:
        return f"{'The' if verdict.failing.proved else 'Probably the'} program {verdict.failing.name}"
    return "An allocation outside of any program that is known"


def _asked(verdict: Verdict) -> tuple[int | None, str]:
    """What was asked for: by the text, else what the program takes besides its arguments."""
    facts, failing = verdict.facts, verdict.failing
    if facts.requested_bytes is not None:
        return facts.requested_bytes, f"asked for {format_bytes(facts.requested_bytes)}"
    if facts.used_bytes is not None and _is_too_large(facts):
        return facts.used_bytes, f"needs {format_bytes(facts.used_bytes)}"
    own = None if failing is None else failing.own_bytes
    if own is not None:
        source = "in temporaries of its kernel library" if failing and failing.library_bytes else "by its compiler"
        return own, f"takes {format_bytes(own)} besides its arguments, {source}"
    return None, "asked for more memory than it got (how much is unknown, because the exception does not say)"


def _is_too_large(facts: OomFacts) -> bool:
    """Whether a whole program needs more than there is; as printed both may be the same, such as 1.00M of 1.00M."""
    used, limit = facts.used_bytes, facts.limit_bytes
    if used is None or limit is None:
        return False
    return used > limit or (used == limit and facts.phase == "compile")


def _free(verdict: Verdict, devices: Sequence[MemoryLimit]) -> _Free:
    facts = verdict.facts
    if facts.limit_bytes is not None and _is_too_large(facts):
        return _Free(facts.limit_bytes, None, f"there are {format_bytes(facts.limit_bytes)}")
    if facts.free_bytes is not None:
        block = facts.largest_free_bytes
        piece = "" if block is None else f", {format_bytes(block)} in one piece"
        words = f"{format_bytes(facts.free_bytes)} were free{piece}"
        return _Free(facts.free_bytes, block, words)
    if facts.largest_free_bytes is not None:
        return _Free(None, facts.largest_free_bytes, f"{format_bytes(facts.largest_free_bytes)} were free in one piece")
    if verdict.limits and (facts.platform in ("cpu", "host") or (facts.platform is None and not devices)):
        return _of_host(verdict.limits)
    if devices:
        tight = min(devices, key=lambda limit: limit.left_bytes)
        words = f"{format_bytes(tight.left_bytes)} of {format_bytes(tight.limit_bytes)} are free on {tight.name} now"
        return _Free(tight.left_bytes, tight.largest_free_bytes, words)
    return _Free(None, None, "what was free is unknown, because neither the exception nor the allocator says")


def _of_host(limits: Sequence[MemoryLimit]) -> _Free:
    """The bound with least left; of the process's own ones that is what refused."""
    own = [limit for limit in limits if limit.name in (ADDRESS_SPACE, DATA, GROUP)]
    tight = (own or limits)[0]
    name = tight.name if tight.name.startswith("the ") else f"the {tight.name}"
    words = f"{format_bytes(tight.left_bytes)} of the {format_bytes(tight.limit_bytes)} of {name} are left now"
    return _Free(tight.left_bytes, None, words)


def _cause(verdict: Verdict, asked: int | None, free: _Free) -> tuple[Cause, str]:
    facts = verdict.facts
    limit, used = facts.limit_bytes, facts.used_bytes
    room = limit - used if limit is not None and used is not None else None
    in_pieces = (
        free.bytes is not None and free.largest is not None and asked is not None and free.largest < asked <= free.bytes
    )
    if facts.fragmentation or in_pieces:
        return "fragmentation", "it did not fit because of fragmentation, since there was enough, but not in one piece"
    if asked is None:
        return "unknown", "why it did not fit is unknown, because nothing says how much was asked for"
    if _is_too_large(facts) or any(each is not None and asked > each for each in (free.bytes, room)):
        return "capacity", "it did not fit for lack of capacity, since more was asked for than was there"
    if free.bytes is None:
        return "unknown", "capacity or fragmentation is unknown, because nothing says what was free"
    return (
        "unknown",
        "capacity or fragmentation is unknown, because more is free now, after the failure, than was asked for",
    )
