"""How the user wrote the call that is running: the code of each argument, for lines to paste.

Read from the source by the place of the running instruction, and not from the caller's variables: Python up to 3.12 keeps what is
read of a function's locals until it ends, and arrays with them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
from collections.abc import Callable
from typing import Any

from jaxmem_callbacks.programs.steps.leaves import parameter_names
from jaxmem_callbacks.records.source_files import Owner, owner_of

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
