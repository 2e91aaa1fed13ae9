"""Heap maps: the addresses of live arrays, for each local device that has addresses.

Measured: where the buffers of arrays lie that are ready. Backends: CPU and GPU. Cost: about 10 microseconds an array.

Two facts of the runtime decide how it is used. Asking an array for its address may wait until its memory is there, so only
arrays that are ready are asked. And while an address is asked for, the runtime lends the buffer out: a step that donates it at
that moment fails on a GPU, and copies it on a CPU. So this runs on the thread that calls the hook, and on no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxmem_callbacks._compat.array_parts import live_arrays, parts_of
from jaxmem_callbacks.probes.protocol import Device, device_label
from jaxmem_callbacks.records.arrays import HeapMap, LiveBuffer
from jaxmem_callbacks.records.readings import Unavailable

MOST_ARRAYS = 5000  # asking so many takes some 50 milliseconds of the training thread
_ADDRESSED = ("cpu", "gpu")


@final
class HeapProbe:
    """Maps what Python holds. It keeps no array alive and waits for none.

    Args:
        most_arrays: With more live arrays than these nothing is read.
    """

    def __init__(self, most_arrays: int = MOST_ARRAYS) -> None:
        self._most = most_arrays

    def read(self, step: int) -> Sequence[HeapMap | Unavailable]:
        """One map a device that has addresses; call it on the thread that dispatches the steps."""
        devices = jax.local_devices()
        addressed = [device for device in devices if device.platform in _ADDRESSED]
        found: list[HeapMap | Unavailable] = [
            Unavailable(figure="heap_map", device=device_label(device), reason=f"{device.platform} has no addresses")
            for device in devices
            if device.platform not in _ADDRESSED
        ]
        arrays = live_arrays() if addressed else []
        if len(arrays) > self._most:
            why = f"{len(arrays)} arrays are alive, and asking more than {self._most} would hold the training thread up"
            return [
                *found,
                *(Unavailable(figure="heap_map", device=device_label(each), reason=why) for each in addressed),
            ]
        parts: dict[Device, list[LiveBuffer]] = {device: [] for device in addressed}
        left_out: dict[Device, list[int]] = {device: [0, 0] for device in addressed}
        for array in arrays:
            _add(array, parts, left_out)
        now = time.time()
        maps = [
            HeapMap(
                device=device_label(device),
                step=step,
                time_s=now,
                buffers=tuple(parts[device]),
                left_out_count=left_out[device][0],
                left_out_bytes=left_out[device][1],
            )
            for device in addressed
        ]
        return [*found, *maps]


def _add(array: Any, parts: dict[Device, list[LiveBuffer]], left_out: dict[Device, list[int]]) -> None:
    """One array's parts on the devices, with their addresses if it is ready."""
    # A deleted array is never asked whether it is ready: jaxlib 0.10.2 crashes the process.
    if array.is_deleted():
        return
    devices = [device for device in array.sharding.addressable_devices if device in parts]
    if not devices or array.sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return
    size = array.on_device_size_in_bytes() // len(array.sharding.device_set)
    asked = parts_of(array) if size and array.is_ready() else ()
    for part in asked:
        # Parts can be handed on one by one, and one of them be donated.
        if part.is_deleted():
            continue
        (device,) = part.devices()
        label = f"{part.dtype}[{','.join(map(str, part.shape))}]"
        parts[device].append(LiveBuffer(address=part.unsafe_buffer_pointer(), bytes=size, label=label))
    for device in devices if size and not asked else ():
        left_out[device][0] += 1
        left_out[device][1] += size
