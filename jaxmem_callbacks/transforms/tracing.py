"""Traced functions: their jaxprs, flat lists of equations, arrays among arguments and results, JAX's weak types.

The variables of `Equations` are each made once, and no other function shares them.

JAX lines spell a jaxpr differently, and this file alone knows how. Up to jax 0.11 a `ClosedJaxpr` holds a `Jaxpr` and its
constants, and `scan` has `num_consts`, `num_carry`; from 0.12 there is one class, and `scan` has `ft_in`. All this goes through
`jax.extend.core`, the published side of jaxprs.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from jaxmem_callbacks._compat.remat3 import first_checkpoints, held_params
from jaxmem_callbacks.records.errors import LossRefusedError

# A debug effect without results is moved behind its segment; every other effect would be repeated by a recomputation.
_MOVABLE_EFFECTS = {"DebugEffect", "OrderedDebugEffect"}
_JITS = {"jit", "pjit"}
# JAX's note that a collective belongs to a named axis: nothing happens outside the program, so it may be recomputed.
_NO_EFFECTS = {"NamedAxisEffect"}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Equations:
    """A flat function: ``invars`` (constants first) -> ``outvars`` by ``eqns``.

    Attributes:
        template: The traced jaxpr that new jaxprs are derived from.
        invars: Variables of the constants, then of the arguments.
        consts: Values of the constants.
        eqns: In order of evaluation.
        outvars: Variables or literals.
    """

    template: Any
    invars: tuple[Any, ...]
    consts: tuple[Any, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Any, ...]


def is_variable(atom: Any) -> bool:
    """Whether an operand is a variable, not a literal."""
    return type(atom) is not core.Literal


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among operands, in order."""
    return [atom for atom in atoms if type(atom) is not core.Literal]


def operands_of(eqns: Iterable[Any]) -> dict[Any, None]:
    """The variables that equations use, each once, in order."""
    return dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))


def flatten(closed: Any, *, hoist_constants: bool = True) -> Equations:
    """Inline nested jits of a closed jaxpr, drop what nobody uses, and stop gradients where they begin to lead nowhere.

    Args:
        closed: What was traced.
        hoist_constants: Whether a nested jit that holds constants is inlined too, its constants becoming the whole's. A
            loop's body has no place for them: there such a jit stays one equation.
    """
    flat = inlined(closed, hoist_constants=hoist_constants)
    return replace(flat, eqns=tuple(_stopped_early(unused_dropped(flat.eqns, flat.outvars), flat.outvars)))


def inlined(closed: Any, *, hoist_constants: bool = True, is_inlined: Callable[[Any], bool] | None = None) -> Equations:
    """The same with every equation kept.

    Args:
        closed: What was traced.
        hoist_constants: As in `flatten`.
        is_inlined: Which equations with a function of their own are replaced by its equations; None for `is_plain_jit`.
    """
    opened = open_jaxpr(closed)
    inliner = _Inliner(hoist_constants=hoist_constants, is_inlined=is_inlined or is_plain_jit)
    outvars = inliner.inline(opened, {}, None)
    return Equations(
        template=closed,
        invars=(*opened.constvars, *inliner.constvars, *opened.invars),
        consts=(*consts_of(closed), *inliner.consts),
        eqns=tuple(inliner.eqns),
        outvars=tuple(outvars),
    )


class _Inliner:
    """Collects the equations of a jaxpr and of those inlined in it, and the constants of the latter.

    Args:
        hoist_constants: Whether a nested function that holds constants is inlined too.
        is_inlined: Which equations with a function of their own are replaced by its equations.
    """

    def __init__(self, *, hoist_constants: bool, is_inlined: Callable[[Any], bool]) -> None:
        self._hoist_constants = hoist_constants
        self._is_inlined = is_inlined
        self.constvars: list[Any] = []
        self.consts: list[Any] = []
        self.eqns: list[Any] = []

    def inline(self, jaxpr: Any, known: dict[Any, Any], call: Any) -> list[Any]:
        """Collect a jaxpr's equations and return its results.

        Args:
            jaxpr: An open jaxpr.
            known: Its variables that already have another name.
            call: Scope and source line of the call being inlined, or None at the top, whose variables keep their names.
        """

        def look(atom: Any) -> Any:
            return known.get(atom, atom) if is_variable(atom) else atom

        for eqn in jaxpr.eqns:
            invars = [look(atom) for atom in eqn.invars]
            source = eqn.source_info if call is None else _seen_from(call, eqn.source_info)
            if self._is_inlined(eqn) and (self._hoist_constants or not consts_of(eqn.params["jaxpr"])):
                inner = eqn.params["jaxpr"]
                body = open_jaxpr(inner)
                fresh = {var: new_variable(var) for var in body.constvars}
                self.constvars.extend(fresh.values())
                self.consts.extend(consts_of(inner))
                results = self.inline(body, fresh | dict(zip(body.invars, invars, strict=True)), source)
                known.update(zip(eqn.outvars, results, strict=True))
            elif call is None:
                self.eqns.append(eqn if invars == eqn.invars else eqn.replace(invars=invars))
            else:
                outvars = [new_variable(var) for var in eqn.outvars]
                known.update(zip(eqn.outvars, outvars, strict=True))
                self.eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))
        return [look(atom) for atom in jaxpr.outvars]


def _seen_from(call: Any, source: Any) -> Any:
    """Where an inlined equation stands: in the call's scope, and on the call's line where its own is no line of the user's.

    JAX traces a library's jitted function, such as `jnp.take`, once for all that call it: its equations know no caller.
    """
    seen = source.replace(name_stack=call.name_stack + source.name_stack)
    return seen if source_info_util.summarize(source) else seen.replace(traceback=call.traceback)


def is_jit(eqn: Any) -> bool:
    """Whether an equation is a nested jit. Inlined, its placement of values is lost."""
    return eqn.primitive.name in _JITS


def is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a nested jit without a placement of values, so that inlining it changes nothing."""
    if eqn.primitive.name not in _JITS:
        return False
    params = eqn.params
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    layouts = [*(params.get("in_layouts") or ()), *(params.get("out_layouts") or ())]
    return (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not params.get("compiler_options_kvs")
    )


def new_variable(like: Any) -> Any:
    """A variable of its own for the same kind of value."""
    return core.Var(like.aval)


def side_effects(eqn: Any) -> set[str]:
    """The kinds of what an equation does besides computing its results."""
    return {type(effect).__name__ for effect in eqn.effects} - _NO_EFFECTS


def unused_dropped(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations that ``outvars`` need, and those that report."""
    needed = set(variables(outvars))
    kept = []
    for eqn in reversed(eqns):
        if side_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def _stopped_early(eqns: Sequence[Any], outvars: Sequence[Any]) -> Sequence[Any]:
    """The equations, with a `stop_gradient` before those whose results only lead to one, such as the maximum in a softmax.

    JAX keeps nothing for the derivatives of such equations. A list of some of them does not show what their results lead to.
    """
    stop = next((eqn for eqn in eqns if is_stop(eqn)), None)
    if stop is None:
        return eqns
    leading = set(variables(outvars))
    for eqn in reversed(eqns):
        if not is_stop(eqn) and (side_effects(eqn) or not leading.isdisjoint(eqn.outvars)):
            leading.update(variables(eqn.invars))
    found, stopped = list[Any](), dict[Any, Any]()
    for eqn in eqns:
        if is_stop(eqn) or side_effects(eqn) or not leading.isdisjoint(eqn.outvars):
            found.append(eqn)
            continue
        for var in dict.fromkeys(variables(eqn.invars)):
            if var not in stopped and jax.dtypes.issubdtype(getattr(var.aval, "dtype", None), np.inexact):
                stopped[var] = new_variable(var)
                found.append(
                    stop.replace(invars=[var], outvars=[stopped[var]], source_info=eqn.source_info, ctx=eqn.ctx)
                )
        found.append(
            eqn.replace(invars=[stopped.get(atom, atom) if is_variable(atom) else atom for atom in eqn.invars])
        )
        stopped.update(zip(eqn.outvars, eqn.outvars, strict=True))
    return found


def is_stop(eqn: Any) -> bool:
    """Whether an equation hands a value on and no gradient back."""
    return eqn.primitive.name == "stop_gradient"


def needed_equations(outvars: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
    """The equations that ``outvars`` need, and none that only reports."""
    needed = set(variables(outvars))
    kept = []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def is_movable(eqn: Any) -> bool:
    """Whether an equation only reports (`jax.debug.print`): it is moved behind its segment, so it runs once."""
    return bool(side_effects(eqn)) and not any(type(var) is core.Var for var in eqn.outvars)


def reports_inside(eqn: Any) -> bool:
    """Whether an equation reports from a body of its own, such as a loop: a checkpoint would report twice."""
    return bool(side_effects(eqn)) and not is_movable(eqn)


def refuse_effects(eqns: Iterable[Any]) -> None:
    """Refuse what a recomputation would do twice.

    Raises:
        LossRefusedError: an equation has an effect other than debug output; the message names it and its source.
    """
    for eqn in eqns:
        kinds = sorted(side_effects(eqn) - _MOVABLE_EFFECTS)
        if kinds:
            msg = (
                f"The loss calls `{eqn.primitive.name}` with the effect {', '.join(kinds)}, which a recomputed segment "
                f"would repeat{where(eqn)}. Use jax.debug.callback for reporting, return the value through has_aux "
                "instead, or take this gradient with jax.value_and_grad."
            )
            raise LossRefusedError(msg)


def where(eqn: Any) -> str:
    """The module scope that an equation came from, in brackets after a space; empty where it has none."""
    scope = str(eqn.source_info.name_stack)
    return f" (in {scope})" if scope else ""


def is_weak(array: Any) -> bool:
    """Whether an array's dtype gives way to any other's; also of shapes and of what tracing knows."""
    return bool(getattr(array, "weak_type", False))


def typed(array: jax.Array, dtype: Any, *, weak: bool) -> jax.Array:
    """The array in a dtype, weakly or not."""
    if array.dtype == dtype and is_weak(array) == weak:
        return array
    if not weak:
        return jax.lax.convert_element_type(array, dtype)
    return primitives.convert_element_type_p.bind(array, new_dtype=dtype, weak_type=True, sharding=None)


def split_arrays(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a pytree, and the function that puts others in their place.

    Args:
        tree: Any pytree.
        is_leaf: What travels with the arrays and is not looked into, such as a framework's own objects.

    Returns:
        The arrays in flattening order, and ``join(arrays)`` giving the pytree back.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) or (is_leaf is not None and is_leaf(leaf))
    ]

    found = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # a tracer kept here would outlive its trace, which `jax.checking_leaks()` calls a leak

    def join(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(treedef, filled)

    return found, join


def trace(function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
    """A function of arrays as a closed jaxpr, and the function that puts arrays into the place of those among its results.

    What else it returns is carried past the trace.
    """
    joins: list[Callable[[Sequence[Any]], Any]] = []

    def traced(*values: Any) -> list[Any]:
        found, join = split_arrays(function(*values))
        joins.append(join)
        return found

    closed = jax.make_jaxpr(traced)(*arrays)
    return closed, joins[-1]


def traced_dtype(leaf: Any) -> Any:
    """The dtype that an array has in a trace: NumPy's 64 bits are 32 there, unless JAX is configured otherwise.

    JAX turns a NumPy array without a word, and warns where a shape asks for 64 bits.
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype
    with contextlib.suppress(TypeError):  # text and objects, which no trace takes
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf.dtype


# The checkpoint's own name, on every JAX line.
CHECKPOINTS = {"checkpoint", "remat", "remat2"}


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a checkpoint."""
    return eqn.primitive.name in CHECKPOINTS


def keep_nothing(*_: Any, **__: Any) -> bool:
    """The checkpoint policy of a loop over chunks, by which its checkpoint is known."""
    return False


def is_chunked(eqn: Any) -> bool:
    """Whether an equation is a loop over the chunks that a policy asked for."""
    inner = (each for body in subjaxprs(eqn) for each in body.eqns) if eqn.primitive.name == "scan" else ()
    return any(each.params.get("policy") is keep_nothing for each in inner)


def has_own_checkpoint(eqn: Any) -> bool:
    """Whether an equation is checkpointed by its author, or is a loop whose body is."""
    if is_checkpoint(eqn):
        return eqn.params.get("policy") is not keep_nothing
    return any(has_own_checkpoint(inner) for body in subjaxprs(eqn) for inner in body.eqns)


def checkpointed_functions(eqns: Iterable[Any]) -> frozenset[Any]:
    """The functions under checkpoints among equations and in their bodies, as jaxprs, which are equal only to themselves."""
    found: set[Any] = set()
    for eqn in eqns:
        bodies = subjaxprs(eqn)
        found.update(bodies if is_checkpoint(eqn) else ())
        found.update(*(checkpointed_functions(body.eqns) for body in bodies))
    return frozenset(found)


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


def is_key(array: Any) -> bool:
    """Whether an array is a typed random key, or several."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
