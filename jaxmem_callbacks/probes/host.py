"""Host memory: the process's resident bytes, and the largest containers of Python objects that hold it.

Resident bytes: the resident set as the operating system counts it, all memory kinds of the process together; on CPU it includes
the arrays. Cost: tens of microseconds.

Containers: such as ``train.seen, a list of 404 ndarray, some 1.4 GiB``, of those that a user's own variables hold. Looked for
once, when the host's memory is seen to grow, on the monitor's own thread. The look begins at the globals of the user's modules
and, from Python 3.13, at the local variables of functions that run: an older Python that is asked for local variables keeps a
copy of them alive. It never asks the garbage collector for all objects, since that list holds tuples that other threads are still
building, and CPython then fails in those threads. JAX's arrays weigh nothing here: they are counted apart.
"""

from __future__ import annotations

import collections
import gc
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, final

import psutil

from jaxmem_callbacks.records.runs import Reading, Unavailable
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.records.units import format_bytes


@final
class HostProbe:
    """Reads the resident memory of this process."""

    def read(self, step: int) -> Sequence[Reading | Unavailable]:
        """One reading with the device label ``host``."""
        try:
            resident = psutil.Process().memory_info().rss
        except (psutil.Error, OSError) as error:  # a sandbox may hide /proc
            return [Unavailable(figure="host", device="host", reason=f"the operating system refuses: {error}")]
        return [Reading(source="host", device="host", step=step, time_s=time.time(), resident_bytes=resident)]


_CONTAINERS = tuple(
    id(each) for each in (list, dict, collections.deque, set, frozenset, tuple, collections.OrderedDict)
)
_MAPPINGS = (id(dict), id(collections.OrderedDict))
_PLAIN = tuple(id(each) for each in (bytes, bytearray, str, int, float, complex))
_OF_PYTHON = ("types", "collections", "argparse")  # their instances hold what users put into them
_ARRAYS = ("jax", "jaxlib")
_MANY = 64  # elements: what grows by the step soon has more
_SAMPLE = 16  # of them
_PARTS, _DEPTH = 16, 3  # of an element, such as a batch in a dict
_SHOWN = 2
_MOST_S = 0.05  # that what was looked at is held for, and so may outlive its last user
_MOST_LOOK_S = 0.5  # for all modules and functions: the look shares Python's lock with the user's own threads
_LOCALS_ARE_VIEWS = sys.version_info >= (3, 13)  # PEP 667


def largest_containers(least: int) -> tuple[str, ...]:
    """The largest few, in words, the largest first. Whatever cannot be looked at is left out.

    Args:
        least: Bytes below which one is not worth a word.
    """
    sizes: dict[tuple[int, ...], tuple[int, str]] = {}  # by their elements: a copy of a list holds nothing more
    for name, container in _large_containers():
        try:
            sample = _sample(container)
            size = _sample_bytes(sample, len(container))
            kind = collections.Counter(type(each).__name__ for each in sample).most_common(1)[0][0]
            text = f"{name}, a {type(container).__name__} of {len(container)} {kind}, some {format_bytes(size)}"
            sizes.setdefault(tuple(sorted(map(id, sample))), (size, text))
        except Exception:  # noqa: BLE001, S112 - another thread changes it meanwhile, or its elements are odd
            continue
    large = sorted((each for each in sizes.values() if each[0] >= least), reverse=True)
    return tuple(text for _, text in large[:_SHOWN])


def _large_containers() -> Iterator[tuple[str, Any]]:
    """The containers of many elements that the user's variables reach, a module or a function after the other."""
    modules = _users_modules()
    inside = frozenset({*modules, *_OF_PYTHON})
    seen: set[int] = set()
    end_s = time.monotonic() + _MOST_LOOK_S
    for variables in _variables(modules):
        yield from _reached(variables, inside, seen, min(time.monotonic() + _MOST_S, end_s))


def _reached(
    variables: Iterable[tuple[str, Any]], inside: frozenset[str], seen: set[int], until_s: float
) -> Iterator[tuple[str, Any]]:
    """The containers of many elements that some variables reach, breadth first, as far as the time goes."""
    waiting = collections.deque(variables)
    while waiting and time.monotonic() < until_s:
        name, value = waiting.popleft()
        try:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(type(value)) in _CONTAINERS:
                if len(value) >= _MANY:
                    yield name, value
                else:
                    waiting += _parts(name, value)
            elif not issubclass(type(value), type) and str(type(value).__module__) in inside:
                waiting += _attributes(name, value)
        except Exception:  # noqa: BLE001, S112 - the user's own type, and the event matters more than its look
            continue


def _users_modules() -> dict[str, dict[str, Any]]:
    """The globals of each of the user's own modules, a notebook's among them."""
    own = {}
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        file = names.get("__file__") if type(names) is dict else None
        if type(names) is dict and (name == "__main__" or (isinstance(file, str) and owner_of(file) is Owner.USER)):
            own[name] = names
    return own


def _variables(modules: dict[str, dict[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """The globals of each module and, where looking leaves nothing behind, the local variables of each function that runs."""
    for module, names in modules.items():
        prefix = "" if module == "__main__" else f"{module}."
        yield [(f"{prefix}{name}", value) for name, value in list(names.items()) if not name.startswith("__")]
    if _LOCALS_ARE_VIEWS:
        for thread in sys._current_frames().values():  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - a documented function
            frame: FrameType | None = thread
            while frame is not None:
                if owner_of(frame.f_code.co_filename) is Owner.USER and frame.f_locals is not frame.f_globals:
                    function = frame.f_code.co_qualname
                    yield [(f"{name} in {function}", value) for name, value in dict(frame.f_locals).items()]
                frame = frame.f_back


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an instance refers to, without the calls of its own methods that `getattr` may make."""
    for each in gc.get_referents(value):
        if type(each) is dict:
            yield from ((f"{name}.{key}", part) for key, part in list(each.items()))
        else:
            yield name, each


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if id(type(value)) in _MAPPINGS:
        return ((f"{name}[{key!r}]" if type(key) is str else name, each) for key, each in list(value.items()))
    return ((name, each) for each in list(value))


def _sample(container: Any) -> Sequence[Any]:
    """Some of its elements: spread over those of a sequence, the first of any other."""
    if id(type(container)) in (id(list), id(tuple), id(collections.deque)):
        count = len(container)
        return [container[at] for at in range(0, count, max(count // _SAMPLE, 1))]
    return list(itertools.islice(container.values() if id(type(container)) in _MAPPINGS else container, _SAMPLE))


def _sample_bytes(sample: Sequence[Any], count: int) -> int:
    """About how many bytes ``count`` elements hold that are like these. What several of them share is counted once."""
    owners: set[int] = set()
    own = []
    for element in sample:
        held = {owner: size for owner, size in _bytes(element, _DEPTH) if owner not in owners}
        owners.update(held)
        own.append(sum(held.values()))
    first, *more = own
    return first + sum(more) * (count - 1) // max(len(more), 1)


def _bytes(value: Any, depth: int) -> Iterator[tuple[int, int]]:
    """Id and bytes of what a value holds: its own memory and, where it is small, that of its parts."""
    import numpy as np  # `jaxmem doctor` reads the resident bytes without it

    kind = type(value)
    if kind is np.ndarray:
        owner = value
        while type(owner.base) is np.ndarray:
            owner = owner.base
        # Another base is a file that is mapped into memory, or another library's.
        yield id(owner), owner.nbytes if owner.base is None else 0
    elif id(kind) in _PLAIN:
        yield id(value), sys.getsizeof(value)
    elif id(kind) in _CONTAINERS:
        yield id(value), sys.getsizeof(value)
        if depth and len(value) <= _PARTS:
            for _, part in _parts("", value):
                yield from _bytes(part, depth - 1)
    elif depth and str(kind.__module__).partition(".")[0] not in _ARRAYS and not issubclass(kind, type):
        for part in gc.get_referents(value)[:_PARTS]:
            yield from _bytes(part, depth - 1)
