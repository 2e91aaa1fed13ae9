"""Memory profiles in pprof's format, as `jax.profiler` writes them and ``go tool pprof`` shows them: read, and written again."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxmem_callbacks.records.wire import fields_of_message, message_of, varints

# Fields of Profile, ValueType, Sample, Label, Location, Line and Function.
_TYPES, _SAMPLES, _LOCATIONS, _FUNCTIONS, _TEXTS, _TIME, _COMMENTS = 1, 2, 4, 5, 6, 9, 13
_UNIT = 2
_OF_LOCATIONS, _VALUES, _LABELS = 1, 2, 3
_KEY, _TEXT, _NUMBER = 1, 2, 3
_ID, _LINES, _OF_FUNCTION, _LINE = 1, 4, 1, 2
_NAME, _SYSTEM_NAME, _FILE = 2, 3, 4


class Frame(NamedTuple):
    """One call on the way to an allocation, or a name in its place, which has no file and line 0."""

    function: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was allocated on one way.

    Attributes:
        frames: The calls, innermost first.
        count: Allocations that are alive.
        bytes: Of all of them together.
        labels: Such as ``kind``, which JAX gives: ``buffer`` or ``executable``; and ``device``.
    """

    frames: tuple[Frame, ...]
    count: int
    bytes: int
    labels: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """What was alive at one moment.

    Attributes:
        samples: In the file's order.
        comments: Lines about the profile.
    """

    samples: Sequence[Sample]
    comments: Sequence[str] = ()


def profile_from(data: bytes) -> MemoryProfile:
    """The profile in the bytes of a file, packed by gzip or not.

    Raises:
        ValueError: they are no memory profile; the message has the reason.
    """
    try:
        return _decoded(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (IndexError, KeyError, TypeError, ValueError, EOFError, OSError) as error:
        msg = f"it is no memory profile in pprof's format ({type(error).__name__}: {error})"
        raise ValueError(msg) from error


def _decoded(data: bytes) -> MemoryProfile:
    fields: dict[int, list[int | bytes]] = {}
    for number, value in fields_of_message(data):
        fields.setdefault(number, []).append(value)
    texts = [_bytes(each).decode("utf-8", "replace") for each in fields.get(_TEXTS, ())]
    units = [texts[_numbers(each)[_UNIT]] for each in fields[_TYPES]]
    counts, sizes = units.index("count"), units.index("bytes")
    functions = {each[_ID]: each for each in map(_numbers, fields.get(_FUNCTIONS, ()))}
    frames: dict[int, list[Frame]] = {}
    for each in fields.get(_LOCATIONS, ()):
        frames[_numbers(each)[_ID]] = [
            Frame(texts[function.get(_NAME, 0)], texts[function.get(_FILE, 0)], line.get(_LINE, 0))
            for number, value in fields_of_message(_bytes(each))
            if number == _LINES
            for line in [_numbers(value)]
            for function in [functions[line[_OF_FUNCTION]]]
        ]
    samples: list[Sample] = []
    for each in fields.get(_SAMPLES, ()):
        parts = list(fields_of_message(_bytes(each)))
        values = list(_packed(parts, _VALUES))
        labels: dict[str, str | int] = {}
        for label in (_numbers(value) for number, value in parts if number == _LABELS):
            labels[texts[label[_KEY]]] = texts[label[_TEXT]] if _TEXT in label else label.get(_NUMBER, 0)
        stack = tuple(frame for at in _packed(parts, _OF_LOCATIONS) for frame in frames[at])
        samples.append(Sample(frames=stack, count=values[counts], bytes=values[sizes], labels=labels))
    comments = [texts[at] for number, value in fields_of_message(data) if number == _COMMENTS for at in _each(value)]
    return MemoryProfile(samples=samples, comments=comments)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        msg = "a number in a message's place"
        raise TypeError(msg)
    return value


def _numbers(value: int | bytes) -> dict[int, int]:
    return {number: each for number, each in fields_of_message(_bytes(value)) if isinstance(each, int)}


def _each(value: int | bytes) -> Iterator[int]:
    return iter((value,)) if isinstance(value, int) else varints(value)


def _packed(parts: Sequence[tuple[int, int | bytes]], wanted: int) -> Iterator[int]:
    for number, value in parts:
        if number == wanted:
            yield from _each(value)


def profile_bytes(profile: MemoryProfile) -> bytes:
    """The bytes of a file, packed by gzip."""
    texts: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str], int] = {}
    locations: dict[Frame, int] = {}

    def text(of: str) -> int:
        return texts.setdefault(of, len(texts))

    def location(frame: Frame) -> int:
        functions.setdefault((frame.function, frame.file), len(functions) + 1)
        return locations.setdefault(frame, len(locations) + 1)

    def label(name: str, value: str | int) -> bytes:
        return message_of([(_KEY, text(name)), (_NUMBER, value) if isinstance(value, int) else (_TEXT, text(value))])

    types = [[(1, text("allocations")), (_UNIT, text("count"))], [(1, text("space")), (_UNIT, text("bytes"))]]
    samples = [
        message_of(
            [
                (_OF_LOCATIONS, [location(frame) for frame in sample.frames]),
                (_VALUES, [sample.count, sample.bytes]),
                *((_LABELS, label(name, value)) for name, value in sample.labels.items()),
            ]
        )
        for sample in profile.samples
    ]
    lines = [
        message_of(
            [
                (_ID, number),
                (_LINES, message_of([(_OF_FUNCTION, functions[frame[:2]]), (_LINE, frame.line)])),
            ]
        )
        for frame, number in locations.items()
    ]
    named = [
        message_of([(_ID, number), (_NAME, text(name)), (_SYSTEM_NAME, text(name)), (_FILE, text(file))])
        for (name, file), number in functions.items()
    ]
    comments = [text(each) for each in profile.comments]
    return gzip.compress(
        message_of(
            [
                *((_TYPES, message_of(each)) for each in types),
                *((_SAMPLES, each) for each in samples),
                *((_LOCATIONS, each) for each in lines),
                *((_FUNCTIONS, each) for each in named),
                *((_TEXTS, each) for each in texts),
                (_TIME, time.time_ns()),
                *((_COMMENTS, each) for each in comments),
            ]
        ),
        mtime=0,
    )
