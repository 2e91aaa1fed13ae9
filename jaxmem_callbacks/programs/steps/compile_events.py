"""How a step notices that JAX compiled something during its call: a count per thread, raised by JAX's own compile events.

A compile for a new sharding retraces nothing, so counting traces would miss it; the public `jax.monitoring` events do not.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCount(threading.local):
    """Backend compiles that this thread has asked for since `watch_compiles` was first called."""

    count: int = 0


compiles = CompileCount()


@functools.cache
def watch_compiles() -> None:
    """Begin to count, once a process: one listener that adds 1 and returns. JAX offers no way to take it back."""
    jax.monitoring.register_event_duration_secs_listener(_count)


def _count(event: str, duration_secs: float, **_: Any) -> None:  # noqa: ARG001 - JAX's signature
    if event == _COMPILED:
        compiles.count += 1
