"""What the driver counts on each GPU besides JAX's pool.

JAX's own arrays lie in its pool. The CUDA context, cuDNN and NCCL, other frameworks of this process and other processes do not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxmem_callbacks.probes.driver import DriverProbe
from jaxmem_callbacks.records.oom import OnTheCard
from jaxmem_callbacks.records.readings import Reading

_FRAMEWORKS = ("torch", "tensorflow", "cupy", "paddle", "mxnet", "numba.cuda", "cudf", "rmm", "warp", "taichi")


def on_the_cards(allocator: Sequence[Reading], probe: DriverProbe | None = None) -> tuple[OnTheCard, ...]:
    """What is taken on each device that the driver knows.

    Args:
        allocator: What the allocators say; their pools are JAX's part.
        probe: Asks the driver; by default of the local devices.
    """
    probe = probe or DriverProbe()
    pools = {each.device: each.pool_bytes for each in allocator}
    used = [each for each in probe.read(-1) if isinstance(each, Reading) and each.device_used_bytes is not None]
    processes = probe.processes() if used else {}
    frameworks = tuple(name for name in _FRAMEWORKS if name in sys.modules)
    return tuple(
        OnTheCard(
            device=each.device,
            used_bytes=each.device_used_bytes or 0,
            pool_bytes=pools.get(each.device),
            own_bytes=dict(processes.get(each.device, ())).get(os.getpid()),
            others=tuple((pid, size) for pid, size in processes.get(each.device, ()) if pid != os.getpid()),
            frameworks=frameworks,
        )
        for each in used
    )
