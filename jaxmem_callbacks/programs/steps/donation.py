"""A step's arguments and results enter; the names of the arguments to donate leave.

The rule: an argument is donated where the step returns it updated, that is where some result has the same tree, shapes
and dtypes. Each result is claimed once, arguments in order. The batch is never donated, by these signs:

- its name is in `kinds.BATCH_NAMES`;
- a single array is taken for state only while it stands before the first argument that is not updated, and never where
  it holds one element only (a learning rate looks like a loss, and there is nothing to save).

Where more arguments look alike than there are results, those called ``ref_...``, ``teacher``, ``frozen`` and the like
step back first. Objects of a framework that are updated in place count as updated.

A gradient looks like the parameters that it is taken of, and is no update of them: who calls the step needs them after it. The
traced step tells the two apart (`roles.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.errors import DonationError, did_you_mean
from jaxmem_callbacks.transforms.arg_roles import is_batch_name
from jaxmem_callbacks.transforms.frameworks import framework_of

_READ_ONLY_WORDS = ("ref", "reference", "teacher", "frozen", "old", "pretrained", "base", "target")
_FEW = 0.1
_LEAST_SHARE, _LEAST_BYTES = 0.01, 32  # of what is worth a word; a key has 8 or 16 bytes
_DEPTH = 2  # `return (params, opt_state), loss` is as deep as steps nest what they return

Shape = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
Place = tuple[int, ...]  # indices from the whole result to one inside it


def infer_donation(
    arguments: Sequence[tuple[str, Any]], results: Any, leaves: Sequence[Leaf] | None = None
) -> tuple[str, ...]:
    """Names of the arguments that the step returns updated.

    Args:
        arguments: The traced (not static) arguments with their names, in order.
        results: The step's results as shapes.
        leaves: The arrays of the arguments in the program's order, which know what the traced step does with each; None where
            no trace tells.
    """
    return tuple(updated_arguments(arguments, results, leaves))


def updated_arguments(
    arguments: Sequence[tuple[str, Any]], results: Any, leaves: Sequence[Leaf] | None = None
) -> dict[str, Place | None]:
    """The arguments that the step returns updated, and where; None for a framework's objects, which change in place."""
    free = _result_nodes(results)
    firsts = _first_results(results)
    arrays: dict[str, list[Leaf]] = {}
    for leaf in leaves or ():
        arrays.setdefault(leaf.argument, []).append(leaf)
    updated: dict[str, Place | None] = {}
    only_state_so_far = True
    for name, value in _readers_last(arguments):
        own = arrays.get(name, [])
        if framework_of(value) is not None:
            if not any(leaf.differentiated for leaf in own) or any(leaf.updated for leaf in own):
                updated[name] = None
            continue
        shape = _shape_of(value)
        alike = (place for place, each in free.items() if each == shape and _may_be(own, firsts[place]))
        place = None if is_batch_name(name) else next(alike, None)
        if place is None or not shape[1] or (_is_single_array(shape) and not (only_state_so_far and _is_worth(shape))):
            only_state_so_far = False
            continue
        updated[name] = place
        free = {p: s for p, s in free.items() if not _overlap(p, place)}
    return {name: updated[name] for name, _ in arguments if name in updated}


def worth_donating(names: Iterable[str], sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Those arguments that are worth a word: a key of a few bytes gives nothing back.

    Args:
        names: Of arguments that could be donated.
        sizes: The argument and the bytes of each array of the call.
    """
    of_each: dict[str, int] = {}
    for name, count in sizes:
        of_each[name] = of_each.get(name, 0) + count
    least = max(_LEAST_SHARE * sum(of_each.values()), _LEAST_BYTES)
    return tuple(name for name in names if of_each.get(name, 0) >= least)


def passing_arguments(
    arguments: Sequence[tuple[str, Any]], donated: Collection[str], state: Collection[str], results: Any
) -> set[str]:
    """The donated arguments of which the step returns no update, as where a user donates the batch too.

    Args:
        arguments: The traced arguments with their names, in order.
        donated: Names of those that are donated.
        state: Names of those that are known to be state by their class or name.
        results: The step's results as shapes.
    """
    updated = updated_arguments(arguments, results)
    nodes = _result_nodes(results)
    free = {p: s for p, s in nodes.items() if not any(q is not None and _overlap(p, q) for q in updated.values())}
    passing: set[str] = set()
    for name, value in arguments:
        if name not in donated or name in updated or name in state:
            continue
        structure, types = _shape_of(value)
        shapes = [shape for shape, _ in types]
        is_only_state = not updated or not is_batch_name(name)
        if not (is_only_state and any(s == structure and [x for x, _ in t] == shapes for s, t in free.values())):
            passing.add(name)
    return passing


def needs_results(arguments: Sequence[tuple[str, Any]]) -> bool:
    """Whether the results must be known to decide: some argument is neither a framework's object nor a batch by name."""
    return any(framework_of(v) is None and not is_batch_name(n) and jax.tree.leaves(v) for n, v in arguments)


def check_names(names: Sequence[str], arguments: Sequence[tuple[str, Any]], function: Callable[..., Any]) -> None:
    """Refuse a name that is no argument of the step.

    Raises:
        DonationError: with the step's arguments.
    """
    known = [name for name, _ in arguments]
    for name in names:
        if name not in known:
            step = getattr(function, "__name__", "the step")
            msg = (
                f"donate_argnames has {name!r}, which is no argument of {step}.{did_you_mean(name, known)} "
                f"Arguments of this call: {', '.join(known)}. Write donate_argnames=({known[0]!r},)."
            )
            raise DonationError(msg)


def _shape_of(tree: Any) -> Shape:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(getattr(leaf, "shape", ())), _dtype(leaf)) for leaf in leaves)


def _dtype(leaf: Any) -> Any:
    if hasattr(leaf, "dtype"):
        # NumPy's 64 bits are 32 in a trace, unless JAX was told otherwise.
        is_jaxs_own = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        return leaf.dtype if is_jaxs_own else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.dtypes.result_type(leaf) if isinstance(leaf, bool | int | float | complex) else type(leaf)


def _is_single_array(shape: Shape) -> bool:
    return jax.tree_util.treedef_is_leaf(shape[0])


def _is_worth(shape: Shape) -> bool:
    return math.prod(shape[1][0][0]) > 1


def _may_be(own: Sequence[Leaf], first: int) -> bool:
    """Whether results can be an argument's arrays updated. A few may be gradients, as statistics of 8-bit floats are.

    Args:
        own: The arrays.
        first: The number of the first of these results.
    """
    gradients = sum(math.prod(leaf.shape) for at, leaf in enumerate(own) if first + at in leaf.no_update)
    updated = sum(math.prod(leaf.shape) for leaf in own if leaf.updated)
    return not gradients or gradients < _FEW * updated


def _first_results(results: Any, place: Place = (), first: int = 0) -> dict[Place, int]:
    """The number of the first array of every result that `_result_nodes` lists."""
    firsts = {place: first}
    if len(place) < _DEPTH:
        for index, element in enumerate(result_elements(results)):
            firsts |= _first_results(element, (*place, index), first)
            first += len(jax.tree.leaves(element))
    return firsts


def _result_nodes(results: Any, place: Place = ()) -> dict[Place, Shape]:
    """Every result an argument could come back as: the whole, its elements, and theirs."""
    nodes = {place: _shape_of(results)}
    if len(place) < _DEPTH:
        for index, element in enumerate(result_elements(results)):
            nodes |= _result_nodes(element, (*place, index))
    return nodes


def result_elements(results: Any) -> list[Any]:
    """What a result that is a plain container holds, in order; nothing for any other."""
    if type(results) not in (tuple, list, dict):
        return []
    return list(results.values() if isinstance(results, dict) else results)


def _overlap(a: Place, b: Place) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _readers_last(arguments: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The arguments in order, but those that are called like read-only ones behind their look-alikes."""
    return sorted(arguments, key=lambda item: any(word in _READ_ONLY_WORDS for word in item[0].lower().split("_")))
