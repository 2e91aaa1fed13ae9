"""A gradient call of low precision, computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmem_callbacks._compat.jaxprs import consts_of, derive, evaluate, open_jaxpr, scan_arity, with_first_checkpoints
from jaxmem_callbacks.transforms.accumulation.accumulate import MOVES, GradientCall, wide
from jaxmem_callbacks.transforms.tracing import (
    CHECKPOINTS,
    TracedResult,
    is_variable,
    new_variable,
    side_effects,
    split_arrays,
)

_PUBLISHED = {
    value for module in (core.primitives, jax.lax) for name, value in vars(module).items() if name.endswith("_p")
}
# Calls of another jaxpr, and the parameter that holds it. Their rules of differentiation were obeyed when they were traced.
_CALLS = {
    **dict.fromkeys(["jit", "pjit", *CHECKPOINTS], "jaxpr"),
    **dict.fromkeys(["core_call", "closed_call", "custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
}
# Other bits would be another result, or what it was traced with would not fit.
_BY_BITS = {"bitcast_convert_type", "nextafter", "custom_linear_solve"}
_EXACT = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def in_float32(call: GradientCall, arrays: Sequence[Any]) -> GradientCall:
    """The same gradient, computed in float32 wherever it is computed with fewer bits.

    Args:
        call: The gradient.
        arrays: The arrays among its arguments, in flattening order. It is traced for their floating dtypes, whatever it is
            called with.
    """
    dtypes = [array.dtype for array in arrays]

    def differentiate(args: Any, kwargs: Any) -> Any:
        given, join = split_arrays((args, kwargs))
        result = TracedResult()

        def traced(*values: Any) -> list[Any]:
            inner_args, inner_kwargs = join(values)
            return result.split(call.differentiate(inner_args, inner_kwargs))

        pairs = zip(given, dtypes, strict=True)
        narrow = [value.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else value for value, dtype in pairs]
        return result.join(_evaluated(with_first_checkpoints(jax.make_jaxpr(traced)(*narrow)), given))

    return replace(call, differentiate=differentiate)


def program_in_float32(program: Any, arguments: Sequence[Any]) -> Any:
    """A traced function as one that computes in float32, of arguments as they are."""
    return jax.make_jaxpr(lambda *values: _evaluated(program, values))(*arguments)


def _evaluated(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, in float32 where it makes them with fewer bits."""
    opened = open_jaxpr(jaxpr)
    known: dict[Any, Any] = dict(zip(opened.constvars, consts_of(jaxpr), strict=True))
    known.update(zip(opened.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return known[atom] if is_variable(atom) else np.asarray(atom.val, atom.aval.dtype)

    for eqn in opened.eqns:
        with eqn.ctx.manager:
            results = _results(eqn, [read(atom) for atom in eqn.invars], opened)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def _results(eqn: Any, operands: Sequence[Any], within: Any) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _evaluated(eqn.params[_CALLS[name]], operands)
    if name in _OTHERWISE:
        return _OTHERWISE[name](eqn, operands)
    if name in MOVES:
        return _bound(eqn, operands, eqn.params)
    is_narrow = any(_is_narrow(atom) for atom in (*eqn.invars, *eqn.outvars))
    if not is_narrow or name in _BY_BITS or eqn.primitive not in _PUBLISHED or side_effects(eqn):
        return _as_it_is(eqn, operands, within)
    params = {key: _wide_parameter(key, value) for key, value in eqn.params.items()}
    return _bound(eqn, [_wide(operand) for operand in operands], params)


def _bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]


def _as_it_is(eqn: Any, operands: Sequence[Any], within: Any) -> list[Any]:
    """What an equation makes of operands in the dtypes that it was traced for."""
    given = {
        atom: jax.lax.convert_element_type(value, atom.aval.dtype) if _is_narrow(atom) else value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if is_variable(atom)
    }
    outvars = [new_variable(var) for var in eqn.outvars]  # nobody reads some of them, and these may be no variables
    alone = derive(within, invars=list(given), outvars=outvars, eqns=[eqn.replace(outvars=outvars)])
    return evaluate(alone, list(given.values()))


def _scan(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    consts, carried = scan_arity(eqn)
    before, params = operands[:consts], eqn.params

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = _evaluated(params["jaxpr"], [*before, *carry, *slices])
        return [_wide(value) for value in results[:carried]], results[carried:]

    carry = [_wide(value) for value in operands[consts : consts + carried]]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(body, carry, operands[consts + carried :], **options)
    return [*last, *stacked]


def _while(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    goes_on, ahead = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
    body, carried = eqn.params["body_jaxpr"], ahead + eqn.params["body_nconsts"]
    return jax.lax.while_loop(
        lambda carry: _evaluated(goes_on, [*operands[:ahead], *carry])[0],
        lambda carry: [_wide(value) for value in _evaluated(body, [*operands[ahead:carried], *carry])],
        [_wide(value) for value in operands[carried:]],
    )


def _cond(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    def taken(branch: Any) -> Callable[..., list[Any]]:
        return lambda *values: [_wide(value) for value in _evaluated(branch, values)]

    return jax.lax.switch(operands[0], [taken(branch) for branch in eqn.params["branches"]], *operands[1:])


_OTHERWISE = {"scan": _scan, "while": _while, "cond": _cond, "reduce_precision": lambda _, operands: operands}


def _is_narrow(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and wide(dtype) != dtype


def _wide(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return value if dtype is None or wide(dtype) == dtype else jax.lax.convert_element_type(value, wide(dtype))


def _wide_parameter(name: str, value: Any) -> Any:
    if name == "precision":
        return _EXACT  # another would round the operands after all
    if isinstance(value, np.dtype):
        return wide(value)
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):  # how a reduction or a scatter puts two numbers together
        types = [jax.ShapeDtypeStruct(var.aval.shape, wide(var.aval.dtype)) for var in open_jaxpr(value).invars]
        traced = program_in_float32(value, types)
        return traced if isinstance(value, core.ClosedJaxpr) else open_jaxpr(traced)
    return value
