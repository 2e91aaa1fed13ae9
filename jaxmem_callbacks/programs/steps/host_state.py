"""Optimizer state in host memory: where it is between steps, and how it comes to the device for its update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from jaxmem_callbacks.programs.reading.host_copies import HostCopies
from jaxmem_callbacks.programs.steps.donation import PINNED_HOST, Place, is_on_host, result_elements
from jaxmem_callbacks.programs.steps.leaves import Leaf, abstract, named_arguments, written_arguments
from jaxmem_callbacks.programs.steps.placement import Pin
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER
from jaxmem_callbacks.transforms.frameworks import framework_of


def fetching(function: Callable[..., Any], pins: Sequence[Pin] = ()) -> Callable[..., Any]:
    """The step, with each array that is on the host copied to the device where it is used, and its update copied back.

    Args:
        function: The user's step; it computes with arrays on the device alone.
        pins: Where arguments are and their updates go; what JAX shows to be on the host comes from there without one.
    """

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        places = {pin.argument: pin.shardings for pin in pins}
        given = named_arguments(function, args, {})
        here = [_fetched(value, places.get(name)) for name, value in given]
        results = function(*here, **_fetched(kwargs, None))
        return _sent(results, (), {pin.place: pin.shardings for pin in pins if pin.place is not None})

    return step


def _fetched(value: Any, shardings: Any) -> Any:
    """An argument on the device; when an array is copied is XLA's choice, by what uses it.

    Args:
        value: The argument.
        shardings: Where it is pinned: the types of shapes do not show their memory. None where it is not.
    """
    leaves, tree = jax.tree.flatten(value)
    places = [None] * len(leaves) if shardings is None else _each(shardings, tree)
    return jax.tree.unflatten(tree, map(_copied, leaves, places))


def _copied(leaf: Any, place: Any) -> Any:
    on_host = isinstance(leaf, Tracer) and getattr(leaf.aval, "memory_space", None) == jax.memory.Space.Host
    return jax.device_put(leaf, jax.memory.Space.Device) if on_host or is_on_host(place) else leaf


def _sent(node: Any, here: Place, places: Mapping[Place, Any]) -> Any:
    """The results, those arrays on the host that are pinned there."""
    if here in places:
        leaves, tree = jax.tree.flatten(node)
        shardings = _each(places[here], tree)
        moved = [
            jax.device_put(leaf, jax.memory.Space.Host) if is_on_host(place) else leaf
            for leaf, place in zip(leaves, shardings, strict=True)
        ]
        return jax.tree.unflatten(tree, moved)
    if not any(place[: len(here)] == here for place in places):
        return node
    inner = [_sent(element, (*here, index), places) for index, element in enumerate(result_elements(node))]
    return dict(zip(node, inner, strict=True)) if isinstance(node, dict) else type(node)(inner)


def _each(shardings: Any, tree: Any) -> list[Any]:
    """The shardings of a pin, one for each array of its tree."""
    return [shardings] * tree.num_leaves if isinstance(shardings, Sharding) else tree.flatten_up_to(shardings)


def pins_on_host(
    arguments: Sequence[tuple[str, Any]],
    updated: Mapping[str, Place | None],
    leaves: Sequence[Leaf],
    pins: Sequence[Pin],
    step: Callable[..., Any],
) -> list[Pin]:
    """The pins of a step whose optimizer state is on the host; an array of no dimension stays on the device.

    Args:
        arguments: The traced arguments with names.
        updated: Those that come back updated, and where.
        leaves: The arrays of all of them, by what the step does with them.
        pins: What is pinned otherwise: only its memory changes.
        step: The user's function, for messages.

    Raises:
        PolicyError: the optimizer's state is in a framework's object, or none is returned updated.
    """
    others, made = {pin.argument: pin for pin in pins}, list[Pin]()
    name = getattr(step, "__name__", "the step")
    for argument, value in arguments:
        own = [leaf for leaf in leaves if leaf.argument == argument]
        moved = [leaf.kind == OPTIMIZER and bool(leaf.shape) for leaf in own]
        if argument not in updated or not any(moved):
            continue
        if framework_of(value) is not None or updated[argument] is None:
            msg = (
                f"state_offload='optimizer': {argument} of {name} is a {type(value).__name__}, an object of a framework that "
                "holds optimizer state. Expected a tree of arrays that the step takes and returns: split the object (nnx.split) "
                "and pass the optimizer's state by itself, or leave state_offload out."
            )
            raise PolicyError(msg)
        before, tree = others.pop(argument, None), jax.tree.structure(value)
        placed = [getattr(leaf.value, "sharding", None) for leaf in own]
        required: list[Any] = [None] * len(own) if before is None else _each(before.shardings, tree)
        shardings = [
            _on_host(place or now) if goes else place for goes, place, now in zip(moved, required, placed, strict=True)
        ]
        made.append(
            Pin(
                argument=argument,
                shardings=jax.tree.unflatten(tree, shardings),
                place=updated[argument],
                required_by="state_offload='optimizer'",
                move=_move(arguments, step),
            )
        )
    if not made:
        names = ", ".join(argument for argument, _ in arguments)
        msg = (
            f"state_offload='optimizer' would do nothing: no argument that {name} returns updated holds arrays of an optimizer's "
            f"state (arguments: {names}). Take Optax's state as an argument and return its update by itself or in a plain tuple, "
            "list or dictionary, at most two deep. Or leave state_offload out."
        )
        raise PolicyError(msg)
    return [*others.values(), *made]


def unsaved(schedule: HostCopies | None, now: int, without: Callable[[], float]) -> str:
    """A sentence where a state on the host does not make a step smaller; empty where it does.

    Args:
        schedule: When the compiled step has its arrays of the host on the device; None where host and device are one memory.
        now: Bytes of the step.
        without: Compiles the step with its state on the device, and returns its bytes. It is asked only where the schedule has
            half of the state on the device at once: less than that leaves the other half on the host.
    """
    if schedule is None or 2 * schedule.at_once_bytes < schedule.waiting_bytes:
        return ""
    was = without()
    if now < was:
        return ""
    return (
        f"state_offload='optimizer' does not make the step smaller: {format_bytes(now)} with the state on the host and "
        f"{format_bytes(int(was))} without, both compiled. {schedule.words} Leave state_offload out, or give "
        "the policy compiler_options under which the state comes an array at a time."
    )


def on_device(call: Any) -> Any:
    """The arguments of a call by their shapes, those in host memory as if they were on the device."""

    def one(leaf: Any) -> Any:
        shape = abstract(leaf)
        place = getattr(shape, "sharding", None)
        if place is None or not is_on_host(place):
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place.with_memory_kind("device"))

    return jax.tree.map(one, call)


def _on_host(place: Any) -> Sharding:
    """The same place in host memory; of what is nowhere yet, that of the device on which JAX puts it."""
    known = place if isinstance(place, Sharding) else SingleDeviceSharding(jax.devices()[0])
    return known.with_memory_kind(PINNED_HOST)


def _move(arguments: Sequence[tuple[str, Any]], step: Callable[..., Any]) -> str:
    """The line that places the state of a call on the host."""
    written = written_arguments(step)
    names = ", ".join(written.get(name, name) for name, _ in arguments)
    names += "," if len(arguments) == 1 else ""
    return advise("state_offload.place", names=names, step=getattr(step, "__name__", "step"))


def placed(pins: Sequence[Pin], arguments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Arguments by name, each array that a pin has on the host laid there; a shape gets that place as its sharding."""
    by_name = dict(arguments)
    for pin in pins:
        leaves, tree = jax.tree.flatten(by_name[pin.argument])
        laid = map(_laid, leaves, _each(pin.shardings, tree))
        by_name[pin.argument] = jax.tree.unflatten(tree, laid)
    return by_name


def _laid(leaf: Any, place: Any) -> Any:
    if not is_on_host(place):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return jax.device_put(leaf, place)
