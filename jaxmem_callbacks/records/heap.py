"""Heap maps: which buffers of live arrays lie where on one device. Addresses and bytes are ints, read at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBuffer:
    """The memory of one array on one device.

    Attributes:
        address: Where it begins, as the runtime says.
        bytes: Its length, padding included.
        label: Dtype and shape of the part on this device, such as ``float32[8,128]``.
    """

    address: int
    bytes: int
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeapMap:
    """The live buffers of one device.

    Attributes:
        device: Stable label such as ``gpu:0``.
        step: The step that had just been dispatched.
        time_s: Seconds since the epoch.
        buffers: In no order; arrays that share memory stand here each.
        left_out_count: Arrays whose address was not asked for, because they were still being computed.
        left_out_bytes: Their bytes on this device.
    """

    device: str
    step: int
    time_s: float
    buffers: Sequence[LiveBuffer]
    left_out_count: int = 0
    left_out_bytes: int = 0
