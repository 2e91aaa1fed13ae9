"""Python frames of a script: whose code calls, and how the script writes the step that it calls."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem_callbacks.records.source_files import Owner, owner_of, short_path

# Functions of JAX that trace to find shapes, operations or costs, and run nothing: of 0.10 to 0.12.
_ASKING = {"eval_shape", "make_jaxpr_f", "jit_trace", "jit_lower", "jit_eval_shape"}


def caller_of(frame: types.FrameType | None) -> Owner:
    """Whose function called the function of a frame."""
    caller = None if frame is None else frame.f_back
    return Owner.PACKAGE if caller is None else owner_of(caller.f_code.co_filename)


def is_asked_for_shapes(frame: types.FrameType | None) -> bool:
    """Whether a frame is inside a trace that only finds what something would return, such as `jax.eval_shape`."""
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


def variable_of_user(frame: types.FrameType | None, value: object) -> str:
    """The name that the user's own code around a frame has for an object; empty where it has none there."""
    while frame is not None and owner_of(frame.f_code.co_filename) is not Owner.USER:
        frame = frame.f_back
    scopes = () if frame is None else (frame.f_locals, frame.f_globals)
    return next((name for scope in scopes for name, held in scope.items() if held is value), "")


def is_of_user(function: object) -> bool:
    """Whether a function that is jitted is the user's own, whatever is around it."""
    inner = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return code is None or owner_of(code.co_filename) is Owner.USER


@dataclass(frozen=True, slots=True)
class Called:
    """What a script calls as its step.

    Attributes:
        name: As it is written: ``step``, ``trainer.step``, ``Trainer.train_step``.
        where: Where a line goes that gives the name another value, before it is called: ``above train.py:31``.
    """

    name: str
    where: str


def called_as(step: Any) -> Called | None:
    """How the script writes the step that it is calling; None where it has no name.

    Args:
        step: What was announced: a `JitStep` that the script made, or one around the jitted function that it calls.
    """
    calls = list(_calls_of_user(inspect.currentframe()))
    frames = [each.f_back for each in calls if each.f_back is not None]
    found = _called_in(frames, step) if frames else None
    if found is None or _is_ours(calls[0]):
        return found
    # An installed package calls it. It may know it by a name of its own, or only hand on what the user calls, as Equinox does.
    return found if _last(found.name) == _last(call_of_user(frames[0])) else None


def _own_variables(frame: types.FrameType) -> dict[str, Any]:
    """A frame's variables but those of the functions around it, to which a line inside gives no value."""
    return {name: value for name, value in frame.f_locals.items() if name not in frame.f_code.co_freevars}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _called_in(frames: Sequence[types.FrameType], step: Any) -> Called | None:
    """How the innermost of some frames writes the step, and where the outermost that knows it is to be edited."""
    caller, found = frames[0], None
    if _name_in(caller.f_locals, step) is None and (name := _variable(caller.f_globals, step)) is not None:
        return Called(name, _where_global(frames, name))
    for frame in frames:
        name = _name_in(_own_variables(frame), step)
        if name is None:
            if found is not None:
                break
            continue
        if found is not None and "." not in found.name and name not in frame.f_locals:
            break  # an object that is passed on: its name in the outermost function holds for all of the loop
        found = Called(name, f"above {short_path(frame.f_code.co_filename)}:{line_above(frame)}")
    if found is None and (name := _name_in(caller.f_globals, step)) is not None:
        found = Called(name, _where_global(frames, name))
    return found


def _where_global(frames: Sequence[types.FrameType], name: str) -> str:
    """Where a line goes that gives a global of the caller's module another value."""
    caller = frames[0]
    own = [each for each in frames if each.f_code.co_name == "<module>" and each.f_globals is caller.f_globals]
    if own:
        return f"above {short_path(own[0].f_code.co_filename)}:{line_above(own[0])}"
    if caller.f_globals.get("__name__") == "__main__" and (line := _line_of_binding(caller, name)) is not None:
        # The script itself is in another thread, and has not ended.
        return f"below {short_path(caller.f_code.co_filename)}:{line}"
    return f"at the end of {short_path(caller.f_code.co_filename)}"


def _line_of_binding(frame: types.FrameType, name: str) -> int | None:
    """The last line of the statement of a frame's file that gives a global its value; None where none is seen."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    variable = name.partition(".")[0]
    bound = [
        node.end_lineno
        for node in _of_scope(tree)
        if (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == variable)
        or (isinstance(node, ast.Assign | ast.AnnAssign) and variable in map(ast.unparse, _targets(node)))
    ]
    return max((line for line in bound if line is not None), default=None)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """What an assignment binds, tuples taken apart."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _calls_of_user(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames that the user's own code called, innermost first."""
    while frame is not None and frame.f_back is not None:
        if caller_of(frame) is Owner.USER:
            yield frame
        frame = frame.f_back


def _is_ours(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]


def _name_in(names: Mapping[str, Any], step: Any) -> str | None:
    """The name of a step among variables, or of the attribute of one of them."""
    if (variable := _variable(names, step)) is not None:
        return variable
    for name, value in names.items():
        if isinstance(value, types.ModuleType) or name.startswith("__"):
            continue
        for attribute, held in {**getattr(value, "__dict__", {})}.items():
            if _is(held, step) and not attribute.startswith("__"):
                return f"{name}.{attribute}"
    for value in names.values():
        kind = value if isinstance(value, type) else type(value)
        if any(_is(held, step) for held in vars(kind).values()) and kind.__qualname__.isidentifier():
            attribute = next(each for each, held in vars(kind).items() if _is(held, step))
            return f"{kind.__qualname__}.{attribute}"
    return None


def _variable(names: Mapping[str, Any], step: Any) -> str | None:
    return next((name for name, value in names.items() if _is(value, step)), None)


def _is(value: Any, step: Any) -> bool:
    """Whether a value is the step, or a method of it; a decorator's wrapper around it is not, whose work a line would jit."""
    value = inspect.getattr_static(value, "method", value)  # as Equinox's modules hold their methods
    if value is step:
        return True
    # No code of the value's own is run. `functools.wraps` gives a wrapper the attributes of what it wraps.
    jitted = inspect.getattr_static(value, "watched_jit", None) if _is_of_library(type(value)) else None
    return jitted is not None and jitted is getattr(step, "__wrapped__", None)


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def line_above(frame: types.FrameType) -> int:
    """The line of the outermost loop around what a frame does, or else of what it does."""
    code, at = frame.f_code, frame.f_lineno
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return at
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if code.co_name != "<module>":
        inside = [node for node in ast.walk(tree) if isinstance(node, functions) and _spans(node, at)]
        if not inside:
            return at
        tree = max(inside, key=lambda node: node.lineno)
    around = [
        node
        for node in _of_scope(tree)
        if isinstance(node, ast.stmt) and _spans(node, at) and not isinstance(node, (*functions, ast.ClassDef))
    ]
    loops = [node for node in around if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    return min((node.lineno for node in loops), default=max((node.lineno for node in around), default=at))


def _of_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """What is inside a module or function, without the functions and classes in it."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _of_scope(node)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def is_read_from(frame: types.FrameType, name: str, line: int) -> bool:
    """Whether a variable of a frame is read at a line or below it, or of a module in any function; True where unknown."""
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return True
    is_module = frame.f_code.co_name == "<module>"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(each) for node in ast.walk(tree) if isinstance(node, functions) for each in ast.walk(node)}
    first, last = (0, math.inf) if is_module else _span_of_function(tree, frame.f_lineno)
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and first <= node.lineno <= last
        and (node.lineno >= line or (is_module and id(node) in inside))
        for node in ast.walk(tree)
    )


def _span_of_function(tree: ast.AST, line: int) -> tuple[int, int]:
    """First and last line of the innermost function around a line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = max((node for node in functions if _spans(node, line)), key=lambda node: node.lineno, default=None)
    return (line, line) if around is None else (around.lineno, around.end_lineno or around.lineno)
