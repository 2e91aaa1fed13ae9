"""A script that was stopped at its step enters; sentences on what nobody asked about leave: other arrays, other steps.

A plan counts the step's arguments and its program. A script with two of them (a GAN, an actor and its critic) holds the other
one's state meanwhile, and an EMA copy or a dataset on the device lies there too.
"""

from __future__ import annotations

import ast
import gc
import math
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem_callbacks.cli.unedited import is_unedited
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of

_SHARE = 0.01  # of what the step needs: less is not worth a word
_SHOWN = 2  # groups of arrays that are named
_JITS, _OWN_JITS = {"jit", "filter_jit", "pjit"}, {"jit_step"}
_GRADIENTS = {"grad", "value_and_grad", "filter_grad", "filter_value_and_grad"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def alive_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCensus | None:
    """The arrays that are alive now and are no arguments of a step; None where JAX does not start on this machine."""
    framework = framework_of(args, kwargs)
    own = jax.tree.leaves((args, kwargs)) if framework is None else framework.apart((args, kwargs))[0]
    gc.collect()  # what only cycles hold is as good as gone
    try:
        return LiveArraysProbe().beside(own)
    except (RuntimeError, AssertionError):  # as JAX says that it has no backend, so nothing is alive in one
        return None


def alive_words(alive: ArrayCensus | None, when: str, step_bytes: int | None, resident_bytes: int = 0) -> str:
    """What else was alive, and how a plan counts it; empty where it is little, or counted.

    An array that the step closes over counts too: its program holds a copy of it.

    Args:
        alive: As the step was reached.
        when: When that was, such as "when the script called it".
        step_bytes: What the step needs.
        resident_bytes: What the plan counts beside the step.
    """
    if alive is None:
        return ""
    on_device: Counter[str] = Counter()
    for group in alive.groups:
        on_device.update(dict.fromkeys(group.devices, group.bytes))
    beside = max(on_device.values(), default=0) + alive.left_out_bytes
    if beside < max(MIB, _SHARE * (step_bytes or 0)) or beside <= resident_bytes:
        return ""
    return (
        f"Beside the step's arguments {format_bytes(beside)} of arrays were alive on one device {when}, the most of them "
        f"{', '.join(map(_told, alive.groups[:_SHOWN]))}. They are not counted here: what stays while the step runs, such as the "
        f"state of another step, is counted by jaxmem plan --resident {math.ceil(beside / MIB)}MiB."
    )


def _told(group: ArrayGroup) -> str:
    place = "" if group.site.startswith("unknown") else f" from {group.site}"
    return f"{group.count} of {group.type_text}{place}"


def others_words(script: pathlib.Path, step: str) -> str:
    """Which other steps a script has, and how to name one; empty where there is none, or the script cannot be read.

    A step is a function that takes a gradient in its own lines, is jitted by a decorator or by its name, and is not called by
    another one. In a script that makes a step of this library only such steps are found by their names.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
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
    found = [node.name for node in sorted(steps, key=lambda node: node.lineno) if node.name not in {step, *inner}]
    if not found:
        return ""
    others = " or ".join(f"--step {name}" for name in dict.fromkeys(found))
    return f"{step} is the first step that {script.name} calls. Another one by its name: {others}."


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
