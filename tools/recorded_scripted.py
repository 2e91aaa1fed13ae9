"""Runs whose allocator is scripted: a CPU reports no allocator statistics. Training and live arrays are real, the rest is not.

The figures are those of a GPU's pool of 64 MiB in whole, read at every look of the monitor. `make gpu-check` records real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import recorded_models as models
from recorded_models import Watch

from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.probes.protocol import ScriptedProbe
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import Reading

STEPS, LOOKS, MIB = 130, 400, 2**20


def pool_that_splits_a_little(watch: Watch) -> None:
    """A fifth to two fifths of the free memory is in pieces."""
    _train(watch, lambda look: 0.2 + 0.2 * (look % 7) / 7)


def pool_that_splits_for_a_moment_and_is_small(watch: Watch) -> None:
    """All is in pieces, of less than 4 MiB."""
    _train(watch, lambda look: 0.9 if look % 9 == 0 else 0.1, free=3 * MIB, limit=128 * MIB)


def fragmentation(watch: Watch) -> None:
    """The largest free block shrinks to a tenth of what is free, and wavers there."""
    _train(watch, lambda look: min(0.9, look / 30) - 0.05 * (look % 3))


def near_oom_by_block(watch: Watch) -> None:
    """A program of a GPU, compiled elsewhere, takes its temporaries in one block; then small arrays split what is free."""
    _train(watch, lambda look: 0.1 if look < LOOKS // 10 else 0.4, block=30 * MIB)


def _train(
    watch: Watch, share: Callable[[int], float], *, free: int = 40 * MIB, limit: int = 64 * MIB, block: int = 0
) -> None:
    looks = [_readings(look, share(look), free, limit) for look in range(LOOKS)]
    probes = (LiveArraysProbe(), ScriptedProbe(looks))
    monitor = watch(probes=probes, fragmentation_min_bytes=4 * MIB, limit_bytes=None)
    if block:
        memory = ProgramMemory(
            name="large_step",
            platform="gpu",
            target="attached",
            argument_bytes=MIB,
            output_bytes=MIB,
            alias_bytes=MIB,
            temp_bytes=block,
        )
        registry.record(Compilation(program="large_step", time_s=time.time(), signature=(), memory=memory))
    models.run(monitor, STEPS)


def _readings(look: int, share: float, free: int, limit: int) -> tuple[Reading, Reading]:
    """What the allocator would report, and the live arrays that it would hold."""
    held, now = 64 * MIB - free, time.time() + look / 50
    allocator = Reading(
        source="allocator",
        device="gpu:0",
        step=look,
        time_s=now,
        in_use_bytes=held,
        limit_bytes=limit,
        pool_bytes=64 * MIB,
        largest_free_bytes=int(free * (1 - share)),
    )
    live = Reading(
        source="live_arrays", device="gpu:0", step=look, time_s=now, live_array_bytes=held, live_array_count=9
    )
    return allocator, live
