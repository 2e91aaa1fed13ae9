"""Arrays of a step's arguments enter with their paths; the module that each belongs to leaves, as its framework writes it.

Parameters stand in a tree whose last key is the parameter and whose other keys are the module. An optimizer keeps trees of the
same form, so that its arrays belong to the module of the parameter whose path theirs ends with. Whatever else has no module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, kind_of_argument

_Parts = tuple[str, ...]
_PART = re.compile(r"^(\w+)|\.(\w+)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]")
_STATISTICS = "batch_stats"
_COLLECTIONS = ("params", _STATISTICS)  # of Flax Linen: between the variables and the outermost module
_BOXES = ("value", "raw_value")  # what holds an array with its partitioning or as an NNX variable, and is no module
_NUMBER = re.compile(r"\d+")


def modules_of(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Path of an array -> its module, such as ``Block_3/Dense_0``; paths without one are left out."""
    inside: dict[str, _Parts] = {}
    others: dict[str, _Parts] = {}
    for leaf in leaves:
        parts = _parts(leaf.path)
        if leaf.kind == OPTIMIZER:
            others[leaf.path] = parts
        elif (start := _start(parts, leaf.kind)) is not None:
            inside[leaf.path] = parts[start:]
    known = set(inside.values())
    for path, parts in others.items():
        found = next((parts[at:] for at in range(1, len(parts)) if parts[at:] in known), ())
        inside[path] = found
    return {path: "/".join(parts[:-1]) for path, parts in inside.items() if len(parts) > 1}


def same_form(modules: Sequence[str]) -> str:
    """What stands for several modules that differ in numbers alone, ``Block_*/Dense_0``; an empty text for others."""
    if len(set(modules)) <= 1:
        return next(iter(modules), "")
    rows = [module.split("/") for module in modules]
    if len({len(row) for row in rows}) > 1:
        return ""
    columns = [set(column) for column in zip(*rows, strict=True)]
    forms = [{_NUMBER.sub("*", part) for part in column} for column in columns]
    if any(len(form) > 1 for form in forms):
        return ""
    return "/".join(
        column.pop() if len(column) == 1 else form.pop() for column, form in zip(columns, forms, strict=True)
    )


def family_of(modules: Iterable[str]) -> Callable[[str], tuple[str, str]]:
    """A function that tells the repeated module around a module, and its family.

    Args:
        modules: Every module of the model.

    Returns:
        ``Block_3/Dense_0`` -> ``("Block_3", "Block_*")`` where there are more of ``Block_*``; else the module itself, twice.
    """
    numbered: dict[_Parts, set[str]] = {}
    for module in modules:
        parts = tuple(module.split("/"))
        for at, part in enumerate(parts):
            numbered.setdefault((*parts[:at], _NUMBER.sub("*", part)), set()).add(part)

    @cache
    def told(module: str) -> tuple[str, str]:
        parts = tuple(module.split("/"))
        for at, part in enumerate(parts):
            form = (*parts[:at], _NUMBER.sub("*", part))
            if len(numbered.get(form, ())) > 1:
                return "/".join(parts[: at + 1]), "/".join(form)
        return module, module

    return told


def _parts(path: str) -> _Parts:
    """``state.params['Block_0']['kernel']`` -> state, params, Block_0, kernel."""
    parts = tuple(next(filter(None, found.groups()), "") for found in _PART.finditer(path))
    return parts[:-1] if parts[-1:] and parts[-1] in _BOXES else parts


def _start(parts: _Parts, kind: str) -> int | None:
    """Where the outermost module stands on a path, or None where it leads through none."""
    at = next((i for i, part in enumerate(parts[:-1]) if part == _STATISTICS or _is_of_parameters(part)), None)
    if at is not None:
        at += 1
        while parts[at : at + 1] and parts[at] in _COLLECTIONS:
            at += 1
        return at
    if kind != PARAMETERS:
        return None
    # Parameters by their class, as of Flax NNX, in whatever the user calls it: a tuple of model and optimizer has numbers.
    return next((i for i, part in enumerate(parts) if i and not part.isdecimal()), None)


def _is_of_parameters(part: str) -> bool:
    return kind_of_argument(part) == PARAMETERS
