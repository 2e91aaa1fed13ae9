"""Arrays moved together on a GPU: whether this is small enters; what `jm.defragment` made of a fragmented pool leaves.

Two pools are filled and holes made in them: one where small arrays are between large holes, and one where the arrays are as large
as the holes, so that copies on the device and ways through the host are both asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_questions import MIB, error_of, our_reading, stats, value

SHAPES = {"small_between_large_holes": (64, 1), "as_large_as_the_holes": (64, 48)}
LOW_MIB = 8  # what is put in first and let go of first, so that there is a lower place


def moved_together(*, small: bool) -> dict[str, Any]:
    """Copies on the device by either way, and the two pools."""
    from jaxmem_callbacks.recovery.moving.mover import copied_by_program, copied_by_runtime

    x = jax.block_until_ready(jnp.arange((1 if small else 64) * MIB // 4, dtype=jnp.float32))
    copies = {}
    for way in (copied_by_runtime, copied_by_program):
        made: list[jax.Array] = []
        failed = error_of(lambda way=way, made=made: made.append(way(x)) or made[0])
        other = bool(made) and made[0].unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
        copies[way.__name__] = {"error": failed, "another_buffer": other}
    return {"copies": copies, **{name: pool(*sizes, small=small) for name, sizes in SHAPES.items()}}


def pool(hole_mib: int, kept_mib: int, *, small: bool) -> dict[str, Any]:
    """One pool: filled, holes made, moved together. What was asked for before, that only one piece can hold, is asked again."""
    import jaxmem_callbacks as jm

    unit = MIB // 64 if small else MIB
    limit = value(stats(), "bytes_limit")
    count = 8 if limit is None else int(0.8 * limit) // ((hole_mib + kept_mib) * unit)
    first = block(LOW_MIB * unit, 0)
    kept, holes = [], []
    for number in range(count):
        holes.append(block(hole_mib * unit, number))
        kept.append(block(kept_mib * unit, number))
    for array in (first, *holes):
        array.delete()
    free = (limit or 0) - (value(stats(), "bytes_in_use") or 0)
    asked = int(0.8 * free)
    refused = error_of(lambda: jnp.zeros((asked // 4,), jnp.float32)) if limit else None
    before = our_reading()
    kept, report = jm.defragment(kept)
    totals = {name: getattr(report, name) for name in ("device_bytes", "host_bytes", "device_share", "host_share")}
    figures = {
        field.name: getattr(report, field.name)
        for field in dataclasses.fields(report)
        if field.name not in ("moved", "stayed")
    }
    figures |= {
        name: {device: dataclasses.asdict(blocks) for device, blocks in figures[name].items()}
        for name in ("before", "after")
    }
    answer = {
        "arrays": count,
        "asked_bytes": asked,
        "error_before": refused,
        "error_after": error_of(lambda: jnp.zeros((asked // 4,), jnp.float32)) if limit else None,
        "values_intact": all(float(np.asarray(array[-1])) == number for number, array in enumerate(kept)),
        "reading_before": before,
        "reading_after": our_reading(),
        "moves": [dataclasses.asdict(each) for each in report.moved[:64]],
        "moved": len(report.moved),
        "went_lower": sum(each.after < each.before for each in report.moved),
        **figures,
        **totals,
    }
    for array in kept:
        array.delete()
    return answer


def block(size: int, number: int) -> jax.Array:
    """An array of so many bytes."""
    return jax.block_until_ready(jnp.full((max(1, size // 4),), number, jnp.float32))
