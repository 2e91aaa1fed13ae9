"""How fast a device copies: a device and a size enter, bytes a second of one large copy leave; None where it finds no room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_MOST = 256 * 2**20
_TIMES = 3


def device_copy_rate(device: Any, size: int) -> float | None:
    """Bytes a second of copies on a device, of one array of at most 256 MiB.

    Args:
        device: Where.
        size: Bytes of the largest array that was moved so.
    """

    def once(array: jax.Array) -> None:
        jax.device_put(array, may_alias=False).block_until_ready()

    return _rate(device, size, once)


def host_link_rate(device: Any, size: int) -> float | None:
    """Bytes a second of copies from a device to the host and back, of one array of at most 256 MiB.

    Args:
        device: Where.
        size: Bytes of the largest array that was moved so.
    """

    def once(array: jax.Array) -> None:
        # A copy keeps what it brought to the host, so each time brings another.
        other = jax.device_put(array, may_alias=False)
        jax.device_put(np.array(other), device).block_until_ready()

    return _rate(device, size, once)


def _rate(device: Any, size: int, once: Callable[[jax.Array], None]) -> float | None:
    count = max(1, min(size, _MOST))
    try:
        array = jax.device_put(np.zeros(count, np.uint8), device).block_until_ready()
        times: list[float] = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            once(array)
            times.append(time.perf_counter() - began)
    except (jax.errors.JaxRuntimeError, MemoryError):
        return None
    return count / min(times)
