"""The checkpoints that a loss's author wrote: where they are written, and the same loss without them."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmem_callbacks.records.policies import KEPT, ON_HOST, OwnCheckpoint
from jaxmem_callbacks.records.source_files import short_path
from jaxmem_callbacks.transforms.tracing import (
    has_own_checkpoint,
    inlined,
    is_checkpoint,
    is_variable,
    open_jaxpr,
    source_lines,
    subjaxprs,
    with_equations,
    with_subjaxprs,
)

# `jax.checkpoint`, `nn.remat`, `maybe_remat`, but not what names values, or chooses which are kept.
_MAKERS = re.compile(r"(?!checkpoint_(name|polic))\w*(checkpoint|remat)\w*")
_Line = tuple[str, int]
# All code of a file, and the names that it gives what makes checkpoints.
_Code = tuple[tuple[ast.AST, ...], frozenset[str]]


def checkpoints_around(file: str, function: str) -> list[_Line]:
    """Where a file makes a checkpoint of a function: by decorators first, then by calls."""
    nodes, makers = _code_of(file)
    around = [
        (file, node.lineno)
        for node in nodes
        if isinstance(node, ast.Call) and node.args and _makes(node.func, makers) and _last(node.args[0]) == function
    ]
    return [*_above(file, function), *around]


def checkpoints_named(file: str, name: str) -> list[_Line]:
    """Where a file gives a checkpoint a name."""
    nodes, makers = _code_of(file)
    given = [
        (file, node.lineno)
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _makes(node.value.func, makers)
        and name in map(_last, node.targets)
    ]
    return [*_above(file, name), *given]


def _above(file: str, name: str) -> list[_Line]:
    """The decorators that make a checkpoint of what has a name."""
    nodes, makers = _code_of(file)
    return [
        (file, each.lineno)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        for each in node.decorator_list
        if _makes(each, makers)
    ]


def names_on(file: str, line: int) -> list[str]:
    """The names on a line of a file, without repeats."""
    nodes, _ = _code_of(file)
    return list(dict.fromkeys(filter(None, (_last(node) for node in nodes if getattr(node, "lineno", 0) == line))))


def _makes(code: ast.expr, makers: frozenset[str]) -> bool:
    """Whether code is what makes checkpoints, or gives it options: ``functools.partial(jax.checkpoint, ...)``, ``remat(...)``."""
    if isinstance(code, ast.Call):
        given = code.args[0] if code.args and _last(code.func) == "partial" else code.func
        return _makes(given, makers)
    name = _last(code)
    return name in makers or _MAKERS.fullmatch(name) is not None


def _other_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that a file gives what makes checkpoints."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (each.asname for each in node.names if each.asname and _MAKERS.fullmatch(each.name))
        if isinstance(node, ast.Assign):
            value = node.value
            is_given = isinstance(value, ast.Call) and _last(value.func) == "partial"
            if (is_given or isinstance(value, ast.Name | ast.Attribute)) and _makes(value, frozenset()):
                yield from map(_last, node.targets)


def _last(code: ast.AST) -> str:
    """The last name of code such as ``jax.checkpoint``; empty of other code."""
    name = getattr(code, "attr", getattr(code, "id", ""))
    return name if isinstance(name, str) else ""


def _code_of(file: str) -> _Code:
    return _code("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=8)
def _code(text: str) -> _Code:
    try:
        nodes = tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # such as a notebook's cell
        nodes = ()
    return nodes, frozenset(_other_names(nodes))


# Their functions make checkpoints for others (nn.remat, nnx.remat, eqx.filter_checkpoint, hk.remat, keras.remat, jm.remat).
_FRAMEWORKS = ("jax", "flax", "equinox", "haiku", "keras", "jaxmem_callbacks")
_WRITTEN = re.compile("checkpoint|remat", re.IGNORECASE)
# Names that the library gives inside checkpoints of its own, which mean nothing without them.
_OUR_NAMES = {KEPT, *ON_HOST.values()}


def own_checkpoints(eqns: Iterable[Any]) -> tuple[OwnCheckpoint, ...]:
    """The checkpoints among equations and in their bodies, by place, in the order of their first appearance.

    To be called where the user's own code asks for what the equations compute: a trace does not hold the code around it.
    """
    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def look(some: Iterable[Any], around: Sequence[_Line], trips: int) -> None:
        for eqn in filter(has_own_checkpoint, some):
            lines = [*own_lines(eqn)[:1], *around]
            if is_checkpoint(eqn):
                name, defined = _function(eqn)
                function = "" if name.startswith("<") else name
                found[_place(lines, function, defined), function] += trips
            inside = trips * int(eqn.params["length"]) if eqn.primitive.name == "scan" else trips
            for body in subjaxprs(eqn):
                look(body.eqns, lines, inside)

    written = list(filter(has_own_checkpoint, eqns))
    if written:  # else nobody asks who calls
        calls = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
        look(written, list(itertools.islice((each for each in calls if not _is_framework(each[0])), 1)), 1)
    return tuple(OwnCheckpoint(place=place, function=name, times=times) for (place, name), times in found.items())


def without_checkpoints(closed: Any) -> Any:
    """A traced function without its checkpoints; the same object where it has none."""
    return _without(closed, {})


def _without(jaxpr: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """The same.

    Args:
        jaxpr: Open or closed.
        known: The functions that were done, by their ids: what several equations share they share afterwards too.
    """
    if not any(map(has_own_checkpoint, open_jaxpr(jaxpr).eqns)):
        return jaxpr
    if id(jaxpr) not in known:
        flat = inlined(jaxpr, hoist_constants=False, is_inlined=is_checkpoint)
        eqns, outvars = _without_our_names(flat.eqns, flat.outvars)
        eqns = [
            with_subjaxprs(eqn, lambda body: _without(body, known)) if has_own_checkpoint(eqn) else eqn for eqn in eqns
        ]
        known[id(jaxpr)] = jaxpr, with_equations(jaxpr, outvars=outvars, eqns=eqns)
    return known[id(jaxpr)][1]


def _without_our_names(eqns: Iterable[Any], outvars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Equations and results without the names by which `jm.remat` keeps values: a policy would keep them again."""
    named: dict[Any, Any] = {}

    def look(atom: Any) -> Any:
        return named.get(atom, atom) if is_variable(atom) else atom

    kept: list[Any] = []
    for eqn in eqns:
        invars = [look(atom) for atom in eqn.invars]
        if eqn.primitive.name == "name" and eqn.params["name"] in _OUR_NAMES:
            named[eqn.outvars[0]] = invars[0]
        else:
            kept.append(eqn if invars == eqn.invars else eqn.replace(invars=invars))
    return kept, [look(atom) for atom in outvars]


def _place(lines: Sequence[_Line], function: str, defined: Sequence[_Line]) -> str:
    """Where a checkpoint is written, as ``file:line``: around or above its function, or else on a line that led to its call.

    Args:
        lines: That led to its call, innermost first.
        function: Its name; empty where it has none, or where it is a framework's.
        defined: Where it is defined, where it is not a framework's.
    """
    if function:
        places = [
            place for file, _ in dict.fromkeys([*defined, *lines]) for place in checkpoints_around(file, function)
        ]
        near = [each for each in places if each in (*defined, *lines)]
        return short_place([*near, *places, *_with_word(lines), *defined])
    if not defined:  # a class of a framework's, by the name that the user gave it
        own = [(file, names_on(file, line)) for file, line in lines[:1]]
        named = [place for file, names in own for name in names for place in checkpoints_named(file, name)]
        return short_place([*named, *_with_word(lines), *lines])
    return short_place([*_with_word([*defined, *lines]), *defined])


def _with_word(lines: Sequence[_Line]) -> list[_Line]:
    return [each for each in lines if _WRITTEN.search(linecache.getline(*each))]


def short_place(lines: Sequence[_Line]) -> str:
    """The first of some lines as ``file:line``; empty without any."""
    return f"{short_path(lines[0][0])}:{lines[0][1]}" if lines else ""


def own_lines(eqn: Any) -> list[_Line]:
    """The lines of the user's own that made an equation, innermost first."""
    return [each for each in source_lines(eqn) if not _is_framework(each[0])]


def _function(eqn: Any) -> tuple[str, list[_Line]]:
    """The name of the function that is checkpointed, and where it is defined; nothing where it is a framework's."""
    words = getattr(getattr(eqn.params["jaxpr"], "debug_info", None), "func_src_info", None) or ""
    name, _, place = words.partition(" at ")
    file, _, line = place.rpartition(":")
    if not line.isdigit() or _is_framework(file):
        return "", []
    return name, [(file, int(line))]


def _is_framework(file: str) -> bool:
    folders = (getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS)
    return any(folder is not None and Path(file).is_relative_to(Path(folder).parent) for folder in folders)
