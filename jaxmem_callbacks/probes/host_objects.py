"""The largest containers of this process's Python objects, by what they hold: a list of 404 ndarray, some 1.4 GiB.

Asked once, when the host's memory is seen to grow, on the monitor's own thread. Python's garbage collector lists containers, and
what they hold it finds too: a dict of bytes is in no list of its own. Of those with many elements a few are weighed. JAX's arrays
weigh nothing here: they are counted apart.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxmem_callbacks.records.units import format_bytes

_CONTAINERS = (list, dict, deque, set, tuple)
_MANY = 64  # elements: what grows by the step soon has more
_WEIGHED = 16  # of them
_PARTS, _DEPTH = 16, 3  # of an element, such as a batch in a dict
_SHOWN = 2
_AT_ONCE = 5_000  # objects: the collector holds all threads up for so many
_MOST_S = 0.2


def largest_containers(least: int) -> tuple[str, ...]:
    """The largest few, in words, the largest first.

    Args:
        least: Bytes below which one is not worth a word.
    """
    found: dict[int, tuple[int, str]] = {}
    for each in _containers():
        if id(each) not in found and len(each) >= _MANY:
            found[id(each)] = _weighed(each)
    worth = sorted((each for each in found.values() if each[0] >= least), reverse=True)
    return tuple(words for _, words in worth[:_SHOWN])


def _containers() -> Iterator[Collection[Any]]:
    """Those that the collector lists; then those in them, as far as the time goes."""
    until_s = time.thread_time() + _MOST_S
    every = gc.get_objects()[::-1]  # a script's own are younger than its imports
    yield from (each for each in every if type(each) in _CONTAINERS)
    for first in range(0, len(every), _AT_ONCE):
        if time.thread_time() > until_s:
            return
        inside = gc.get_referents(*every[first : first + _AT_ONCE])
        yield from (each for each in inside if type(each) in _CONTAINERS)


def _weighed(container: Collection[Any]) -> tuple[int, str]:
    """About how many bytes it holds, and what in words; nothing of one that another thread changes meanwhile."""
    values: Iterable[Any] = container.values() if isinstance(container, Mapping) else container
    count = len(container)
    try:
        some = list(itertools.islice(values, 0, None, max(count // _WEIGHED, 1)))
    except RuntimeError:
        return 0, ""
    size = sum(_bytes(each, _DEPTH) for each in some) * count // max(len(some), 1)
    kind = Counter(type(each).__name__ for each in some).most_common(1)[0][0] if some else "nothing"
    return size, f"a {type(container).__name__} of {count} {kind}, some {format_bytes(size)}"


def _bytes(value: Any, depth: int) -> int:
    """Bytes of a value and, where it is small, of its parts."""
    if isinstance(value, jax.Array):
        return 0
    data = getattr(value, "nbytes", None) if type(value).__module__.partition(".")[0] in ("numpy", "builtins") else None
    if isinstance(data, int):
        return data
    size = sys.getsizeof(value, 0)
    if depth and type(value) in _CONTAINERS and len(value) <= _PARTS:
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        size += sum(_bytes(each, depth - 1) for each in list(parts))
    return size
