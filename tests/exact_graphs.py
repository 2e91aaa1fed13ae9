"""Stretches of real losses as losses of their own, and as chains for the exact reference: derivatives by the rules of calculus.

What each equation needs for its derivative is listed here anew, primitive by primitive, and another primitive is an error.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem_callbacks.transforms.tracing import (
    Equations,
    derive,
    evaluate,
    evaluate_equation,
    is_variable,
    operands_of,
    variables,
)
from tests.comparisons import CHECKPOINTS
from tests.exact_plans import Chain, Made, Plan

# Another shape of the same elements: no value of its own.
_SHAPES = {"broadcast_in_dim", "copy", "expand_dims", "name", "reshape", "rev", "squeeze", "stop_gradient", "transpose"}
_MOVES = _SHAPES | {"concatenate", "convert_element_type", "pad", "slice", "split"}
_WITHOUT_OPERANDS = {"add", "concatenate", "convert_element_type", "neg", "pad", "reduce_sum", "slice", "split", "sub"}
_BY_RESULT = {"exp", "logistic", "rsqrt", "sqrt", "tanh"}
_PRODUCTS = {"conv_general_dilated", "dot_general", "mul"}
_BY_OPERANDS = {"integer_pow", "log", "max", "reduce_max", "square"}
_ELEMENTWISE = {
    *(
        "abs",
        "add",
        "and",
        "bitcast_convert_type",
        "convert_element_type",
        "div",
        "eq",
        "exp",
        "ge",
        "gt",
        "integer_pow",
    ),
    *(
        "is_finite",
        "log",
        "logistic",
        "lt",
        "max",
        "mul",
        "ne",
        "neg",
        "or",
        "rsqrt",
        "select_n",
        "shift_right_logical",
    ),
    *("sqrt", "square", "sub", "tanh"),
}
# Made of what a stretch is given, these are given to it too.
_OF_ARGUMENTS = _ELEMENTWISE | _MOVES | {"iota", "random_bits", "random_split"}


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _bytes(atom: Any) -> int:
    return _size(atom) * atom.aval.dtype.itemsize


def _operations(eqn: Any) -> int:
    """A multiply-add is two; an elementwise operation is one an element, a sum one an element that it adds."""
    name = eqn.primitive.name
    if name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1]
        outputs = kernel.aval.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(eqn.outvars[0]) * _size(kernel) // outputs
    if name.startswith("reduce_"):
        return _size(eqn.invars[0])
    return 0 if name in _MOVES else _size(eqn.outvars[0])


def _floats(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _needed(eqn: Any, varies: set[Any]) -> list[Any]:
    """Values that the derivative of an equation with an operand that varies uses."""
    name = eqn.primitive.name
    if name in _WITHOUT_OPERANDS or not _floats(eqn.outvars[0]):
        return []
    if name in _BY_RESULT:
        return [eqn.outvars[0]]
    if name == "select_n":
        return variables(eqn.invars[:1])
    if name == "div":
        by = variables(eqn.invars[1:])
        return variables(eqn.invars) if not varies.isdisjoint(by) else by
    assert name in _BY_OPERANDS | _PRODUCTS, f"{name} has no rule here"
    if name in _PRODUCTS:
        first, second = eqn.invars
        some = [(first, second), (second, first)]
        return [one for one, other in some if is_variable(one) and is_variable(other) and other in varies]
    return variables(eqn.invars)


def stretch(flat: Equations, start: int, stop: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Equations of a loss as a loss of their own: the sum of all that is used behind them.

    What is a cheap function of what the stretch takes is taken in its place, so that only values that cost something are made.
    """
    eqns, taken = list[Any](), set[Any]()
    made = {var for eqn in flat.eqns[start:stop] for var in eqn.outvars}
    for eqn in flat.eqns[start:stop]:
        if eqn.primitive.name in _OF_ARGUMENTS and not any(var in made - taken for var in variables(eqn.invars)):
            taken.update(eqn.outvars)
        else:
            eqns.append(eqn)
    made -= taken
    behind = {var for eqn in flat.eqns[stop:] for var in variables(eqn.invars)} | set(variables(flat.outvars))
    results = [var for eqn in eqns for var in eqn.outvars if var in behind and _floats(var)]
    kept = _leading_to(results, eqns)
    given = [var for var in dict.fromkeys(variables(atom for eqn in kept for atom in eqn.invars)) if var not in made]
    jaxpr = derive(flat.template, invars=given, outvars=results, eqns=kept)
    trained = [var for var in given if _floats(var)]
    others = [var for var in given if not _floats(var)]

    def loss(floats: Sequence[Any], rest: Sequence[Any]) -> Any:
        values = dict(zip([*trained, *others], [*floats, *rest], strict=True))
        made = evaluate(jaxpr, [values[var] for var in given])
        # In its own dtype: a sum in float32 would first make a copy that no loss has there.
        return sum(jax.lax.reduce(one, one.dtype.type(0), jax.lax.add, tuple(range(one.ndim))) for one in made)

    shapes = [[jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in some] for some in (trained, others)]
    return loss, tuple(shapes)


def _leading_to(results: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
    wanted, kept = set(results), list[Any]()
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted.update(variables(eqn.invars))
    return kept[::-1]


@dataclass(frozen=True, slots=True)
class Graph:
    """A loss as a chain.

    Attributes:
        flat: Its equations.
        model: The steps: one for each result that is not another shape of a value.
        place_of: The step whose value a variable is.
        before: How many steps come before each equation, and before the end.
    """

    flat: Equations
    model: Chain
    place_of: dict[Any, int]
    before: list[int]

    def plan_in(self, jaxpr: Any) -> Plan:
        """What was made of the loss: equations come in their order, each checkpoint is a segment, kept values are named."""
        place, cuts, kept, latest = 0, set[int](), 0, dict[Any, Any]()
        for eqn in jaxpr.eqns:
            inner = eqn.params["jaxpr"].eqns if eqn.primitive.name in CHECKPOINTS else None
            if inner is not None:
                cuts.add(self.before[place])
            for one in inner or [eqn]:
                if one.primitive.name == "name":
                    kept |= 1 << latest[one.invars[0]]
                    continue
                own = self.flat.eqns[place]
                assert own.primitive.name == one.primitive.name
                latest.update(
                    (var, self.place_of.get(mine)) for var, mine in zip(one.outvars, own.outvars, strict=True)
                )
                place += 1
            if inner is not None:
                cuts.add(self.before[place])
        assert place == len(self.flat.eqns)
        return Plan(tuple(sorted(cuts - {0, self.before[-1]})), kept)

    def made_of(self, plan: Plan) -> Callable[..., Any]:
        """The loss with a checkpoint around each segment of a plan but the last, which keep what the plan keeps."""
        bounds = [0, *(bisect.bisect_left(self.before, cut) for cut in plan.cuts), len(self.flat.eqns)]
        kept = {var for var, place in self.place_of.items() if plan.kept >> place & 1}
        keep = jax.checkpoint_policies.save_only_these_names("kept")

        def loss(floats: Sequence[Any], rest: Sequence[Any]) -> Any:
            values = dict(zip(self.flat.invars, [*self.flat.consts, *floats, *rest], strict=True))
            for start, end in itertools.pairwise(bounds):
                eqns = self.flat.eqns[start:end]
                taken = list(operands_of(eqns).keys() & values.keys())
                made = [var for eqn in eqns for var in eqn.outvars]
                segment = functools.partial(_evaluated, eqns, taken, kept if end < bounds[-1] else ())
                call = jax.checkpoint(segment, policy=keep) if end < bounds[-1] else segment
                values.update(zip(made, call([values[var] for var in taken]), strict=True))
            return values[self.flat.outvars[0]]

        return loss


def _evaluated(eqns: Sequence[Any], taken: Sequence[Any], kept: Collection[Any], operands: Sequence[Any]) -> list[Any]:
    """What equations make, in order, with the kept values named."""
    values, made = dict(zip(taken, operands, strict=True)), list[Any]()
    for eqn in eqns:
        results = evaluate_equation(eqn, [values[atom] if is_variable(atom) else atom.val for atom in eqn.invars])
        named = [
            checkpoint_name(one, "kept") if var in kept else one for var, one in zip(eqn.outvars, results, strict=True)
        ]
        values.update(zip(eqn.outvars, named, strict=True))
        made += named
    return made


def graph_of(flat: Equations) -> Graph:
    """The chain of a loss."""
    root: dict[Any, int] = {}
    steps, before = list[Made](), list[int]()
    varies = {var for var in flat.invars if _floats(var)}
    follows = _not_stopped(flat)
    for eqn in flat.eqns:
        before.append(len(steps))
        operands = variables(eqn.invars)
        takes = tuple(dict.fromkeys(root[var] for var in operands if var in root))
        if eqn.primitive.name in _SHAPES:
            root.update((var, takes[0]) for var in eqn.outvars if takes)
        for var in eqn.outvars if eqn.primitive.name not in _SHAPES else ():
            root[var] = len(steps)
            is_varied = not varies.isdisjoint(operands) and var in follows
            needs = [one for one in _needed(eqn, varies) if one in root] if is_varied else []
            fits = any(one in root and _bytes(one) == _bytes(var) for one in operands)
            steps.append(
                Made(
                    _bytes(var),
                    _operations(eqn) // len(eqn.outvars),
                    takes,
                    tuple(dict.fromkeys(root[one] for one in needs)),
                    in_place=eqn.primitive.name in _ELEMENTWISE and fits,
                    is_sum=eqn.primitive.name == "reduce_sum",
                )
            )
        if eqn.primitive.name != "stop_gradient" and not varies.isdisjoint(operands):
            varies.update(var for var in eqn.outvars if _floats(var))
    return Graph(flat, Chain(steps), root, [*before, len(steps)])


def _not_stopped(flat: Equations) -> set[Any]:
    """Values that the loss follows from otherwise than through `stop_gradient`."""
    found = set(variables(flat.outvars))
    for eqn in reversed(flat.eqns):
        if eqn.primitive.name != "stop_gradient" and not found.isdisjoint(eqn.outvars):
            found.update(variables(eqn.invars))
    return found
