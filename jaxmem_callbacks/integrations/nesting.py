"""One checkpoint at a time: a module inside one that is already rematerialised runs as its author wrote it.

The marks ride in JAX's own trace context, which is part of every jit cache key: what was traced inside a checkpoint, or
under some patterns, is never reused outside.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxmem_callbacks._compat.checkpoints import inside_checkpoint
from jaxmem_callbacks.records.errors import PolicyError

_INSIDE = "inside a checkpoint"


@functools.cache
def _context() -> Any:
    """JAX's user context, made on first use: importing the package must not touch JAX's configuration."""
    return jax.make_user_context(())


def marked(mark: object) -> AbstractContextManager[None]:
    """A context in which nothing traced elsewhere is reused; ``mark`` is compared by equality."""
    return _context()((*_context().value, mark))


def is_marked() -> bool:
    """Whether any such context is around the code being traced."""
    return bool(_context().value)


def rematerialising() -> AbstractContextManager[None]:
    """The context in which a checkpoint of ours is being traced."""
    return marked(_INSIDE)


def is_rematerialising() -> bool:
    """Whether the code being traced is inside a checkpoint that `remat` by module made."""
    return _INSIDE in _context().value


def refuse_second_checkpoint(name: str) -> None:
    """Refuse to put a module's checkpoint inside one that its caller wrote.

    Raises:
        PolicyError: names the module and what to change.
    """
    if inside_checkpoint():
        msg = (
            f"{name} is called inside a checkpoint that is already there (nn.remat, nnx.remat or jax.checkpoint in the "
            "model or around the loss). A second one inside it would compute the module three times. Remove that one, or "
            "leave this module out of the pattern."
        )
        raise PolicyError(msg)
