"""A script that was stopped at its step enters; sentences on what nobody asked about leave: other arrays, other steps.

A plan counts the step's arguments and its program. A script with two of them (a GAN, an actor and its critic) holds the other
one's state meanwhile, and an EMA copy or a dataset on the device lies there too.
"""

from __future__ import annotations

import ast
import math
import pathlib
from typing import Any

import jax

from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.frameworks import framework_of

_SHARE = 0.01  # of what the step needs: less is not worth a word
_SHOWN = 2  # groups of arrays that are named
_JITS = {"jit", "filter_jit", "pjit", "jit_step"}
_GRADIENTS = {"grad", "value_and_grad", "filter_grad", "filter_value_and_grad"}


def alive_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCensus:
    """The arrays that are alive now and are no arguments of the step that is called with these."""
    framework = framework_of(args, kwargs)
    own = jax.tree.leaves((args, kwargs)) if framework is None else framework.apart((args, kwargs))[0]
    return LiveArraysProbe().beside(own)


def alive_words(alive: ArrayCensus, step_bytes: int | None, constant_bytes: int | None, resident_bytes: int = 0) -> str:
    """What else was alive, and how a plan counts it; empty where it is little, or counted.

    Args:
        alive: As the script called its step.
        step_bytes: What the step needs.
        constant_bytes: What its program holds of arrays that it closes over, which are alive too.
        resident_bytes: What the plan counts beside the step.
    """
    beside = alive.bytes - (constant_bytes or 0)
    if beside < max(MIB, _SHARE * (step_bytes or 0)) or beside <= resident_bytes:
        return ""
    named = ", ".join(f"{each.count} of {each.type_text} from {each.site}" for each in alive.groups[:_SHOWN])
    return (
        f"Beside the step's arguments {format_bytes(beside)} of arrays were alive when the script called it, the most of them "
        f"{named}. They are not counted here: what stays while the step runs, such as the state of another step, is counted "
        f"by jaxmem plan --resident {math.ceil(beside / MIB)}MiB."
    )


def others_words(script: pathlib.Path, step: str) -> str:
    """Which other steps a script has, and how to name one; empty where there is none, or the script cannot be read.

    A step is a function that takes a gradient in its own lines, and is jitted by a decorator or by its name.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) & _JITS]
    jitted = {name for call in calls for given in call.args[:1] for name in _names(given)}
    steps = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name != step
        and (node.name in jitted or any(_names(each) & _JITS for each in node.decorator_list))
        and any(_names(each) & _GRADIENTS for each in node.body)
    ]
    if not steps:
        return ""
    others = [node.name for node in sorted(steps, key=lambda node: node.lineno)]
    return f"{step} is the first step that {script.name} calls. Another one by its name: --step {' or --step '.join(others)}."


def _names(node: ast.AST) -> set[str]:
    """Every name in a piece of code, those of attributes included."""
    found = (getattr(each, "attr", getattr(each, "id", None)) for each in ast.walk(node))
    return {name for name in found if isinstance(name, str)}
