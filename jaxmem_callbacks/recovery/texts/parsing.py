"""`parse_oom`: what an exception or a text states about a failure for want of memory."""

from __future__ import annotations

import codecs
import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.texts.rule import Around, details
from jaxmem_callbacks.recovery.texts.statements import Statement, statements

_DEEPEST = 64
_LOOKED_AT, _MOST = 400, 0.6
_LONGEST = 4 * 2**20
"""Characters of one text that are read, from its beginning: a longer exception repeats itself."""


def text_of(source: object) -> str:
    """The whole text of an exception or a log, with the exception itself first.

    Args:
        source: An exception, text, or bytes of text in UTF-16 or any encoding near UTF-8.

    Returns:
        The texts, a line each; an empty one where there is none. Never raises, whatever the object's own methods do.
    """
    if isinstance(source, str):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source).decode(encoding_of(bytes(source)), errors="replace")
    if isinstance(source, BaseException):
        return "\n".join(_texts(source))
    return _text_of_object(source)


def encoding_of(beginning: bytes) -> str:
    """The encoding of bytes that a text begins with: UTF-16 by its mark, or by the zero in every other byte of plain letters."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    seen = beginning[:_LOOKED_AT]
    for encoding, zeros, letters in (("utf-16-le", seen[1::2], seen[::2]), ("utf-16-be", seen[::2], seen[1::2])):
        if zeros.count(0) > _MOST * len(zeros) and letters.count(0) < len(letters) / 10:
            return encoding
    return "utf-8-sig"


def _texts(error: BaseException) -> Iterator[str]:
    """Each exception once: itself, its notes, its members, its cause or, where that is hidden, what it was raised while."""
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < _DEEPEST:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield f"{type(current).__name__}: {_text_of_object(current)}"
        notes = getattr(current, "__notes__", None)
        yield from (_text_of_object(note) for note in notes[:_DEEPEST]) if isinstance(notes, list | tuple) else ()
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting += members[:_DEEPEST]
        behind = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        waiting += [behind] if behind is not None else []


def _text_of_object(thing: object) -> str:
    try:
        return str(thing)[:_LONGEST]
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure that is read
        return ""


_COLOUR = re.compile(r"\x1b\[[0-9;:?]{0,24}[A-Za-z]")
_BAR = re.compile(r"(?:(?<=\n)|\A)(?:[^\n\r]{0,200}\d%[^\n\r]{0,200}\r){1,200}(?!\r*\n)")
# `\n` of JSON and of Python's repr is white space that is no line of the log; `\"` and `\'` are quotes.
# Each run of backslashes is looked at once, from its beginning.
_BREAK = re.compile(r"(?<!\\)\\++[nrt]")
_QUOTE = re.compile(r"(?<!\\)\\++(?=[\"'])")
_DATE = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[+-]\d{2}:?\d{2})?:?"
_HEAD = re.compile(
    r"\n(?:[ \t]{0,40}(?:"
    r"\[(?:(?:rank|process|proc|worker|host|node)[ _-]?)?\d{1,6}\]:?[ \t]"  # torchrun and its like
    r"|\[\d{1,6},\d{1,6}\]<std(?:err|out)>:[ \t]?"  # Open MPI
    r"|\(\w[^()\n]{0,80}\bpid=\d{1,10}[^()\n]{0,120}\)[ \t]"  # Ray
    r"|(?:(?:rank|process|proc|worker|host|node)[_-]?)?\d{1,6}:[ \t]"  # srun --label, and launchers that name what they number
    r"|[\w.-]{1,60}[ \t]{1,20}\|[ \t]"  # docker compose
    rf"|{_DATE}[ \t](?:std(?:err|out)[ \t][FP][ \t])?"  # clocks; containerd
    r")|[ \t]{2,40}[|+][ \t]){1,4}"  # the margin of an exception group
)
_LONGEST_LINE = 2**16


def plain(text: str) -> str:
    """A text without what stands around its message; it has as many lines as before."""
    return "".join(without_heads(_lines(_without_known(text))))


def plain_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """The same of a log in pieces, cut anywhere; what leaves is cut at line ends, but in a line of many thousand characters."""
    return without_heads(line for piece in _whole_lines(pieces) for line in _lines(_without_known(piece)))


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        rest += piece
        end = rest.rfind("\n") + 1
        if not end and len(rest) > _LONGEST_LINE:
            end = len(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _lines(text: str) -> list[str]:
    """A text's lines with their ends; no other white space ends one."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _without_known(text: str) -> str:
    """A text without colours, escapes, what a progress bar overwrote, and the heads of known forms, which one line may show."""
    text = _COLOUR.sub("", text) if "\x1b" in text else text
    text = _BAR.sub("", text) if "\r" in text else text
    if "\\" in text:
        text = _QUOTE.sub("", _BREAK.sub("\v", text))
    return _HEAD.sub("\n", f"\n{text}")[1:]


_BLOCK = 32  # lines that are neighbours, with those of the block before and behind
_LEAST, _SHARE = 2, 0.6
_DEEPEST_JSON = 5
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
_FAILURE_WORDS = (
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
# Words of a failure belong to the message, however often they come.
_FAILURE_TERMS = re.compile(
    r"[Mm]emory|MEMORY|xhaust|EXHAUST|OOM|[Oo]om\b|Error\b|[Kk]ill|xceed|alloc|ALLOC|InUse|Limit|Size"
)


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
        heads = set[str]().union(
            *(block.heads for block in (before, here, behind) if block.names_failure or here.names_failure)
        )
        yield "".join(_without(line, heads) for line in here.lines) if heads else here.text
        before, here = here, behind


class _Block:
    """Neighbouring lines; where they name no failure, their heads can stay."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.text = lines, "".join(lines)
        self.names_failure = any(words in self.text for words in _FAILURE_WORDS)

    @functools.cached_property
    def heads(self) -> set[str]:
        """The forms of heads that most of the lines have."""
        return _shared(self.lines)


def _shared(lines: list[str]) -> set[str]:
    """The forms of heads that most of the lines have, each with what stands before it."""
    most = max(_LEAST, _SHARE * sum(not line.isspace() for line in lines))
    places, found = [(line, "", 0) for line in lines], set[str]()
    for _ in range(_DEEPEST_JSON):
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
    if found is None or _FAILURE_TERMS.search(found[0]):
        return None
    return form + _DIFFERS.sub("0", found[0]), found.end()


def _without(line: str, heads: set[str]) -> str:
    form, end = "", 0
    for _ in range(_DEEPEST_JSON):
        more = _longer(line, form, end)
        if more is None or more[0] not in heads:
            break
        form, end = more
    if not end or not form.endswith('"'):
        return line[end:]
    low = max(end, len(line) - _LONGEST_END)
    closing = _JSON_END.search(line, low)
    return line[end:] if closing is None else line[end : closing.start()] + "\n" * line.endswith("\n")


_TOLERANCE = 0.011
"""Two printed decimals hold no more than one in a hundred: `1.74GiB` and its bytes are one request."""
_COMPARED = ("requested_bytes", "used_bytes", "limit_bytes", "program")
# Beside the failing words stand the allocator's lines before it and the tables after it.
_AROUND_BEFORE, _AROUND_AFTER = 4_000, 20_000
_LINES = (2, 3)  # the ranks of lines beside a status; those above are hints


def parse_oom(exception_or_text: BaseException | str | bytes) -> OomFacts | None:
    """The facts that an out-of-memory error states.

    Texts of XLA's clients for GPU, TPU and CPU, of their allocators and compilers, of CUDA, ROCm and NCCL, of NumPy and of the
    system are known by their wording. A warning after which a program goes on is no failure. Never raises.

    Args:
        exception_or_text: An exception, with its causes, notes and group members; or a text, such as a log.

    Returns:
        The first failure's facts, None in each field that the text leaves open; or None where no memory ran out.
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


def continues(known: OomFacts, stated: OomFacts) -> bool:
    """Whether facts stated next may belong to the known failure: nothing in them contradicts it."""
    return _is_of_the_same_memory(stated, known) and all(
        _agree(getattr(stated, name), getattr(known, name)) for name in _COMPARED
    )


def _is_of_the_same_memory(one: OomFacts, other: OomFacts) -> bool:
    """Pinned memory's status was that of a GPU until 2025: it is one failure where the request is the same."""
    same_request = None not in (one.requested_bytes, other.requested_bytes) and _agree(
        one.requested_bytes, other.requested_bytes
    )
    return _agree(one.platform, other.platform) or (same_request and {one.platform, other.platform} == {"gpu", "host"})


def is_met_before(rank: int, stated: OomFacts, other_rank: int, other: OomFacts) -> bool:
    """Whether of two failures in the order of the text the former is the first that a program met.

    A status speaks for lines that stand before it and that a program may survive. Another memory's is another failure.
    """
    return rank <= other_rank or (rank in _LINES and not _agree(stated.platform, other.platform))


def joined(stated: Sequence[OomFacts]) -> OomFacts:
    """Each fact from the first statement that has it."""
    names = [field.name for field in dataclasses.fields(OomFacts)]
    return OomFacts(**{name: _first(stated, name) for name in names})


def first_failure(groups: Sequence[Sequence[Statement]]) -> Sequence[Statement] | None:
    """The first failure that a program met; where there is no status, the first in the log."""
    stated = [(rank_of(group), facts_stated(group), group) for group in groups]
    return (
        functools.reduce(lambda one, other: one if is_met_before(*one[:2], *other[:2]) else other, stated)[2]
        if stated
        else None
    )


def rank_of(group: Sequence[Statement]) -> int:
    """How surely a program failed by the statements of one failure: 0 for a status that it met."""
    return min(item.rank for item in group)


def facts_stated(group: Sequence[Statement]) -> OomFacts:
    """The facts of a failure's statements, those of the surest first."""
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
    # Until 2025 the status was the same for pinned memory, and only the allocator's name differed.
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
    order, stated = _surest_first(failure), facts_stated(failure)
    first, last = failure[0].start, failure[-1].end
    others = [group for group in groups if not _agree(facts_stated(group).platform, stated.platform)]
    low = max([first - _AROUND_BEFORE, 0, *(group[-1].end for group in others if group[-1].end <= first)])
    high = min([last + _AROUND_AFTER, *(group[0].start for group in others if group[0].start >= last)])
    around = details(text[low:high], platform=stated.platform)
    return order, dataclasses.replace(around, places={name: low + place for name, place in around.places.items()})


def _first(stated: Sequence[OomFacts], name: str) -> Any:
    return next((value for value in (getattr(facts, name) for facts in stated) if value is not None), None)


def _agree(one: object, other: object) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return abs(one - other) <= _TOLERANCE * max(one, other)
    return one is None or other is None or one == other


def _fragmented(facts: OomFacts, around: Around) -> bool | None:
    """True where free memory of the pool was enough, or where the text states it and no number contradicts."""
    asked = facts.requested_bytes
    if facts.phase == "compile" or asked is None:
        return around.facts.fragmentation
    free = free_in_pool(facts)
    if free is None:
        return around.facts.fragmentation
    largest = facts.largest_free_bytes
    return True if asked <= free and (largest is None or asked > largest) else None


def free_in_pool(facts: OomFacts) -> int | None:
    """Free memory that could be given out without asking the driver; None where the text leaves it open.

    A TPU's runtime owns the device's memory, but for what is reserved. A GPU's pool may still grow, and what is free on the
    device is not in the pool.
    """
    if facts.compacted_bytes is not None:
        return facts.compacted_bytes
    if facts.platform == "tpu":
        return facts.free_bytes
    if facts.pool_bytes is None:
        return None
    if facts.largest_free_bytes is not None:  # the allocator's summary, which has both
        return facts.free_bytes
    return None if facts.used_bytes is None else facts.pool_bytes - facts.used_bytes
