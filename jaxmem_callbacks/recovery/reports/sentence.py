"""What happened in one sentence: a verdict and the bounds of memory enter; words, cause and what was lacking leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import MemoryLimit, OomCause
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.texts.causes import Room, cause_of, free_words, is_too_large, room_of
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
    cause: OomCause
    lacking_bytes: int | None


def told(verdict: Verdict, devices: Sequence[MemoryLimit]) -> Told:
    """What happened.

    Args:
        verdict: The failure.
        devices: What the allocators of the devices say now.
    """
    asked, what = _asked(verdict)
    room, words = _room(verdict, devices)
    cause, why = cause_of(asked, verdict.facts, room)
    facts = verdict.facts
    when = " while it was compiled" if facts.phase == "compile" else ""
    sentence = f"{_who(verdict)} {what}{when}; {words}: {why}."
    return Told(sentence=sentence, cause=cause, lacking_bytes=_lacking(asked, cause, room))


def _lacking(asked: int | None, cause: OomCause, room: Room) -> int | None:
    """What was lacking at least. Of a device that something else holds nobody says what it would have given."""
    free, growth = room.free_bytes, room.growth_bytes
    there = {
        "fragmentation": room.largest_bytes,
        "growth": max(free or 0, growth or 0),
        "refused": None,
    }.get(cause, room.left_bytes)
    return asked - there if asked is not None and there is not None and asked > there else None


def _who(verdict: Verdict) -> str:
    if verdict.failing is not None:
        return f"{'The' if verdict.failing.proved else 'Probably the'} program {verdict.failing.name}"
    return "An allocation outside of any program that is known"


def _asked(verdict: Verdict) -> tuple[int | None, str]:
    """What was asked for: by the text, else what the program takes besides its arguments."""
    facts, failing = verdict.facts, verdict.failing
    if facts.requested_bytes is not None:
        return facts.requested_bytes, f"asked for {format_bytes(facts.requested_bytes)}"
    if facts.used_bytes is not None and is_too_large(facts):
        return facts.used_bytes, f"needs {format_bytes(facts.used_bytes)}"
    own = None if failing is None else failing.own_bytes
    if own is not None:
        source = "in temporaries of its kernel library" if failing and failing.library_bytes else "by its compiler"
        return own, f"takes {format_bytes(own)} besides its arguments, {source}"
    return None, "asked for more memory than it got (how much is unknown, because the exception does not say)"


def _room(verdict: Verdict, devices: Sequence[MemoryLimit]) -> tuple[Room, str]:
    """What was there for the request, by the text, else by what says so now; and the words for it."""
    facts = verdict.facts
    if facts.limit_bytes is not None and is_too_large(facts):
        return Room(left_bytes=facts.limit_bytes), f"there are {format_bytes(facts.limit_bytes)}"
    said = room_of(facts)
    free = said.free_bytes if said.free_bytes is not None else facts.free_bytes
    if free is not None:
        return said, free_words(free, facts.largest_free_bytes, facts)
    if facts.largest_free_bytes is not None:
        return said, f"{format_bytes(facts.largest_free_bytes)} were free in one piece"
    if verdict.limits and (facts.platform in ("cpu", "host") or (facts.platform is None and not devices)):
        return _of_host(verdict.limits)
    if devices:
        tight = min(devices, key=lambda limit: limit.left_bytes)
        words = f"{format_bytes(tight.left_bytes)} of {format_bytes(tight.limit_bytes)} are free on {tight.name} now"
        return _of_device(tight, pooled=facts.platform == "gpu" or tight.name.startswith("gpu")), words
    return said, "what was free is unknown, because neither the exception nor the allocator says"


def _of_device(limit: MemoryLimit, *, pooled: bool) -> Room:
    """What an allocator has now. A GPU's pool that does not say what it holds may still grow, or not."""
    left, pool = limit.left_bytes, limit.pool_bytes
    if pool is None:
        whole = None if pooled else left
        growth = None if pooled else 0
    else:
        whole, growth = max(pool - limit.used_bytes, 0), max(limit.limit_bytes - pool, 0)
    return Room(
        free_bytes=whole, largest_bytes=limit.largest_free_bytes, growth_bytes=growth, left_bytes=left, later=True
    )


def _of_host(limits: Sequence[MemoryLimit]) -> tuple[Room, str]:
    """The bound with least left; of the process's own ones that is what refused."""
    own = [limit for limit in limits if limit.name in (ADDRESS_SPACE, DATA, GROUP)]
    tight = (own or limits)[0]
    name = tight.name if tight.name.startswith("the ") else f"the {tight.name}"
    words = f"{format_bytes(tight.left_bytes)} of the {format_bytes(tight.limit_bytes)} of {name} are left now"
    return Room(left_bytes=tight.left_bytes, later=True), words
