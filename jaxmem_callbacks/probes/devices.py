"""The local devices of a started process, described: platform, maker's name, what the allocator says, memory by the table.

Cost: about a microsecond a device. Nothing is allocated on them, so that no pool is taken.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmem_callbacks.probes.allocator import statistics_of
from jaxmem_callbacks.probes.protocol import device_label
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.records.environment import DeviceFacts, Platform


def devices_here() -> tuple[DeviceFacts, ...]:
    """This process's devices. Starts the backend where nothing has yet."""
    return tuple(
        DeviceFacts(
            label=device_label(device),
            platform=_platform(device),
            kind=device.device_kind,
            statistics=statistics_of(device),
            total_bytes=memory_of_kind(device.device_kind),
        )
        for device in jax.local_devices()
    )


def _platform(device: Any) -> Platform:
    """What a device is; JAX calls the GPUs of both makers ``gpu``."""
    if device.platform == "gpu":
        return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
    return "tpu" if device.platform == "tpu" else "cpu"
