"""Whether JAX has read the settings of its clients in this process. It reads them once, at the first use of a backend.

JAX offers no public question for it. Where its internals do not answer, a setting that JAX refuses once a backend exists does:
``jax_num_cpu_devices``, set to another value and back. That sees no process in which only the plugins were loaded.
"""

from __future__ import annotations

import sys
from typing import Any


def settings_were_read() -> bool:
    """Whether a backend exists, or the plugins were loaded with the settings as they were then. Imports no JAX."""
    if "jax" not in sys.modules:
        return False
    try:
        from jax._src import xla_bridge

        bridge: Any = xla_bridge
        return bool(bridge.backends_are_initialized() or bridge._plugins_registered)  # noqa: SLF001 - there is no public one
    except (ImportError, AttributeError):
        return backend_refuses_settings()


def backend_exists() -> bool:
    """Whether a backend was started, so that asking for devices starts none. Imports no JAX."""
    if "jax" not in sys.modules:
        return False
    try:
        from jax._src import xla_bridge

        bridge: Any = xla_bridge
        return bool(bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return backend_refuses_settings()


def backend_refuses_settings() -> bool:
    """The public answer: whether JAX refuses a setting that must come before the backend."""
    import jax

    config: Any = jax.config  # its types name no settings on jax 0.10
    before = config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(before, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False
