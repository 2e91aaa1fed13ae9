"""A file of the user's and a name in it enter; the lines leave on which its author makes a checkpoint of what has the name."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator

# `jax.checkpoint`, `nn.remat`, `maybe_remat`, but not what names values, or says which are kept.
_MAKERS = re.compile(r"(?!checkpoint_(name|polic))\w*(checkpoint|remat)\w*")
_Line = tuple[str, int]


def checkpoints_around(file: str, function: str) -> list[_Line]:
    """Where a file makes a checkpoint of a function: by decorators first, then by calls."""
    tree = _tree_of(file)
    makers = set(_other_names(tree))
    around = [
        (file, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and _makes(node.func, makers) and _last(node.args[0]) == function
    ]
    return [*_above(file, function), *around]


def checkpoints_named(file: str, name: str) -> list[_Line]:
    """Where a file gives a checkpoint a name."""
    tree = _tree_of(file)
    makers = set(_other_names(tree))
    given = [
        (file, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _makes(node.value.func, makers)
        and name in map(_last, node.targets)
    ]
    return [*_above(file, name), *given]


def _above(file: str, name: str) -> list[_Line]:
    """The decorators that make a checkpoint of what has a name."""
    tree = _tree_of(file)
    makers = set(_other_names(tree))
    return [
        (file, each.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        for each in node.decorator_list
        if _makes(each, makers)
    ]


def names_on(file: str, line: int) -> list[str]:
    """The names on a line of a file, without repeats."""
    nodes = ast.walk(_tree_of(file))
    return list(dict.fromkeys(filter(None, (_last(node) for node in nodes if getattr(node, "lineno", 0) == line))))


def _makes(code: ast.expr, makers: set[str]) -> bool:
    """Whether code is what makes checkpoints, or gives it options: ``functools.partial(jax.checkpoint, ...)``, ``remat(...)``."""
    if isinstance(code, ast.Call):
        given = code.args[0] if code.args and _last(code.func) == "partial" else code.func
        return _makes(given, makers)
    name = _last(code)
    return name in makers or _MAKERS.fullmatch(name) is not None


def _other_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives what makes checkpoints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (each.asname for each in node.names if each.asname and _MAKERS.fullmatch(each.name))
        if isinstance(node, ast.Assign):
            value = node.value
            is_given = isinstance(value, ast.Call) and _last(value.func) == "partial"
            if (is_given or isinstance(value, ast.Name | ast.Attribute)) and _makes(value, set()):
                yield from map(_last, node.targets)


def _last(code: ast.AST) -> str:
    """The last name of code such as ``jax.checkpoint``; empty of other code."""
    name = getattr(code, "attr", getattr(code, "id", ""))
    return name if isinstance(name, str) else ""


def _tree_of(file: str) -> ast.AST:
    return _tree("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=8)
def _tree(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook's cell, say
        return ast.Module([], [])
