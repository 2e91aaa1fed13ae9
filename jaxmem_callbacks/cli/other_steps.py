"""A script and the step that was found in it enter; its other steps leave, in a sentence. The script is only read."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

from jaxmem_callbacks.cli.source import is_unedited, syntax_of
from jaxmem_callbacks.records.advice import advise

_JITS, _OWN_JITS = {"jit", "filter_jit", "pjit"}, {"jit_step"}
_GRADIENTS = {"grad", "value_and_grad", "filter_grad", "filter_value_and_grad"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def other_steps(script: pathlib.Path, step: str) -> str:
    """Which other steps a script has, and how to name one; empty where there is none, or the script cannot be read.

    A step is a function that takes a gradient in its own lines, is jitted by a decorator or by its name, and is not called by
    another one. In a script that makes a step of this library only such steps are found by their names.
    """
    names = dict.fromkeys(each.name for each in steps_written_in(script) if each.name != step)
    if not names:
        return ""
    others = " or ".join(advise("option.typed", option="step", value=name) for name in names)
    return f"{step} is the first step that {script.name} calls. Another one by its name: {others}."


def steps_written_in(script: pathlib.Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The definitions of a script's steps, by their lines, without those that another one calls."""
    tree = syntax_of(script)
    if tree is None:
        return []
    jits = _JITS | _OWN_JITS if is_unedited(script) else _OWN_JITS
    jitted = {name for call in _calls(tree) if _names(call.func) & jits for name in _first_name(call)}
    steps = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and (node.name in jitted or any(_names(each) & jits for each in node.decorator_list))
        and any(_names(call.func) & _GRADIENTS for call in _own_calls(node))
    ]
    inner = {name for node in steps for call in _own_calls(node) for name in _names(call.func)}
    return sorted((node for node in steps if node.name not in inner), key=lambda node: node.lineno)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def _own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """Calls in a function's own lines: those of functions inside it are made when these are called."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _own_calls(node)


def _first_name(call: ast.Call) -> set[str]:
    """The name of the function that a call is given first, through a `functools.partial` too."""
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Call) and "partial" in _names(given.func):
        return _first_name(given)
    return _names(given) if isinstance(given, ast.Name | ast.Attribute) else set()


def _names(node: ast.AST) -> set[str]:
    """The last name of a piece of code such as ``jax.jit``; of a decorator such as ``partial(jax.jit, ...)`` those in it too."""
    if isinstance(node, ast.Call):
        return {name for each in (node.func, *node.args) for name in _names(each)}
    name = getattr(node, "attr", getattr(node, "id", None))
    return {name} if isinstance(name, str) else set()
