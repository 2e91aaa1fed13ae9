"""A traced loss enters; the whole numbers that it compares values with leave: what its batch may be padded with.

A first batch need not have padding. What a loss ignores by ``label != ignored`` stands in its trace all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.transforms.equations import is_variable

# Each is one more comparison, of a few rows.
_MOST = 8
# What hands a literal on.
_PASSING = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}


def compared_with(program: Any) -> tuple[int, ...]:
    """Whole numbers that a program compares something with by ``==`` or ``!=``, in order, each once, the first few.

    Args:
        program: A jaxpr, open or closed.
    """
    found: dict[int, None] = {}
    _walk(getattr(program, "jaxpr", program), {}, found)
    return tuple(found)[:_MOST]


def _walk(jaxpr: Any, known: dict[Any, int], found: dict[int, None]) -> None:
    """Through a jaxpr, some of whose inputs are known numbers."""

    def number(atom: Any) -> int | None:
        return known.get(atom) if is_variable(atom) else _whole(atom.val)

    for eqn in jaxpr.eqns:
        values = [number(atom) for atom in eqn.invars]
        if eqn.primitive.name in {"eq", "ne"}:
            found.update((value, None) for value in values if value is not None)
        elif eqn.primitive.name in _PASSING and values[0] is not None:
            known[eqn.outvars[0]] = values[0]
        for body in subjaxprs(eqn):
            inner = getattr(body, "jaxpr", body)
            given = zip(inner.invars, values, strict=False) if len(inner.invars) == len(values) else ()
            _walk(inner, {var: value for var, value in given if value is not None}, found)


def _whole(value: Any) -> int | None:
    array = np.asarray(value)
    return int(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else None
