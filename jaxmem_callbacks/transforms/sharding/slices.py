"""Axes and devices of several slices enter; the devices in a hybrid order leave, so that only the axes meant for it cross slices.

A slice is what fast links join: a TPU slice, or one process's devices (a node of GPUs) where the devices know no slices. What
crosses between slices is slow, so one axis, best the batch's, has its outer part there and all other axes stay inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError


def slice_count(devices: Sequence[Any]) -> int:
    """How many slices the devices say that they are of; 1 where they say nothing."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def slices_by_axis(
    sizes: Mapping[str, int], devices: Sequence[Any], across: str | Mapping[str, int] | None
) -> dict[str, int]:
    """How many slices each axis crosses.

    Args:
        sizes: Axis -> size, filled in.
        devices: All devices of the mesh.
        across: What the user said: an axis, axes with counts, or nothing.

    Raises:
        PolicyError: axes that are none, counts that do not fit; nothing was said and no axis can cross the slices.
    """
    slices = slice_count(devices)
    parts = slices if slices > 1 else len({device.process_index for device in devices})
    what = f"{parts} slices" if slices > 1 else f"{parts} processes"
    if across is None:
        found = next((name for name, size in sizes.items() if size % slices == 0), None)
        if found is None:
            example = f'{{"data": {slices}, "fsdp": -1}}'
            msg = (
                f"Mesh: the devices are of {slices} slices, and no axis of {_text(sizes)} divides by {slices}. One axis has to "
                f"cross the slices, best the batch's. Type for example {advise('mesh.make', axes=example)}."
            )
            raise PolicyError(msg)
        return {name: slices if name == found else 1 for name in sizes}
    wanted = {across: parts} if isinstance(across, str) else dict(across)
    unknown = [name for name in wanted if name not in sizes]
    if unknown:
        msg = f"Mesh: across_slices names {', '.join(map(repr, unknown))}, which is no axis. Expected of: {', '.join(sizes)}."
        raise PolicyError(msg)
    wrong = [name for name, count in wanted.items() if count < 1 or sizes[name] % count]
    if wrong or math.prod(wanted.values()) != parts:
        given = ", ".join(f"{name}={count}" for name, count in wanted.items())
        msg = (
            f"Mesh: across_slices gives {given} for the axes {_text(sizes)}, and there are {what}. Expected counts whose product "
            f"is {parts}, each a divisor of its axis: across_slices={{'{next(iter(sizes))}': {parts}}}."
        )
        raise PolicyError(msg)
    return {name: wanted.get(name, 1) for name in sizes}


def hybrid_devices(sizes: Mapping[str, int], across: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The devices, ordered by `mesh_utils.create_hybrid_device_mesh`.

    Raises:
        PolicyError: the slices are not of one size.
    """
    by_slice = slice_count(devices) > 1
    inside = [size // across[name] for name, size in sizes.items()]
    try:
        return mesh_utils.create_hybrid_device_mesh(
            inside, list(across.values()), list(devices), process_is_granule=not by_slice
        )
    except (ValueError, AssertionError) as error:
        msg = (
            f"Mesh: {_text(sizes)} cannot be laid over the slices: {error}. Expected slices of {math.prod(inside)} devices each. "
            "Give the devices of whole slices."
        )
        raise PolicyError(msg) from error


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
