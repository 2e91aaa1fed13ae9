"""A Python frame enters; whose file called it leaves: the user's own, an installed package, or this library."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types

from jaxmem_callbacks.records.source_files import Owner, owner_of, short_path

# Functions of JAX that trace to tell shapes, operations or costs, and run nothing: of 0.10 to 0.12.
_ASKING = {"eval_shape", "make_jaxpr_f", "jit_trace", "jit_lower", "jit_eval_shape"}


def caller_of(frame: types.FrameType | None) -> Owner:
    """Whose function called the function of a frame."""
    caller = None if frame is None else frame.f_back
    return Owner.PACKAGE if caller is None else owner_of(caller.f_code.co_filename)


def is_asked_for_shapes(frame: types.FrameType | None) -> bool:
    """Whether a frame is inside a trace that only tells what something would give, such as `jax.eval_shape`."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _ASKING and owner_of(code.co_filename) is Owner.PACKAGE:
            return True
        frame = frame.f_back
    return False


def call_of_user(frame: types.FrameType | None) -> str:
    """The function that the user's own code calls around a frame, as it is written there, such as ``model.fit``.

    Empty where the code is not to be read, or where what it calls has no name.
    """
    while frame is not None and owner_of(frame.f_code.co_filename) is not Owner.USER:
        frame = frame.f_back
    if frame is None:
        return ""
    line, end, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return ""
    place = (line, column, end, end_column)
    made = next(
        (each.func for each in calls if (each.lineno, each.col_offset, each.end_lineno, each.end_col_offset) == place),
        None,
    )
    return ast.unparse(made) if isinstance(made, ast.Name | ast.Attribute) else ""


def place_of_user(frame: types.FrameType | None) -> str:
    """The line of the user's own code around a frame, as ``train.py:12``; empty where there is none."""
    while frame is not None and owner_of(frame.f_code.co_filename) is not Owner.USER:
        frame = frame.f_back
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_of_user(function: object) -> bool:
    """Whether a function that is jitted is the user's own, whatever is around it."""
    inner = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return code is None or owner_of(code.co_filename) is Owner.USER
