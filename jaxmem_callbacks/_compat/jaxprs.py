"""The few places where JAX lines spell a jaxpr differently: building one, evaluating one, reading a scan or a checkpoint.

Up to jax 0.11 a `ClosedJaxpr` holds a `Jaxpr` and its constants, and `scan` has `num_consts`, `num_carry`; from 0.12 there
is one class, and `scan` has `ft_in`. All this goes through `jax.extend.core`, the published side of jaxprs.

Private is what leaves JAX's newer checkpoints (``jax_remat3``) aside for a while and reads their equations: the flag's own
context manager, which holds for one thread, and the object in which an equation keeps its parameters. Without the first the
public flag is set and put back, for all threads; without the second nothing is read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

_JAXPRS = (core.Jaxpr, core.ClosedJaxpr)


def open_jaxpr(closed: Any) -> Any:
    """The jaxpr inside a closed one; the same object where the two are one class."""
    return getattr(closed, "jaxpr", closed)


def argument_names(closed: Any) -> tuple[str, ...] | None:
    """JAX's own names of a traced function's inputs, such as ``state['w']``, in order; None where it gives none.

    Static arguments have none, and only that distinguishes them from arrays: no form of a value does.
    """
    opened = open_jaxpr(closed)
    names = getattr(getattr(opened, "debug_info", None), "arg_names", None)
    if names is None or len(names) != len(opened.invars) or not all(isinstance(each, str) for each in names):
        return None
    return tuple(names)


def consts_of(closed: Any) -> Sequence[Any]:
    """The constants that a closed jaxpr carries."""
    return getattr(closed, "consts", None) or ()


def derive(template: Any, *, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """An open jaxpr without constants, for the same traced function as ``template``."""
    opened = open_jaxpr(template)
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    changes = {
        "constvars": [],
        "invars": list(invars),
        "outvars": list(outvars),
        "eqns": list(eqns),
        "effects": effects,
        "debug_info": opened.debug_info._replace(arg_names=None, result_paths=None),
    }
    if hasattr(opened, "consts"):
        changes["consts"] = ()
    return opened.replace(**changes)


def with_equations(template: Any, *, outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """The same traced function, open or closed, with its arguments and constants, by other equations of the same effects."""
    opened = open_jaxpr(template).replace(outvars=list(outvars), eqns=list(eqns))
    return opened if open_jaxpr(template) is template else template.replace(jaxpr=opened)


def close(jaxpr: Any) -> Any:
    """An open jaxpr without constants as the closed one that `scan` holds and `jaxpr_as_fun` takes."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def evaluate(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of an open jaxpr without constants, equation by equation, with their source lines and scopes."""
    results = core.jaxpr_as_fun(close(jaxpr))(*arguments)
    return [_as_array(result, atom.aval) for result, atom in zip(results, jaxpr.outvars, strict=True)]


def evaluate_equation(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of an equation for other operands, perhaps of other shapes: with its settings, its scope and its source line.

    Args:
        eqn: Its literals stay.
        operands: In the order of its own; those of literals are not read.
        **changed: Parameters that are other ones.
    """
    invars = [atom if isinstance(atom, core.Literal) else core.Var(atom.aval) for atom in eqn.invars]
    given = [pair for pair in zip(invars, operands, strict=True) if not isinstance(pair[0], core.Literal)]
    one = eqn.replace(invars=invars, params={**eqn.params, **changed})
    empty = jax.make_jaxpr(lambda: ())()
    jaxpr = derive(empty, invars=[var for var, _ in given], outvars=eqn.outvars, eqns=[one])
    return evaluate(jaxpr, [value for _, value in given])


def evaluate_closed(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a traced function for other arguments, its constants included, without tracing it again."""
    results = core.jaxpr_as_fun(closed)(*arguments)
    return [_as_array(result, atom.aval) for result, atom in zip(results, open_jaxpr(closed).outvars, strict=True)]


def _as_array(result: Any, aval: Any) -> Any:
    """A result as an array: JAX's evaluator hands out a literal, such as ``jnp.int32(3)`` in aux, in its own wrapping."""
    if isinstance(result, jax.Array):
        return result
    value = np.asarray(result)
    return jnp.asarray(value.item() if aval.weak_type else value)


def with_first_checkpoints(traced: Any) -> Any:
    """A jaxpr, open or closed, with the checkpoints and names of JAX's newer implementation as those of its first.

    The newer ones keep their jaxpr where no public function replaces it, and are one primitive under many names.
    """
    opened = open_jaxpr(traced)
    if not getattr(opened, "is_high", False):
        return traced
    return with_equations(traced, outvars=opened.outvars, eqns=[_first_checkpoint(eqn) for eqn in opened.eqns])


def _first_checkpoint(eqn: Any) -> Any:
    held = held_params(eqn)
    if "policy" in held:
        filled = checkpoint_equation(
            checkpoint_template(held["policy"], prevent_cse=True),
            open_jaxpr(with_first_checkpoints(held["jaxpr"])),
            eqn.invars,
            eqn.outvars,
        )
        params = {**filled.params, "prevent_cse": held["prevent_cse"]}
        return filled.replace(params=params, ctx=eqn.ctx, source_info=eqn.source_info)
    if "name" in held and not subjaxprs(eqn):
        return name_equation(name_template(held["name"]), eqn.invars[0], eqn.outvars[0], eqn)
    return eqn if held else with_subjaxprs(eqn, with_first_checkpoints)


def checkpoint_template(policy: Callable[..., Any] | None, *, prevent_cse: bool) -> Any:
    """A `jax.checkpoint` equation to be filled with another jaxpr.

    Taken from a trace of the public function, so that the parameters are always those of the running JAX; filling it
    in saves tracing the equations of a segment once more.
    """
    with first_checkpoints():
        traced = jax.make_jaxpr(jax.checkpoint(lambda x: x + 1.0, policy=policy, prevent_cse=prevent_cse))(0.0)
    return open_jaxpr(traced).eqns[0]


def checkpoint_equation(template: Any, jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An equation that computes ``jaxpr`` of ``invars`` under a checkpoint."""
    return template.replace(
        invars=list(invars),
        outvars=list(outvars),
        params={**template.params, "jaxpr": jaxpr},
        effects=jaxpr.effects,
    )


def name_template(name: str) -> Any:
    """An equation that names a value for checkpoint policies, to be filled in; from a trace like `checkpoint_template`."""
    with first_checkpoints():
        return open_jaxpr(jax.make_jaxpr(lambda x: checkpoint_name(x, name))(0.0)).eqns[0]


def name_equation(template: Any, var: Any, named: Any, like: Any) -> Any:
    """An equation that names ``var`` as ``named``, where ``like`` stands: in the same mesh, under the same settings and scope.

    JAX rounds what a checkpoint keeps by an equation that has the scope and source line of the one that names it, and by these
    the compiled program shows what it stores.
    """
    return template.replace(invars=[var], outvars=[named], ctx=like.ctx, source_info=like.source_info)


def scan_arity(eqn: Any) -> tuple[int, int]:
    """Number of constants and of carried values of a `scan` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def subjaxprs(eqn: Any) -> list[Any]:
    """The open jaxprs among an equation's parameters, in the order of its parameters."""
    params = (*eqn.params.values(), *held_params(eqn).values())
    values = (value if isinstance(value, (tuple, list)) else (value,) for value in params)
    items = (item for several in values for item in several)
    return [open_jaxpr(item) for item in items if isinstance(item, _JAXPRS)]


def with_subjaxprs(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """An equation with each jaxpr among its parameters, open or closed, replaced by what ``change`` makes of it."""

    def changed(value: Any) -> Any:
        if isinstance(value, _JAXPRS):
            return change(value)
        if isinstance(value, (tuple, list)) and any(isinstance(item, _JAXPRS) for item in value):
            items = map(changed, value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


def source_lines(eqn: Any) -> list[tuple[str, int]]:
    """Files and lines of the calls that made an equation, innermost first, within the trace that it is part of."""
    recorded = eqn.source_info.traceback
    if not hasattr(recorded, "as_python_traceback"):
        return []
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(recorded.as_python_traceback())]
    return lines[::-1]


try:
    from jax._src.config import remat3 as _flag  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
except ImportError:  # a JAX without the flag, or with it elsewhere
    _flag = None
_NAME = "jax_remat3"


@contextmanager
def first_checkpoints() -> Generator[None]:
    """Where a checkpoint or a name that is traced is that of JAX's first implementation, whatever ``jax_remat3`` says."""
    if _flag is not None:
        with _flag(False):
            yield
        return
    before = getattr(jax.config, _NAME, False)
    if not before:
        yield
        return
    jax.config.update(_NAME, False)
    try:
        yield
    finally:
        jax.config.update(_NAME, before)


def held_params(eqn: Any) -> dict[str, Any]:
    """Parameters that an equation keeps in an object of its own, as a newer checkpoint does; none of others."""
    return getattr(eqn.params.get("_prim"), "params", {})
