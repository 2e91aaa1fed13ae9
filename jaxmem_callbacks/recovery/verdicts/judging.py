"""Whether an exception is a failure for want of memory, and what bounds this process's memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.oom import MemoryLimit, OomFacts
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.units import KIB, format_bytes
from jaxmem_callbacks.recovery.texts.parsing import read_failure
from jaxmem_callbacks.recovery.verdicts.failing import Failing, failing_program, too_large
from jaxmem_callbacks.recovery.witness import CallsBefore

ADDRESS_SPACE = "address space (RLIMIT_AS)"
DATA = "data (RLIMIT_DATA)"
GROUP = "control group"
MACHINE = "the machine's memory and swap"


def host_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[MemoryLimit, ...]:
    """Every bound of host memory that is told here, the one with least left first.

    Args:
        proc: Where the kernel shows processes.
        groups: Where it shows control groups.
    """
    found = [*_of_the_process(proc), *_of_the_group(proc, groups), *_of_the_machine(proc)]
    return tuple(sorted(found, key=lambda limit: limit.left_bytes))


def device_limits(readings: Iterable[Reading]) -> tuple[MemoryLimit, ...]:
    """What the allocators of devices may use, by their own statistics."""
    return tuple(
        MemoryLimit(
            name=reading.device,
            limit_bytes=reading.limit_bytes,
            used_bytes=reading.in_use_bytes + (reading.reserved_bytes or 0),
            source="the allocator's statistics",
            largest_free_bytes=reading.largest_free_bytes,
            pool_bytes=reading.pool_bytes,
        )
        for reading in readings
        if reading.limit_bytes is not None and reading.in_use_bytes is not None
    )


def _of_the_process(proc: Path) -> Iterator[MemoryLimit]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    sizes = _kib_of(proc / "self" / "status")
    for name, kind, key in ((ADDRESS_SPACE, resource.RLIMIT_AS, "VmSize"), (DATA, resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and key in sizes:
            source = f"getrlimit, and {key} of /proc/self/status"
            yield MemoryLimit(name=name, limit_bytes=limit, used_bytes=sizes[key], source=source)


def _of_the_group(proc: Path, groups: Path) -> Iterator[MemoryLimit]:
    """The control group's bound (version 2, else 1); what it could give back without writing is not counted as used."""
    text = _text(proc / "self" / "cgroup")
    second = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    first = re.search(r"^\d+:(?:[\w,]*,)?memory(?:,[\w,]*)?:(/.*)$", text, re.MULTILINE)
    places = [
        *_around(groups, second[1] if second else "/", "memory.max", "memory.current", "inactive_file"),
        *_around(
            groups / "memory",
            first[1] if first else "/",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    yield from sorted(places, key=lambda limit: limit.left_bytes)[:1]


def _around(root: Path, path: str, most: str, used: str, spare: str) -> Iterator[MemoryLimit]:
    """The bounds of a group and of those around it; inside a container the path may begin anywhere, so the root counts too."""
    inner = root / path.strip("/")
    for folder in dict.fromkeys([inner, *[each for each in inner.parents if root in each.parents], root]):
        limit, taken = _number(folder / most), _number(folder / used)
        if limit is None or taken is None or limit >= 2**60:  # version 1 writes a number near 2**63 for none
            continue
        stat = re.search(rf"^{spare} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        held = max(taken - int(stat[1]), 0) if stat else taken
        yield MemoryLimit(name=GROUP, limit_bytes=limit, used_bytes=held, source=f"{most} and {used} of its group")


def _of_the_machine(proc: Path) -> Iterator[MemoryLimit]:
    sizes = _kib_of(proc / "meminfo")
    if {"MemTotal", "MemAvailable"} <= set(sizes):
        whole = sizes["MemTotal"] + sizes.get("SwapTotal", 0)
        left = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
        source = "MemTotal and MemAvailable, with swap, of /proc/meminfo"
        yield MemoryLimit(name=MACHINE, limit_bytes=whole, used_bytes=whole - left, source=source)


def _kib_of(path: Path) -> dict[str, int]:
    """``Name: 123 kB`` lines as bytes."""
    return {name: int(size) * KIB for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # another system, or a sandbox that hides it
        return ""


_CAUSES = 10  # `raise ... from ...` again and again
# JAX's own is a RuntimeError; of other types a name in passing is no proof.
_OF_RUNTIMES = (RuntimeError, MemoryError, OSError)
# An error of the user's own function, which the runtime wraps; it says itself what it is.
_OF_A_CALLBACK = ("CpuCallback error", "Traceback (most recent call last)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An exception that is an out-of-memory failure. Holds it, and the call that failed: not to be kept.

    Attributes:
        error: The exception itself, or the one that it was raised from.
        facts: What its text says.
        evidence: Why it is taken for one, in words.
        failing: The program, or None where nothing tells.
        limits: Bounds of host memory now.
    """

    error: BaseException
    facts: OomFacts
    evidence: str
    failing: Failing | None
    limits: tuple[MemoryLimit, ...] = ()


def judge(error: BaseException, before: CallsBefore | None = None) -> Verdict | None:
    """Whether an exception, or what it was explicitly raised from, is an out-of-memory failure.

    Args:
        error: What passes.
        before: The calls of steps before the code that failed; None where nobody counted.
    """
    if not isinstance(error, Exception):
        return None
    for each in _chain(error):
        if isinstance(each, JaxmemError) or not isinstance(each, Exception):
            return None
        found = _by_text(each, before) or _by_limits(each, before)
        if found is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, members of a group, and what it was explicitly raised from."""
    waiting, left = [error], _CAUSES
    while waiting and left:
        current, left = waiting.pop(0), left - 1
        yield current
        waiting += current.exceptions[:_CAUSES] if isinstance(current, BaseExceptionGroup) else ()
        waiting += [current.__cause__] if current.__cause__ is not None else []


def _by_text(error: Exception, before: CallsBefore | None) -> Verdict | None:
    # The text alone: an error that came while another was handled is not that one's failure.
    facts, surely = read_failure(f"{type(error).__name__}: {error}")
    evidence = "its text says so"
    if facts is not None and not surely and not _is_of_a_runtime(error):
        return None
    if facts is None and isinstance(error, MemoryError):
        facts, evidence = OomFacts(phase="run", platform="host"), "it is a MemoryError"
    if facts is None:
        return None
    found = failing_program(error, facts, before)
    if found is not None and found.compiling and facts.phase is None:
        facts = replace(facts, phase="compile")
    return Verdict(error=error, facts=facts, evidence=evidence, failing=found, limits=host_limits())


def _is_of_a_runtime(error: Exception) -> bool:
    of_a_callback = isinstance(error, jax.errors.JaxRuntimeError) and any(each in str(error) for each in _OF_A_CALLBACK)
    return isinstance(error, _OF_RUNTIMES) and not of_a_callback


def _by_limits(error: Exception, before: CallsBefore | None) -> Verdict | None:
    """An INTERNAL error on the CPU is one where the program takes more than some bound leaves."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or not text.lstrip().startswith("INTERNAL"):
        return None
    if not _is_of_a_runtime(error):
        return None
    limits = host_limits()
    tightest = min(limits, key=_bound, default=None)
    if tightest is None:
        return None
    found = too_large(error, _bound(tightest), before)
    own = None if found is None else found.own_bytes
    if found is None or found.memory is None or found.memory.platform != "cpu":
        return None
    library = ""
    if found.library_bytes:
        library = (
            f", {format_bytes(found.library_bytes)} of them in a kernel library that XLA's compiler does not count"
        )
    evidence = (
        f"its text says only {text.strip().splitlines()[0]!r}, but {found.name} takes {format_bytes(own)} besides its "
        f"arguments{library}, and {format_bytes(tightest.left_bytes)} of {format_bytes(tightest.limit_bytes)} are left of the "
        f"{tightest.name.removeprefix('the ')}"
    )
    facts = OomFacts(phase="run", platform="cpu")
    return Verdict(error=error, facts=facts, evidence=evidence, failing=found, limits=limits)


def _bound(limit: MemoryLimit) -> int:
    """What an allocation must exceed to be refused: a machine lends more than is left, and refuses only more than it has."""
    return limit.limit_bytes if limit.name == MACHINE else limit.left_bytes


def ran_out(error: BaseException) -> OomFacts | None:
    """What the exception says of memory, or None where it is no failure for want of it. Keeps nothing of the call."""
    verdict = judge(error)
    return None if verdict is None else verdict.facts
