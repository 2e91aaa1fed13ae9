"""A call of a step: its signature, its abstract form, and how the user wrote it."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.programs.steps.leaves import parameter_names
from jaxmem_callbacks.records.source_files import Owner, owner_of
from jaxmem_callbacks.transforms.frameworks import framework_of
from jaxmem_callbacks.transforms.tracing import traced_dtype


@dataclass(frozen=True, slots=True)
class AbstractCall:
    """Arguments of a call, each array by its shape, dtype and named sharding."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def abstract_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractCall | None:
    """The call without its arrays; deleted ones still know their shapes. None where a tree cannot be made again."""
    try:
        framework = framework_of(args, kwargs)
        if framework is None:
            return AbstractCall(*jax.tree.map(abstract, (args, kwargs)))
        arrays, join = framework.apart((args, kwargs))
        return AbstractCall(*join([abstract(array) for array in arrays]))
    except Exception:  # noqa: BLE001 - what is only kept for a report must not stop a step that works
        return None


def has_real_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every leaf of a call has a value, not only a shape: an array donated to an earlier call has none."""
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(each, (Tracer, jax.ShapeDtypeStruct)) or framework_of(each) is not None for each in leaves):
        return False
    return not any(isinstance(each, jax.Array) and each.is_deleted() for each in leaves)


def abstract(leaf: Any) -> Any:
    """An array by its shape, dtype and named sharding; anything else as it is."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    place = getattr(leaf, "sharding", None)
    named = place if isinstance(place, jax.sharding.NamedSharding) else None
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf), sharding=named, weak_type=weak)


_STEP = "JitStep.__call__"


def written_arguments(step: Callable[..., Any]) -> dict[str, str]:
    """Name of a parameter -> the code that the user's running call of a step gives for it, where that is a name or an attribute.

    Args:
        step: The user's function, whose parameters count.
    """
    call = _running_call()
    if call is None or any(isinstance(each, ast.Starred) for each in call.args):
        return {}
    given = {
        **dict(zip(parameter_names(step), call.args, strict=False)),
        **{each.arg: each.value for each in call.keywords},
    }
    return {
        name: ast.unparse(node) for name, node in given.items() if name and isinstance(node, ast.Name | ast.Attribute)
    }


def _running_call() -> ast.Call | None:
    """The call of a step that the innermost function of the user's own is in; None where it is another, or has no source."""
    inner, frame = None, inspect.currentframe()
    while frame is not None and owner_of(frame.f_code.co_filename) is not Owner.USER:
        inner, frame = frame, frame.f_back
    if frame is None or inner is None or inner.f_code.co_qualname != _STEP:
        return None
    places = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(places, (None, None, None, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [
        text.encode() for text in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[line - 1 : end_line]
    ]
    if not lines:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        found = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file is another one by now
        return None
    return found if isinstance(found, ast.Call) else None
