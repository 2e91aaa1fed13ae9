"""What a step's state is pinned to enters; what jit needs to hold it there leaves, or the line that moves the state there.

Nothing is ever moved here: a silent transfer of a state costs its size in memory, which is what users of this package lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.programs.steps.donation import Place, result_elements
from jaxmem_callbacks.programs.steps.jitting import Jitted
from jaxmem_callbacks.programs.steps.leaves import Leaf, user_leaves
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Where one argument must lie, and its update too.

    Attributes:
        argument: Its name.
        shardings: One sharding for each of its arrays in its own tree, or one for all.
        place: Where its update is among the results; None where it changes in place or is not returned.
        said: Who says so: ``state_shardings`` or ``sharding='fsdp'``.
        move: The line that moves it there.
    """

    argument: str
    shardings: Any
    place: Place | None
    said: str
    move: str


def state_argument(arguments: Sequence[tuple[str, Any]], shardings: Any, function: Callable[..., Any]) -> int:
    """The place of the first argument with the tree of ``shardings``; a single sharding means the first argument.

    Raises:
        PolicyError: no argument has that tree.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return 0
    wanted = jax.tree.structure(shardings)
    for index, (_, value) in enumerate(arguments):
        if jax.tree.structure(value) == wanted:
            return index
    step = getattr(function, "__name__", "the step")
    names = ", ".join(name for name, _ in arguments)
    msg = (
        f"state_shardings has the tree {wanted!s:.200}, and no argument of {step} has it (arguments: {names}). Expected "
        f"one sharding per array of the state: {advise('sharding.of_state', state='state')}."
    )
    raise PolicyError(msg)


def pin_of_state(
    arguments: Sequence[tuple[str, Any]], shardings: Any, updated: Mapping[str, Place | None], results: Any, step: Any
) -> Pin:
    """What ``state_shardings`` pins.

    Raises:
        PolicyError: no argument has that tree.
    """
    name, value = arguments[state_argument(arguments, shardings, step)]
    tree = jax.tree.structure(value)
    places = {(): results, **{(index,): element for index, element in enumerate(result_elements(results))}}
    same_tree = next((place for place, node in places.items() if jax.tree.structure(node) == tree), None)
    return Pin(
        argument=name,
        shardings=shardings,
        place=same_tree if updated.get(name) is None else updated[name],
        said="state_shardings",
        move=advise("sharding.put", state=name),
    )


def require_placed(pin: Pin, value: Any) -> None:
    """Refuse a state that lies elsewhere than pinned.

    Raises:
        PolicyError: with the first array that does, and the `jax.device_put` line to type.
    """
    for path, leaf, wanted in _pairs(value, pin.shardings):
        if wanted is None or _lies(leaf, wanted):
            continue
        msg = (
            f"{pin.argument}{jax.tree_util.keystr(path)} lies as {leaf.sharding}, expected {wanted} as {pin.said} says. It is "
            f"never moved silently. Move it once, before the loop:\n    {pin.move}"
        )
        raise PolicyError(msg)


def _lies(leaf: Any, wanted: jax.sharding.Sharding) -> bool:
    """Whether an array lies as wanted, or lies nowhere: a number, a shape, or a single element that is bound to no device."""
    if isinstance(leaf, Tracer):
        return True
    placed = getattr(leaf, "sharding", None)
    if placed is None or placed.is_equivalent_to(wanted, leaf.ndim):
        return True
    return isinstance(leaf, jax.Array) and leaf.size == 1 and not leaf.committed


def jit_shardings(
    pins: Sequence[Pin], names: Sequence[str], results: Any, prefix_of: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """``in_shardings`` and ``out_shardings`` that pin arguments and the results that are their updates.

    Args:
        pins: What is pinned.
        names: The positional arguments of the program, in order.
        results: The step's results as shapes.
        prefix_of: From an argument's name and shardings to what the jit of its framework takes for it.
    """
    wanted = {pin.argument: prefix_of(pin.argument, pin.shardings) for pin in pins}
    options: dict[str, Any] = {"in_shardings": tuple(wanted.get(name) for name in names)}
    places = {pin.place: pin.shardings for pin in pins if pin.place is not None}
    if places:
        options["out_shardings"] = _prefix(results, (), places)
    return options


def _prefix(node: Any, here: Place, places: Mapping[Place, Any]) -> Any:
    """The results' containers around what is pinned, None for the rest."""
    if here in places:
        return places[here]
    if not any(place[: len(here)] == here for place in places):
        return None
    inner = [_prefix(element, (*here, index), places) for index, element in enumerate(result_elements(node))]
    return dict(zip(node, inner, strict=True)) if isinstance(node, dict) else type(node)(inner)


def require_returned(pins: Sequence[Pin], results: Any, shardings: Any, jitted: Jitted) -> None:
    """Refuse a step that the user jitted and that returns its state elsewhere than the policy says.

    Raises:
        PolicyError: with the first array that does, and where to write it.
    """
    name = getattr(jitted.function, "__name__", "the step")
    for pin in pins:
        returned = None if pin.place is None else _at(shardings, pin.place)
        if returned is None:
            continue
        shapes = jax.tree.leaves(_at(results, pin.place or ()))
        for shape, (path, placed, wanted) in zip(shapes, _pairs(returned, pin.shardings), strict=True):
            if wanted is None or placed.is_equivalent_to(wanted, len(shape.shape)):
                continue
            msg = (
                f"{name} is already jitted and returns {pin.argument}{jax.tree_util.keystr(path)} as {placed}, expected {wanted} "
                f"as {pin.said} says. Write out_shardings in the {jitted.word} of {name}, or pass the plain "
                "function to jm.jit_step, which pins it."
            )
            raise PolicyError(msg)


def pinned_leaves(leaves: Sequence[Leaf], pin: Pin) -> list[Leaf]:
    """The leaves of a call, those of the pinned argument with the place that they will have, where they have none yet."""
    wanted = pin.shardings
    if not isinstance(wanted, jax.sharding.Sharding):
        by_path = {leaf.path: leaf.value for leaf in user_leaves(pin.argument, wanted)}
    else:
        by_path = {leaf.path: wanted for leaf in leaves if leaf.argument == pin.argument}
    return [_placed(leaf, by_path.get(leaf.path)) if leaf.argument == pin.argument else leaf for leaf in leaves]


def _placed(leaf: Leaf, sharding: Any) -> Leaf:
    if sharding is None or getattr(leaf.value, "sharding", None) is not None:
        return leaf
    return replace(leaf, value=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))


def as_placed(leaves: Sequence[Leaf], shardings: Sequence[jax.sharding.Sharding | None]) -> list[Leaf]:
    """The leaves of a call where its jit puts them: what is bound to no device yet, such as a NumPy batch.

    Args:
        leaves: Of the call.
        shardings: The jit's ``in_shardings`` of each, None where it has none.
    """
    return [
        leaf
        if not isinstance(sharding, jax.sharding.NamedSharding) or _is_bound(leaf.value)
        else replace(leaf, value=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _is_bound(value: Any) -> bool:
    """Whether JAX takes an array where it lies."""
    return value.committed if isinstance(value, jax.Array) else getattr(value, "sharding", None) is not None


def _at(node: Any, place: Place) -> Any:
    for index in place:
        node = result_elements(node)[index]
    return node


def _pairs(value: Any, shardings: Any) -> list[tuple[Any, Any, Any]]:
    """(path, leaf, wanted sharding or None) for each leaf of a value."""
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    if isinstance(shardings, jax.sharding.Sharding):
        return [(path, leaf, shardings) for path, leaf in leaves]
    wanted = jax.tree.leaves(shardings, is_leaf=lambda node: node is None)
    if len(wanted) != len(leaves):  # None that the value holds too
        wanted = jax.tree.leaves(shardings)
    return [(path, leaf, sharding) for (path, leaf), sharding in zip(leaves, wanted, strict=True)]
