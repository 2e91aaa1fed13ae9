"""The simulated allocator against the real one: a case's requests run on this device's pool and on the model of it.

A case's answer is for how many requests addresses and statistics were alike, and the first that were not; null where the
allocator reports nothing. Arrays come from programs without arguments, so that a
program's only memory is its result; what a case's programs need besides is an array too, given back at once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem_callbacks.records.traces import Alloc, Free, ProgramStart, Trace
from jaxmem_callbacks.simulator.allocators import Bfc
from jaxmem_callbacks.simulator.cases import CASES

CASE_POOL = 12 * 2**30  # 75 % of the device that the cases are modelled for
COMPARED = ("bytes_in_use", "pool_bytes", "largest_free_block_bytes")
_LEAST_SCALED = 2**20  # what is smaller stays: a loss has four bytes on every device

Request = tuple[str, int, int]  # "take" or "give", the block's name, its bytes
Row = dict[str, Any]  # where it is (None: refused), and the statistics afterwards


def requests_of(trace: Trace, scale: float) -> list[Request]:
    """A trace as requests of a pool, its large sizes scaled."""
    names: dict[int, int] = {}  # a result that reuses memory goes by the first name of that memory
    sizes: dict[int, int] = {}
    found: list[Request] = []

    def take(name: int, size: int) -> None:
        sizes[name] = max(round(size * scale), 1) if size >= _LEAST_SCALED else size
        names[name] = name
        found.append(("take", name, sizes[name]))

    for event in trace.events:
        if isinstance(event, Alloc):
            take(event.id, event.bytes)
        elif isinstance(event, Free):
            first = names.pop(event.id)
            found.append(("give", first, sizes[first]))
        elif isinstance(event, ProgramStart):
            for output in event.outputs:
                if output.reuses is None:
                    take(output.id, output.bytes)
                else:
                    names[output.id] = names.pop(output.reuses)
            if event.temp_bytes:
                temporaries = -event.run
                take(temporaries, event.temp_bytes)
                found.append(("give", temporaries, sizes[temporaries]))
    return found


def modelled(requests: Sequence[Request], pool: Bfc) -> list[Row]:
    """What the model does, up to the first request that it refuses."""
    held: dict[int, int] = {}
    rows: list[Row] = []
    for kind, name, size in requests:
        address = pool.allocate(size) if kind == "take" else held.pop(name)
        if kind == "take" and address is not None:
            held[name] = address
        if kind == "give":
            pool.free(address or 0)
        rows.append({"address": address, **{key: pool.statistics()[key] for key in COMPARED}})
        if address is None:
            break
    return rows


def really(
    requests: Sequence[Request], make: Callable[[int], Any], statistics: Callable[[], Mapping[str, int] | None]
) -> Iterator[Row]:
    """What the device does, likewise."""
    held: dict[int, Any] = {}
    for kind, name, size in requests:
        try:
            array = make(size) if kind == "take" else held.pop(name)
            address = array.unsafe_buffer_pointer()
        except RuntimeError:
            yield {"address": None, **dict.fromkeys(COMPARED)}
            return
        if kind == "take":
            held[name] = array
        else:
            array.delete()
        counters = statistics() or {}
        yield {"address": address, **{key: counters.get(key) for key in COMPARED}}


def compared(model: Sequence[Row], real: Sequence[Row], regions: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """After how many requests both are alike; addresses as distances from the first block in the same region."""
    bases: dict[int, int] = {}
    alike, first, unknown = 0, None, set[str]()
    for number, (ours, theirs) in enumerate(zip(model, real, strict=False)):
        unlike = [name for name in COMPARED if theirs[name] is not None and ours[name] != theirs[name]]
        unknown |= {name for name in COMPARED if theirs[name] is None and theirs["address"] is not None}
        if (ours["address"] is None) != (theirs["address"] is None):
            unlike.append("refused")
        elif ours["address"] is not None:
            region = next(start for start, size in regions if start <= ours["address"] < start + size)
            base = bases.setdefault(region, theirs["address"] - ours["address"])
            if theirs["address"] - ours["address"] != base:
                unlike.append("address")
        if unlike:
            first = {"request": number, "unlike": unlike, "model": ours, "device": theirs}
            break
        alike += 1
    return {
        "requests": len(model),
        "alike": alike,
        "first_unlike": first,
        "refused_at": len(model) - 1 if model and model[-1]["address"] is None else None,
        "device_refused_at": len(real) - 1 if real and real[-1]["address"] is None else None,
        "not_reported": sorted(unknown),
    }


def simulated_against_device(case: str, *, small: bool) -> dict[str, Any]:
    """Run a case on this process's device and on the model of its pool."""
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]

    @functools.cache
    def program(size: int) -> Any:
        return jax.jit(lambda: jnp.zeros((size,), jnp.uint8)).lower().compile()

    def make(size: int) -> Any:
        return jax.block_until_ready(program(size)())

    at_rest = device.memory_stats() or {}
    limit = at_rest.get("bytes_limit") or (64 * 2**20 if small else CASE_POOL)
    requests = requests_of(CASES[case](), limit / CASE_POOL)[: 200 if small else None]
    for size in sorted({size for kind, _, size in requests if kind == "take"}):
        program(size)  # compiled before anything is allocated
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") not in ("false", "False", "0")
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    pool = Bfc(limit, preallocate=preallocate, partitioned=version >= (0, 11))
    model = modelled(requests, pool)
    reports = bool(at_rest)
    real = list(really(requests, make, device.memory_stats))
    comparison = compared(model, real, pool.regions()) if reports else None
    return {
        "case": case,
        "limit_bytes": at_rest.get("bytes_limit"),
        "in_use_at_rest_bytes": at_rest.get("bytes_in_use"),
        "preallocate": preallocate,
        "partitioned": version >= (0, 11),
        "requests_run": len(real),
        "compared": comparison,
        "unknown": None if reports else "the allocator reports nothing here, and its addresses are another's",
    }
