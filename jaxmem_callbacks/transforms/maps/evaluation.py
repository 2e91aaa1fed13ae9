"""The evaluation of a proved map at some of its positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem_callbacks.transforms.maps.places import SUM, Place, Result, Where, shape_of
from jaxmem_callbacks.transforms.maps.proof import Body, Mapped, moving_operands
from jaxmem_callbacks.transforms.tracing import evaluate_equation, is_variable, scan_arity, typed


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions that are computed at once.

    Attributes:
        numbers: int32[size], those of the map; behind the last one it comes again.
        counts: bool[size], whether each is one of the map; None where all are.
    """

    numbers: jax.Array
    counts: jax.Array | None

    @property
    def size(self) -> int:
        """How many."""
        return self.numbers.shape[0]

    def of(self, value: Any, atom: Any, at: Place) -> Any:
        """A value that has all positions, at these."""
        return typed(_at(value, self.numbers - at.offset, at), atom.aval.dtype, weak=atom.aval.weak_type)


def _at(value: Any, numbers: Any, at: Place) -> Any:
    shape, axis = value.shape, at.axis
    parts = value.reshape(*shape[:axis], at.before, -1, at.after, *shape[axis + 1 :])
    taken = jnp.take(parts, numbers, axis=axis + 1, mode="clip")
    return taken.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def compute(steps: Sequence[Mapped], look: Callable[[Any, Where], Any], positions: Positions) -> dict[Any, Any]:
    """What equations make at some positions.

    Args:
        steps: What `prove` gave.
        look: Values that they use of others, at these positions where the dimension is in them.
        positions: Which.

    Returns:
        Each variable's value; of a sum over all positions, the part of these, in float32 where it is narrower.
    """
    made: dict[Any, tuple[Any, Result]] = {}

    def value(atom: Any, at: Where) -> Any:
        if not is_variable(atom):
            return atom.val
        if atom not in made:
            return look(atom, at)
        found, place = made[atom]
        return positions.of(found, atom, at) if at is not None and place is None else found

    for step in steps:
        values = [value(atom, at) for atom, at in zip(step.eqn.invars, step.ins, strict=True)]
        results = _computed(step, values, positions)
        made.update(zip(step.eqn.outvars, zip(results, step.outs, strict=True), strict=True))
    return {var: found for var, (found, _) in made.items()}


def _computed(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    """The results of one equation."""
    name, eqn = step.eqn.primitive.name, step.eqn
    if step.outs[:1] == (SUM,):
        return [_summed(step, values, positions)]
    if all(at is None for at in (*step.ins, *step.outs)):
        return evaluate_equation(eqn, values)
    if name in _COMPUTED:
        return _COMPUTED[name](step, values, positions)
    return evaluate_equation(eqn, values)


def _summed(step: Mapped, values: Sequence[Any], positions: Positions) -> Any:
    """A part of a sum over all positions; those that only fill up the last part count nothing."""
    at, eqn = step.ins[0], step.eqn
    assert at is not None
    first = values[0]
    if positions.counts is not None:
        counts = jnp.repeat(jnp.tile(positions.counts, at.before), at.after)
        shape = [-1 if axis == at.axis else 1 for axis in range(first.ndim)]
        first = jnp.where(counts.reshape(shape), first, jnp.zeros((), first.dtype))
    if eqn.primitive.name == "dot_general":
        preferred = eqn.params["preferred_element_type"] or eqn.outvars[0].aval.dtype
        return evaluate_equation(eqn, [first, values[1]], preferred_element_type=widened(preferred))[0]
    return evaluate_equation(eqn, [first.astype(widened(first.dtype))])[0]


def widened(dtype: Any) -> Any:
    """The dtype in which many values of a dtype are added up: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _compute_shaped(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    at, key = step.outs[0], "new_sizes" if step.eqn.primitive.name == "reshape" else "shape"
    assert isinstance(at, Place)
    return evaluate_equation(step.eqn, values, **{key: at.shape(step.eqn.outvars[0], positions.size)})


def _compute_iota(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    at, params = step.outs[0], step.eqn.params
    assert isinstance(at, Place)
    if at.axis != params["dimension"]:
        return _compute_shaped(step, values, positions)
    shape = at.shape(step.eqn.outvars[0], positions.size)
    numbers = (positions.numbers - at.offset).astype(params["dtype"])
    return [jax.lax.broadcast_in_dim(numbers, shape, (at.axis,))]


def _compute_slice(step: Mapped, values: Sequence[Any], _: Positions) -> list[Any]:
    at, params = step.ins[0], step.eqn.params
    assert at is not None
    size = values[0].shape[at.axis]
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    starts[at.axis], limits[at.axis] = 0, size
    return evaluate_equation(step.eqn, values, start_indices=tuple(starts), limit_indices=tuple(limits))


def _compute_window(step: Mapped, values: Sequence[Any], _: Positions) -> list[Any]:
    """A gather or a dynamic slice that takes the dimension whole."""
    at, sizes = step.ins[0], list(step.eqn.params["slice_sizes"])
    if at is not None and sizes[at.axis] == shape_of(step.eqn.invars[0])[at.axis] and sizes[at.axis] != 1:
        sizes[at.axis] = values[0].shape[at.axis]
    # The last chunk may take its last position twice, and so may no longer claim that indices are unique.
    claims = {"unique_indices": False} if "unique_indices" in step.eqn.params else {}
    return evaluate_equation(step.eqn, values, slice_sizes=tuple(sizes), **claims)


def _run(body: Body, values: Sequence[Any], positions: Positions) -> list[Any]:
    given = (
        dict(zip(body.flat.invars, (*body.flat.consts, *values)[-len(body.flat.invars) :], strict=True))
        if body.flat.invars
        else {}
    )
    places = dict(zip(body.flat.invars, body.ins, strict=True))

    def look(atom: Any, at: Where) -> Any:
        value = given[atom]
        return positions.of(value, atom, at) if at is not None and places[atom] is None else value

    made = compute(body.steps, look, positions)
    results_at: dict[Any, Result] = {**places}
    for step in body.steps:
        results_at.update(zip(step.eqn.outvars, step.outs, strict=True))
    results: list[Any] = []
    for atom, at in zip(body.flat.outvars, body.outs, strict=True):
        value = (made[atom] if atom in made else given[atom]) if is_variable(atom) else jnp.asarray(atom.val)
        own = results_at.get(atom) if is_variable(atom) else None
        results.append(positions.of(value, atom, at) if at is not None and own is None else value)
    return results


def _compute_scan(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    eqn, (body,) = step.eqn, step.bodies
    consts, carries = scan_arity(eqn)
    fixed, start, stacked = values[:consts], values[consts : consts + carries], values[consts + carries :]

    def one(state: Any, slices: Any) -> Any:
        results = _run(body, [*fixed, *state, *slices], positions)
        return tuple(results[:carries]), tuple(results[carries:])

    same = {key: eqn.params[key] for key in ("length", "reverse", "unroll", "_split_transpose") if key in eqn.params}
    end, made = jax.lax.scan(one, tuple(start), tuple(stacked), **same)
    return [*end, *made]


def _compute_cond(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    branches = [lambda *inner, body=body: tuple(_run(body, inner, positions)) for body in step.bodies]
    return list(jax.lax.switch(values[0].astype(jnp.int32), branches, *values[1:]))


def _compute_checkpoint(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    return _run(step.bodies[0], values, positions)  # it is under a checkpoint already


def _compute_custom_jvp(step: Mapped, values: Sequence[Any], positions: Positions) -> list[Any]:
    value, *rules = step.bodies
    if not rules:
        return _run(value, values, positions)
    moving = moving_operands(step.eqn)

    # The positions are an argument: a rule is applied after what holds it was traced.
    @jax.custom_jvp
    def call(numbers: Any, *inner: Any) -> Any:
        return tuple(_run(value, inner, Positions(numbers, None)))

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        numbers, *inner = primals
        given = [*inner, *(tangents[1 + place] for place in moving)]
        return call(*primals), tuple(_run(rules[0], given, Positions(numbers, None)))

    return list(call(positions.numbers, *values))


_COMPUTED: dict[str, Callable[[Mapped, Sequence[Any], Positions], list[Any]]] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape"), _compute_shaped),
    **dict.fromkeys(("dynamic_slice", "gather"), _compute_window),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _compute_checkpoint),
    "cond": _compute_cond,
    "custom_jvp_call": _compute_custom_jvp,
    "iota": _compute_iota,
    "scan": _compute_scan,
    "slice": _compute_slice,
}
