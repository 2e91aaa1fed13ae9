"""Equal segments as one jaxpr, so that JAX differentiates and transposes it once and finds the rest in its caches.

Two segments are equal only if all their equations agree in primitive, parameters, shapes, scope and source line: layers of
a Python loop are, two layers of different modules are not. So nothing that a profile or a report would show is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxmem_callbacks._compat.jaxprs import consts_of, open_jaxpr
from jaxmem_callbacks.transforms.equations import is_variable


class Sharing:
    """Jaxprs seen so far, by what they compute."""

    def __init__(self) -> None:
        self._alike: dict[Hashable, list[_Seen]] = {}

    def shared(self, jaxpr: Any) -> Any:
        """An equal jaxpr that was seen before, or ``jaxpr`` itself."""
        alike = self._alike.setdefault(_glance(jaxpr), [])
        new = _Seen(jaxpr)
        match = next((seen for seen in alike if seen.key == new.key), None)
        if match is None:
            alike.append(new)
        return jaxpr if match is None else match.jaxpr


class _Seen:
    """One jaxpr with its key, which is worked out only once a second one looks like it."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    @functools.cached_property
    def key(self) -> Hashable:
        return _key(self.jaxpr)


def _glance(jaxpr: Any) -> Hashable:
    """What two equal jaxprs agree in and most others differ in, for almost nothing."""
    eqns = jaxpr.eqns
    return len(eqns), len(jaxpr.invars), *(str(eqn.source_info.name_stack) for eqn in (eqns[0], eqns[-1]))


def _key(jaxpr: Any) -> Hashable:
    numbers = {var: number for number, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    lines = []
    for eqn in jaxpr.eqns:
        operands = tuple(numbers[atom] if is_variable(atom) else _literal(atom) for atom in eqn.invars)
        results = tuple((type(var), var.aval) for var in eqn.outvars)
        numbers |= {var: number for number, var in enumerate(eqn.outvars, len(numbers))}
        params = tuple((name, _parameter(value)) for name, value in eqn.params.items())
        source = (str(eqn.source_info.name_stack), eqn.source_info.traceback)
        lines.append((eqn.primitive, operands, params, results, eqn.ctx, source))
    outvars = tuple(numbers[atom] if is_variable(atom) else _literal(atom) for atom in jaxpr.outvars)
    return tuple(var.aval for var in jaxpr.invars), tuple(lines), outvars


def _literal(atom: Any) -> Hashable:
    return atom.aval, np.asarray(atom.val).tobytes()


def _parameter(value: Any) -> Hashable:
    if hasattr(open_jaxpr(value), "eqns"):
        # Constants are compared by identity: both jaxprs are alive, and reading arrays could wait for a device.
        return _key(open_jaxpr(value)), tuple(id(const) for const in consts_of(value))
    if isinstance(value, (tuple, list)):
        return tuple(_parameter(item) for item in value)
    return value
