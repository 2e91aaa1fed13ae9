"""Does a weight add up over microbatches? What `jm.weighted` divides by enters; one that does not follow the rows is refused.

A weight computed from the batch's values is the user's word. One in which no row has a part (a constant, an argument that goes
whole to every microbatch, a number made of shapes) is known when it is traced: no real array and no compile is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem_callbacks._compat.jaxprs import derive, evaluate
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.transforms import leaves
from jaxmem_callbacks.transforms.accumulation.accumulate import GradientCall, Whole
from jaxmem_callbacks.transforms.accumulation.batch import WHOLE
from jaxmem_callbacks.transforms.accumulation.check import TOLERANCE
from jaxmem_callbacks.transforms.accumulation.weighted import is_weighted
from jaxmem_callbacks.transforms.equations import Equations, flatten, is_variable, needed_by, variables

_STAND_IN = 3  # what a scalar argument is taken to be: a weight that adds up does so for any


class _Quotient(NamedTuple):
    """One `jm.weighted` of a traced loss: what it is, and the variables or literals of its parts."""

    what: str
    total: Any
    weight: Any


def require_weights_that_add_up(call: GradientCall, batch: Whole, count: int) -> None:
    """Refuse a weight, of the loss or in its aux, that is not ``count`` times as large for the whole batch as for a microbatch.

    Args:
        call: The gradient; its loss is traced once, and once more where a weight has no part of the rows.
        batch: Its arguments.
        count: Number of microbatches.

    Raises:
        PolicyError: says which weight, and what to write instead.
    """
    flat, quotients = _traced(call, batch, count)
    fixed = [
        index
        for index, (_, total, weight) in enumerate(quotients)
        if _varies(flat, batch, total) and not _varies(flat, batch, weight)
    ]
    if not fixed:
        return
    whole, of_whole = _traced(call, batch, 1)
    for index in fixed:
        part, total = _value(flat, quotients[index].weight), _value(whole, of_whole[index].weight)
        if part is None or total is None or _add_up(part, total, count):
            continue
        msg = (
            f"microbatches={count}: {quotients[index].what} of {call.name} is jm.weighted by a weight that does not add up: for "
            f"{batch.rows} rows it is not {count} times what it is for {batch.rows // count}, so the sum would be divided by a "
            "wrong number. Expected the sum over the rows of what they count: "
            f"{advise('loss.weighted', arguments='losses.sum(), losses.size')}, or by the "
            "sum of a mask. Or return the plain mean, which is compared."
        )
        raise PolicyError(msg)


def _traced(call: GradientCall, batch: Whole, count: int) -> tuple[Equations, list[_Quotient]]:
    """The loss on one of ``count`` microbatches."""
    result = leaves.Result()

    def of_first(*arrays: Any) -> list[Any]:
        args, kwargs = batch.microbatch(arrays, 0, count, lambda key, _: key)
        return result.split(call.evaluate(args, kwargs)[0])

    flat = flatten(jax.make_jaxpr(of_first)(*batch.arrays))
    return flat, list(_quotients(result.join(flat.outvars)))


def _quotients(parts: Any) -> Iterator[_Quotient]:
    value, (weight, aux) = parts
    if weight is not None:
        yield _Quotient("the loss", value, weight)
    for path, leaf in jax.tree_util.tree_flatten_with_path(aux, is_leaf=is_weighted)[0]:
        if is_weighted(leaf):
            yield _Quotient(f"aux{jax.tree_util.keystr(path)}", leaf.total, leaf.weight)


def _inputs(flat: Equations, atom: Any) -> tuple[list[Any], list[Any]]:
    """The equations that make a value, and the constants and arguments of the loss that have a part in it."""
    eqns = needed_by([atom], flat.eqns)
    used = {var for part in [[atom], *(eqn.invars for eqn in eqns)] for var in variables(part)}
    return eqns, [var for var in flat.invars if var in used]


def _varies(flat: Equations, batch: Whole, atom: Any) -> bool:
    """Whether rows or random keys have a part in a value."""
    arguments = flat.invars[-len(batch.arrays) :]
    varying = {var for var, role in zip(arguments, batch.roles, strict=True) if role != WHOLE}
    return not varying.isdisjoint(_inputs(flat, atom)[1])


def _value(flat: Equations, atom: Any) -> Any:
    """A value in which no row has a part, scalars among its arguments being `_STAND_IN`; None where more than that goes in."""
    eqns, inputs = _inputs(flat, atom)
    known = dict(zip(flat.invars, flat.consts, strict=False))
    values = [known.get(var) for var in inputs]
    given = [value is not None and not isinstance(value, Tracer) for value in values]
    if any(eqn.effects for eqn in eqns) or any(
        var.aval.shape for var, is_given in zip(inputs, given, strict=True) if not is_given
    ):
        return None
    if not is_variable(atom):
        return np.asarray(atom.val)
    program = derive(flat.template, invars=inputs, outvars=[atom], eqns=eqns)
    with jax.ensure_compile_time_eval():
        filled = [
            value if is_given else jnp.asarray(_STAND_IN, var.aval.dtype)
            for var, value, is_given in zip(inputs, values, given, strict=True)
        ]
        return np.asarray(evaluate(program, filled)[0])


def _add_up(part: np.ndarray, whole: np.ndarray, count: int) -> bool:
    bits = jnp.finfo(part.dtype).bits if jnp.issubdtype(part.dtype, jnp.floating) else max(TOLERANCE)
    apart, size = abs(float(whole) - count * float(part)), abs(float(whole))
    return not apart > TOLERANCE[bits] * size
