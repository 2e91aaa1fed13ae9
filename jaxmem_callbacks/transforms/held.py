"""What a compiler holds in memory of a segment while it is differentiated; much less than what JAX says is kept of it.

Enters: a flat list of equations. Leaves: bytes by equation. Compilers fuse elementwise work into its readers, and compute it
there from the products and reductions that it is made of. So of the values that derivatives need only those are held that
no fusion makes: results of products, reductions, gathers and loops, and what a product reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.transforms.equations import flatten, variables
from jaxmem_callbacks.transforms.residuals import (
    CHEAP,
    inner_residual_bytes,
    is_inexact,
    nbytes,
    needed_by,
    view_roots,
)

_PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
# Elementwise, if not always cheap: done inside a fusion all the same.
_FUSED = CHEAP | {
    *("atan2", "cbrt", "cosh", "erf", "erf_inv", "erfc", "exp2", "expm1"),
    *("log1p", "logistic", "nextafter", "sinh", "tan", "tanh"),
}
# Functions with a derivative of their own, and the jits in them, are as their bodies.
_WITH_OWN_RULE = {"custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


def is_fused(eqn: Any) -> bool:
    """Whether compilers compute an equation inside another, so that its result need not be in memory."""
    if eqn.primitive.name in _WITH_OWN_RULE:  # such as jax.nn.relu
        return all(is_fused(inner) for body in subjaxprs(eqn) for inner in body.eqns)
    return eqn.primitive.name in _FUSED


def has_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product, or has one in its bodies."""
    inner = (each for body in subjaxprs(eqn) for each in body.eqns)
    return eqn.primitive.name in _PRODUCTS or any(map(has_product, inner))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is in memory while a list of n equations is differentiated.

    Attributes:
        rows: int64[values, 3]: bytes of what is held, the equation that makes it, and the first whose derivative uses it.
        made: int64[n]: bytes each equation makes at once; -1 where it is done inside a fusion.
        needed: Value -> last equation whose derivative uses it, or something that a fusion makes of it.
        roots: Value that is a view -> what it is a view of.
        last_product: The last matrix product that is differentiated; n without one.
    """

    rows: np.ndarray
    made: np.ndarray
    needed: dict[Any, int]
    roots: dict[Any, Any]
    last_product: int

    def needed_until(self, var: Any) -> int:
        """The last equation whose derivative uses a value or a view of it; -1 where none does."""
        return self.needed.get(self.roots.get(var, var), -1)


def held(eqns: Sequence[Any], resident: set[Any]) -> Held:
    """What a list of equations has in memory while it is differentiated.

    Args:
        eqns: Flat equations.
        resident: Values that cost nothing: arguments, constants and sinkable values.
    """
    roots, active = view_roots(eqns), _active(eqns, resident)
    read = {roots.get(var, var) for eqn in eqns if eqn.primitive.name in _PRODUCTS for var in variables(eqn.invars)}
    wanted, rows = _Wanted(roots), list[tuple[int, int, int]]()
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if not active.isdisjoint(variables(eqn.invars)):
            rows.append((inner_residual_bytes(eqn), index, index))
            wanted.add(needed_by(eqn, active), index, index)
        for var in eqn.outvars:
            if var not in wanted.first or var in resident:
                continue
            if is_fused(eqn) and var not in read:
                # A fusion makes it anew of its operands, which are wanted as long as it is.
                wanted.add(variables(eqn.invars), wanted.first[var], wanted.last[var])
            else:
                rows.append((nbytes(var), index, wanted.first[var]))
    made = [-1 if is_fused(eqn) else sum(map(nbytes, eqn.outvars)) for eqn in eqns]
    products = [
        index for index, eqn in enumerate(eqns) if has_product(eqn) and not active.isdisjoint(variables(eqn.invars))
    ]
    some = np.array([row for row in rows if row[0]], np.int64).reshape(-1, 3)
    return Held(
        rows=some,
        made=np.array(made, np.int64),
        needed=wanted.last,
        roots=roots,
        last_product=products[-1] if products else len(eqns),
    )


def gradient_spans(eqns: Sequence[Any], lives: Sequence[tuple[Any, int, int]]) -> np.ndarray:
    """Bytes, first and last position of the gradients that are in memory while a list of equations is differentiated.

    What a fusion makes of one value alone has no gradient in memory: it is computed where it goes into that value's. Such are a
    norm's float32 copies of a bfloat16 value. What it is computed from stays until then: the gradient of a product's operand.

    Args:
        eqns: Flat equations.
        lives: Each value with the first and last position at which it is alive.
    """
    read = {var for eqn in eqns if eqn.primitive.name in _PRODUCTS for var in variables(eqn.invars)}
    source, since = dict[Any, Any](), dict[Any, int]()
    for index, eqn in enumerate(eqns):
        operands = [var for var in variables(eqn.invars) if is_inexact(var)]
        most = max(map(_elements, operands), default=0)
        if not most or not is_fused(eqn):
            continue
        large = [var for var in operands if 2 * _elements(var) > most]
        begins = min(since[var] if var in source else index + 1 for var in large)
        sources = {source.get(var, var) for var in large}
        for var in eqn.outvars:
            since[var] = begins
            if len(sources) == 1 and var not in read and _elements(var) == most:
                source[var] = next(iter(sources))
    rows = [
        (nbytes(var), min(first, since.get(var, first)), last)
        for var, first, last in lives
        if is_inexact(var) and var not in source
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def _elements(var: Any) -> int:
    return math.prod(var.aval.shape)


class _Wanted:
    """The first and the last equation whose derivative uses each value."""

    def __init__(self, roots: dict[Any, Any]) -> None:
        self._roots = roots
        self.first: dict[Any, int] = {}
        self.last: dict[Any, int] = {}

    def add(self, used: Sequence[Any], first: int, last: int) -> None:
        for var in used:
            root = self._roots.get(var, var)
            self.first[root] = min(first, self.first.get(root, first))
            self.last[root] = max(last, self.last.get(root, last))


def _active(eqns: Sequence[Any], resident: set[Any]) -> set[Any]:
    """The values that are differentiated."""
    active = {var for var in resident if is_inexact(var)}
    for eqn in eqns:
        if not active.isdisjoint(variables(eqn.invars)):
            active.update(var for var in eqn.outvars if is_inexact(var))
    return active


def held_by_body(eqn: Any) -> int:
    """Bytes that are held while one step of a loop is differentiated."""
    flat = flatten(subjaxprs(eqn)[0])
    return int(held(flat.eqns, set(flat.invars)).rows[:, 0].sum())
