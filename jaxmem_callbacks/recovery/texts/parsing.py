"""``jm.parse_oom``: an exception or a text enters, what it says of an out-of-memory failure leaves, or None for none.

The text's statements (``oom_statements.py``) that speak of one failure are joined; the failing status speaks first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.texts.details import Around, details
from jaxmem_callbacks.recovery.texts.plain import plain
from jaxmem_callbacks.recovery.texts.statements import Statement, statements
from jaxmem_callbacks.recovery.texts.text import text_of

_TOLERANCE = 0.011
"""Two printed decimals hold no more than one in a hundred: `1.74GiB` and its bytes are one request."""
_COMPARED = ("requested_bytes", "used_bytes", "limit_bytes", "program")
# Beside the failing words stand the allocator's lines before it and the tables after it.
_AROUND_BEFORE, _AROUND_AFTER = 4_000, 20_000
_LINES = (2, 3)  # the ranks of lines beside a status; those above are hints


def parse_oom(exception_or_text: BaseException | str | bytes) -> OomFacts | None:
    """What an error says of memory that ran out.

    Texts of XLA's clients for GPU, TPU and CPU, of their allocators and compilers, of CUDA, ROCm and NCCL, of NumPy and of the
    system are known by their wording. A warning after which a program goes on is no failure. Never raises.

    Args:
        exception_or_text: An exception, with its causes, notes and group members; or a text, such as a log.

    Returns:
        The first failure's facts, None in each field that the text does not say; or None where no memory ran out.
    """
    return read_failure(exception_or_text)[0]


def read_failure(exception_or_text: BaseException | str | bytes) -> tuple[OomFacts | None, bool]:
    """What `parse_oom` gives, and whether the words are those of a failed runtime: no name alone, and no line of a log."""
    text = plain(text_of(exception_or_text))
    groups = failures(statements(text))
    failure = first_failure(groups)
    return (None, False) if failure is None else (facts_of(text, groups, failure), rank_of(failure) == 0)


def failures(found: Sequence[Statement]) -> list[list[Statement]]:
    """Statements that speak of the same failure, together: those in a row whose figures and names do not contradict."""
    groups: list[list[Statement]] = []
    known = OomFacts()
    for item in found:
        if groups and continues(known, item.facts):
            groups[-1].append(item)
            known = joined([known, item.facts])
        else:
            groups.append([item])
            known = item.facts
    return groups


def continues(known: OomFacts, told: OomFacts) -> bool:
    """Whether what is told next may speak of the failure that is known: nothing in it contradicts."""
    return _is_of_the_same_memory(told, known) and all(
        _agree(getattr(told, name), getattr(known, name)) for name in _COMPARED
    )


def _is_of_the_same_memory(one: OomFacts, other: OomFacts) -> bool:
    """Pinned memory's status was that of a GPU until 2025: it is one failure where the request is the same."""
    same_request = None not in (one.requested_bytes, other.requested_bytes) and _agree(
        one.requested_bytes, other.requested_bytes
    )
    return _agree(one.platform, other.platform) or (same_request and {one.platform, other.platform} == {"gpu", "host"})


def is_met_before(rank: int, told: OomFacts, other_rank: int, other: OomFacts) -> bool:
    """Whether of two failures, the first of which is told first, that one is the first that a program met.

    A status speaks for lines that stand before it and that a program may survive. Another memory's is another failure.
    """
    return rank <= other_rank or (rank in _LINES and not _agree(told.platform, other.platform))


def joined(told: Sequence[OomFacts]) -> OomFacts:
    """For each fact the first that tells it."""
    names = [field.name for field in dataclasses.fields(OomFacts)]
    return OomFacts(**{name: _first(told, name) for name in names})


def first_failure(groups: Sequence[Sequence[Statement]]) -> Sequence[Statement] | None:
    """The first failure that a program met; where no status is told, the first that a log tells."""
    told = [(rank_of(group), told_by(group), group) for group in groups]
    return (
        functools.reduce(lambda one, other: one if is_met_before(*one[:2], *other[:2]) else other, told)[2]
        if told
        else None
    )


def rank_of(group: Sequence[Statement]) -> int:
    """How surely a program failed by what is said of one failure: 0 for a status that it met."""
    return min(item.rank for item in group)


def told_by(group: Sequence[Statement]) -> OomFacts:
    """What its statements tell, those of the surest first."""
    return joined([item.facts for item in _surest_first(group)])


def _surest_first(group: Sequence[Statement]) -> list[Statement]:
    return sorted(group, key=lambda item: (item.rank, item.start))


Groups = Sequence[Sequence[Statement]]


def facts_of(text: str, groups: Groups, failure: Sequence[Statement]) -> OomFacts:
    """A failure's statements, joined with what stands around them."""
    order, around = _surroundings(text, groups, failure)
    facts = joined([*(item.facts for item in order), around.facts])
    phase = facts.phase
    if around.facts.phase == "compile":
        phase = "compile"
    elif phase is None and facts.program is not None:
        # An executable that is named is being loaded or run.
        phase = "run"
    # Until 2025 the status was the same for pinned memory, and only the allocator's name told.
    in_host = facts.platform == "gpu" and "host" in (facts.allocator or "")
    facts = dataclasses.replace(facts, phase=phase, platform="host" if in_host else facts.platform)
    return dataclasses.replace(facts, fragmentation=_fragmented(facts, around))


def places_of(text: str, groups: Groups, failure: Sequence[Statement]) -> dict[str, int]:
    """Name of a fact to where in the text it stands; what follows from other facts stands nowhere."""
    order, around = _surroundings(text, groups, failure)
    places = dict(around.places)
    for item in reversed(order):
        places |= {
            field.name: item.start
            for field in dataclasses.fields(OomFacts)
            if getattr(item.facts, field.name) is not None
        }
    return places


def _surroundings(text: str, groups: Groups, failure: Sequence[Statement]) -> tuple[list[Statement], Around]:
    """The statements, the surest first, and what stands around them, with its places in the whole text.

    A failure of another memory has surroundings of its own.
    """
    order, told = _surest_first(failure), told_by(failure)
    first, last = failure[0].start, failure[-1].end
    others = [group for group in groups if not _agree(told_by(group).platform, told.platform)]
    low = max([first - _AROUND_BEFORE, 0, *(group[-1].end for group in others if group[-1].end <= first)])
    high = min([last + _AROUND_AFTER, *(group[0].start for group in others if group[0].start >= last)])
    around = details(text[low:high], platform=told.platform)
    return order, dataclasses.replace(around, places={name: low + place for name, place in around.places.items()})


def _first(told: Sequence[OomFacts], name: str) -> Any:
    return next((value for value in (getattr(facts, name) for facts in told) if value is not None), None)


def _agree(one: object, other: object) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return abs(one - other) <= _TOLERANCE * max(one, other)
    return one is None or other is None or one == other


def _fragmented(facts: OomFacts, around: Around) -> bool | None:
    """True where free memory of the pool was enough, or where the text says so and no number says otherwise."""
    asked = facts.requested_bytes
    if facts.phase == "compile" or asked is None:
        return around.facts.fragmentation
    free = free_in_pool(facts)
    if free is None:
        return around.facts.fragmentation
    largest = facts.largest_free_bytes
    return True if asked <= free and (largest is None or asked > largest) else None


def free_in_pool(facts: OomFacts) -> int | None:
    """Free memory that could be given out without a word of the driver; None where the text does not say.

    A TPU's runtime owns the device's memory, but for what is reserved. A GPU's pool may still grow, and what is free on the
    device is not in the pool.
    """
    if facts.compacted_bytes is not None:
        return facts.compacted_bytes
    if facts.platform == "tpu":
        return facts.free_bytes
    if facts.pool_bytes is None:
        return None
    if facts.largest_free_bytes is not None:  # the allocator's summary, which says both
        return facts.free_bytes
    return None if facts.used_bytes is None else facts.pool_bytes - facts.used_bytes
