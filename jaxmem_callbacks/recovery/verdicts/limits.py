"""What bounds this process's memory now: the operating system's files and the allocators enter, `MemoryLimit`s leave.

Host: the address space and data limits of the process, its control group, and the machine. Nothing here asks for memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxmem_callbacks.records.oom import MemoryLimit
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.units import KIB

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
