"""JAX's newer checkpoints (``jax_remat3``): left aside for a while, and what their equations hold.

Private is the flag's own context manager, which holds for one thread, and the object in which an equation keeps its parameters.
Without the first the public flag is set and put back, for all threads; without the second nothing is read.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

try:
    from jax._src.config import remat3 as _flag  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
except ImportError:  # a JAX without the flag, or with it elsewhere
    _flag = None
_NAME = "jax_remat3"


@contextmanager
def first_checkpoints() -> Generator[None]:
    """Where a checkpoint or a name that is traced is that of JAX's first implementation, whatever ``jax_remat3`` says."""
    if _flag is not None:
        with _flag(False):
            yield
        return
    before = getattr(jax.config, _NAME, False)
    if not before:
        yield
        return
    jax.config.update(_NAME, False)
    try:
        yield
    finally:
        jax.config.update(_NAME, before)


def held_params(eqn: Any) -> dict[str, Any]:
    """Parameters that an equation keeps in an object of its own, as a newer checkpoint does; none of others."""
    return getattr(eqn.params.get("_prim"), "params", {})
