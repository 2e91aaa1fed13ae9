"""Where a step's state and batch are placed, by a policy and by its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks.programs.steps.donation import Place, result_elements
from jaxmem_callbacks.programs.steps.leaves import Leaf, user_leaves, written_arguments
from jaxmem_callbacks.programs.steps.user_jit import Jitted, hold_modules
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import StepPolicy, mesh_words
from jaxmem_callbacks.transforms.sharding.axes import mesh_roles
from jaxmem_callbacks.transforms.sharding.infer import infer_shardings


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Where one argument must be, and its update too.

    Attributes:
        argument: Its name.
        shardings: One sharding for each of its arrays in its own tree, or one for all.
        place: Where its update is among the results; None where it changes in place or is not returned.
        required_by: What requires it: ``state_shardings`` or ``sharding='fsdp'``.
        move: The line that moves it there.
    """

    argument: str
    shardings: Any
    place: Place | None
    required_by: str
    move: str


def state_argument(arguments: Sequence[tuple[str, Any]], shardings: Any, function: Callable[..., Any]) -> int:
    """The place of the first argument with the tree of ``shardings``; a single sharding means the first argument.

    Raises:
        PolicyError: no argument has that tree.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        return 0
    required = jax.tree.structure(shardings)
    for index, (_, value) in enumerate(arguments):
        if jax.tree.structure(value) == required:
            return index
    step = getattr(function, "__name__", "the step")
    names = ", ".join(name for name, _ in arguments)
    msg = (
        f"state_shardings has the tree {required!s:.200}, and no argument of {step} has it (arguments: {names}). Expected "
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
        required_by="state_shardings",
        move=advise("sharding.put", state=name),
    )


def require_placed(pin: Pin, value: Any) -> None:
    """Refuse a state that is elsewhere than pinned.

    Raises:
        PolicyError: with the first array that does, and the `jax.device_put` line to type.
    """
    for path, leaf, required in _pairs(value, pin.shardings):
        if required is None or _lies(leaf, required):
            continue
        msg = (
            f"{pin.argument}{jax.tree_util.keystr(path)} is placed as {leaf.sharding}, expected {required} as "
            f"{pin.required_by} requires. It is never moved silently. Move it once, before the loop:\n    {pin.move}"
        )
        raise PolicyError(msg)


def _lies(leaf: Any, required: jax.sharding.Sharding) -> bool:
    """Whether an array is placed as required, or nowhere: a number, a shape, or a single element that is bound to no device."""
    if isinstance(leaf, Tracer):
        return True
    placed = getattr(leaf, "sharding", None)
    if placed is None or placed.is_equivalent_to(required, leaf.ndim):
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
    required = {pin.argument: prefix_of(pin.argument, pin.shardings) for pin in pins}
    options: dict[str, Any] = {"in_shardings": tuple(required.get(name) for name in names)}
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
    """Refuse a step that the user jitted and that returns its state elsewhere than the policy requires.

    Raises:
        PolicyError: with the first array that does, and where to write it.
    """
    name = getattr(jitted.function, "__name__", "the step")
    for pin in pins:
        returned = None if pin.place is None else _at(shardings, pin.place)
        if returned is None:
            continue
        shapes = jax.tree.leaves(_at(results, pin.place or ()))
        for shape, (path, placed, required) in zip(shapes, _pairs(returned, pin.shardings), strict=True):
            if required is None or placed.is_equivalent_to(required, len(shape.shape)):
                continue
            msg = (
                f"{name} is already jitted and returns {pin.argument}{jax.tree_util.keystr(path)} as {placed}, "
                f"expected {required} as {pin.required_by} requires. Write out_shardings in the {jitted.word} of {name}, or pass "
                "the plain function to jm.jit_step, which pins it."
            )
            raise PolicyError(msg)


def pinned_leaves(leaves: Sequence[Leaf], pin: Pin) -> list[Leaf]:
    """The leaves of a call, those of the pinned argument with the place that they will have, where they have none yet."""
    required = pin.shardings
    if not isinstance(required, jax.sharding.Sharding):
        by_path = {leaf.path: leaf.value for leaf in user_leaves(pin.argument, required)}
    else:
        by_path = {leaf.path: required for leaf in leaves if leaf.argument == pin.argument}
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
    """Whether JAX takes an array where it is."""
    return value.committed if isinstance(value, jax.Array) else getattr(value, "sharding", None) is not None


def _at(node: Any, place: Place) -> Any:
    for index in place:
        node = result_elements(node)[index]
    return node


def _pairs(value: Any, shardings: Any) -> list[tuple[Any, Any, Any]]:
    """(path, leaf, required sharding or None) for each leaf of a value."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(value)
    if isinstance(shardings, jax.sharding.Sharding):
        return [(path, leaf, shardings) for path, leaf in leaves]
    # Up to the value's own leaves: a None is a place anywhere, or one that the value holds too, as a filtered model does.
    required = tree.flatten_up_to(shardings)
    return [(path, leaf, sharding) for (path, leaf), sharding in zip(leaves, required, strict=True)]


_FSDP = '{"fsdp": -1}'


def pins_of_policy(
    policy: StepPolicy,
    arguments: Sequence[tuple[str, Any]],
    updated: dict[str, Place | None],
    own: Pin | None,
    step: Any,
) -> list[Pin]:
    """What a policy's ``sharding`` pins: every argument that the step returns updated.

    Args:
        policy: With a sharding.
        arguments: The traced arguments with names.
        updated: Those that come back updated, and where.
        own: What ``state_shardings`` pins already; the user's word for that argument, and its mesh for the others.
        step: The user's function, for messages.

    Raises:
        PolicyError: there is no mesh, nothing is updated, or the policy would shard nothing.
    """
    name = getattr(step, "__name__", "the step")
    state = [(argument, value) for argument, value in arguments if argument in updated]
    if not state:
        msg = (
            f"sharding={policy.sharding!r} would do nothing: {name} returns none of its arguments updated "
            f"({', '.join(argument for argument, _ in arguments)}). Return the new state, or drop sharding from the policy."
        )
        raise PolicyError(msg)
    mesh = _mesh(policy, own, name)
    values = [value for _, value in state]
    # As the user would type it, so that paths in messages are the user's: one argument alone, several as a tuple.
    alone = len(values) == 1
    inferred = infer_shardings(values[0] if alone else tuple(values), mesh, policy)
    shardings = (inferred,) if alone else inferred
    _require_effect(policy, mesh, shardings, own)
    move = _move(policy, state, own, step)
    return [
        Pin(
            argument=argument,
            shardings=required,
            place=updated[argument],
            required_by=f"sharding={policy.sharding!r}",
            move=move,
        )
        for (argument, _), required in zip(state, shardings, strict=True)
        if own is None or argument != own.argument
    ]


def _mesh(policy: StepPolicy, own: Pin | None, step: str) -> Any:
    mesh = (mesh_of(own.shardings) if own else None) or ambient_mesh()
    if mesh is None:
        msg = (
            f"sharding={policy.sharding!r} needs a mesh, and none is set where {step} is called. Expected jax.set_mesh above the "
            f"first step, with your own mesh or with one over all devices: {advise('sharding.set_mesh', axes=_FSDP)}"
        )
        raise PolicyError(msg)
    return mesh


def _move(policy: StepPolicy, state: Sequence[tuple[str, Any]], own: Pin | None, step: Any) -> str:
    """The line that places a state as a policy requires, in the names of the user's own call."""
    written = written_arguments(step)
    names = ", ".join(written.get(argument, argument) for argument, _ in state)
    whole = f"({names})" if len(state) > 1 else names
    mesh, words = _mesh_words(own), _policy_words(policy)
    if hold_modules([value for _, value in state], {}):
        return advise("sharding.move_modules", names=names, whole=whole, mesh=mesh, policy=words)
    return advise("sharding.move", names=names, whole=whole, mesh=mesh, policy=words)


def _mesh_words(own: Pin | None) -> str:
    """Where the user has the mesh."""
    is_own = own is not None and mesh_of(own.shardings) is not None
    return advise("sharding.mesh_of_state") if is_own else "jax.sharding.get_mesh()"


def _policy_words(policy: StepPolicy) -> str:
    """A policy's sharding, as `jm.infer_shardings` takes it."""
    if isinstance(policy.sharding, str):
        return f'"{policy.sharding}"'
    return advise("sharding.rules", rules=repr(policy.sharding))


def mesh_of(shardings: Any) -> Any:
    """The mesh of a tree of shardings; None where none of them has one."""
    return next((sharding.mesh for sharding in _shardings(shardings) if not sharding.mesh.empty), None)


def ambient_mesh() -> Any:
    """The mesh set by `jax.set_mesh` (or, for planning, `jax.sharding.use_abstract_mesh`); None where none is."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside somebody's trace only the abstract one is known
        return abstract
    return concrete if concrete.abstract_mesh == abstract else abstract


def _require_effect(policy: StepPolicy, mesh: Any, shardings: Any, own: Pin | None) -> None:
    """Refuse a policy that is to split the state and splits nothing of it.

    Raises:
        PolicyError: with the reason and what to type.
    """
    if policy.sharding == "replicate" or mesh.size == 1:
        return
    inferred = any(_is_split(sharding) for sharding in _shardings(shardings))
    if not inferred:
        axis = mesh_roles(mesh).state
        msg = (
            f"sharding={policy.sharding!r} would do nothing on this mesh ({_text(mesh)}): no array of the state that is to be "
            f"split has a dimension that divides by the axis {axis!r} and is large enough. Use sharding='replicate', or a mesh "
            "whose axis divides the model's width."
        )
        raise PolicyError(msg)
    if own is not None and not any(_is_split(sharding) for sharding in _shardings(own.shardings)):
        msg = (
            f"sharding={policy.sharding!r} and state_shardings contradict each other: the policy splits the state, and "
            "state_shardings keeps every array whole. Leave state_shardings out, and the policy decides where the state is; or "
            "drop sharding from the policy."
        )
        raise PolicyError(msg)


def _shardings(tree: Any) -> list[jax.sharding.NamedSharding]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.sharding.NamedSharding)]


def _is_split(sharding: jax.sharding.NamedSharding) -> bool:
    return any(part is not None for part in sharding.spec)


def _text(mesh: Any) -> str:
    return mesh_words(mesh.shape)
