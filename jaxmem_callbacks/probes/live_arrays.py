"""Live arrays: bytes and number of the `jax.Array`s that Python still holds, for each local device.

Measured: device memory of arrays in the device's default memory (arrays in host memory are left out). Backends: all; it sees no
temporaries of programs. Cost: 0.1 to 8 milliseconds, so it runs on the monitor's own thread, never in a hook.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import jax

from jaxmem_callbacks.probes.protocol import Device, device_label
from jaxmem_callbacks.records.readings import Reading, Unavailable


@final
class LiveArraysProbe:
    """Counts live arrays. It survives arrays that are deleted meanwhile and keeps none alive."""

    def read(self, step: int) -> Sequence[Reading | Unavailable]:
        """One reading a local device, also where it holds nothing."""
        now = time.time()
        devices = jax.local_devices()
        totals = {device: [0, 0] for device in devices}
        kinds = {device: device.default_memory().kind for device in devices}
        for array in jax.live_arrays():
            _add(array, totals, kinds)
        return [
            Reading(
                source="live_arrays",
                device=device_label(device),
                step=step,
                time_s=now,
                live_array_bytes=totals[device][0],
                live_array_count=totals[device][1],
            )
            for device in devices
        ]


def _add(array: jax.Array, totals: dict[Device, list[int]], kinds: dict[Device, str]) -> None:
    sharding = array.sharding
    try:
        everywhere = array.on_device_size_in_bytes()
    except RuntimeError:  # deleted or donated since the list was made
        return
    share = everywhere // len(sharding.device_set)
    for device in sharding.addressable_devices:
        if device in totals and sharding.memory_kind in (None, kinds[device]):
            totals[device][0] += share
            totals[device][1] += 1
