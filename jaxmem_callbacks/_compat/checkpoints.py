"""Whether a checkpoint that somebody else wrote is already there: around the code being traced, or around a function.

JAX offers no public question for either. Where its internals do not answer, the answer is "no": a second checkpoint then
costs a third computation, and never a wrong number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import jax

_LIBRARIES = ("jax.", "flax.")


def inside_checkpoint() -> bool:
    """Whether the code now being traced is inside a `jax.checkpoint`, `nn.remat` or `nnx.remat`."""
    return any("remat" in purpose for purpose in _purposes())


def is_checkpointed(function: Callable[..., Any]) -> bool:
    """Whether a function was decorated with `jax.checkpoint` or a framework's form of it."""
    checkpoint = getattr(inspect.unwrap(jax.checkpoint), "__globals__", None)
    return any(layer.__globals__ is checkpoint for layer in _layers(function))


def _purposes() -> Iterator[str]:
    """What each surrounding trace was started for, innermost first: ``scan``, ``jit``, ``checkpoint / remat``, ..."""
    try:
        from jax._src import core

        trace: Any = core.trace_ctx.trace
    except (ImportError, AttributeError):
        return
    while trace is not None:
        debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
        yield str(getattr(debug_info, "traced_for", ""))
        trace = getattr(trace, "parent_trace", None)


def _layers(function: Any) -> Iterator[FunctionType]:
    """The functions that decorators have put around one, as far as libraries wrote them; the user's own is the last."""
    pending, seen = [function], set[int]()
    while pending:
        layer = pending.pop()
        if not isinstance(layer, FunctionType) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        pending.append(getattr(layer, "__wrapped__", None))
        if str(layer.__globals__.get("__name__")).startswith(_LIBRARIES):
            pending.extend(cell.cell_contents for cell in layer.__closure__ or () if _is_filled(cell))


def _is_filled(cell: Any) -> bool:
    """Whether a closure's cell has a value yet."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
