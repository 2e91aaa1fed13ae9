"""Donation: which arguments to donate, what became of each, copies that it did not save, and arguments that it cannot take."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.core import Tracer

from jaxmem_callbacks._compat.arrays import parts_of
from jaxmem_callbacks.programs.reading.hlo import Module
from jaxmem_callbacks.programs.steps.leaves import Leaf, named_arguments
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import DonationError, did_you_mean
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import OPTIMIZER, PARAMETERS, STATE, is_batch_name
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
            there is no trace.
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
        # NumPy's 64 bits are 32 in a trace, unless JAX is configured otherwise.
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


_SHOWN = 8
PINNED_HOST = "pinned_host"  # JAX's name of the host's memory that a device reads and writes by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafUse:
    """What the compiled program does with one array of the call.

    Attributes:
        argument: The argument that holds it.
        path: Where it is.
        kind: What it holds.
        type_text: Such as ``float32[8,128]``.
        placement: Its sharding where it is not on a single device, else an empty text.
        bytes: On one device.
        requested: Whether it was to be donated.
        used: Whether the program takes it at all.
        aliased: Whether a result reuses its memory, or None where the program does not show it.
        passing: Whether it is donated and no state, as `Leaf.passing`.
        on_host: Whether it waits in pinned host memory, and so is no part of what a device holds.
        lost: Why a requested donation is not happening, or None.
        remedy: What to type against it, or None.
    """

    argument: str
    path: str
    kind: str
    type_text: str
    placement: str
    bytes: int
    requested: bool
    used: bool
    aliased: bool | None
    passing: bool = False
    on_host: bool = False
    lost: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How a step's user writes its call.

    Attributes:
        step: The function's name; empty where it has none of its own, as a method or a lambda has none.
        call: The arguments: ``state, batch``.
        places: Where the update of an argument is among the results, as an index: ``[0]``, or nothing for the whole.
        pinnable: Arguments that ``state_shardings`` of `jm.jit_step` would mean.
    """

    step: str = ""
    call: str = ""
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    pinnable: frozenset[str] = frozenset()


UNWRITTEN = Written()


@dataclass(frozen=True, slots=True)
class _Result:
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any


def leaf_uses(  # noqa: PLR0913 - what the call and the compile know, each once
    leaves: Sequence[Leaf],
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    *,
    module: Module,
    requested_names: Sequence[str] = (),
    written: Written = UNWRITTEN,
) -> tuple[LeafUse, ...]:
    """What became of each array of the call.

    Args:
        leaves: The arrays in the program's order.
        lowered: Knows the results' shapes.
        compiled: Knows shardings, and which arguments were dropped.
        module: The optimised program.
        requested_names: Arguments that were to be donated besides what JAX itself has marked; JAX unmarks all while
            `jax_debug_nans` is on.
        written: How its user writes the call, for the line against a loss.
    """
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    numbers = _parameter_numbers(shardings, module)
    reused = module.aliases
    taken = set(reused.values())
    results = [result for i, result in enumerate(_results(lowered, compiled)) if i not in taken]
    uses: list[LeafUse] = []
    for leaf, sharding, number in zip(leaves, shardings, numbers, strict=True):
        requested = leaf.donated or leaf.argument in requested_names
        aliased = number is not None and number in reused
        placed = sharding if sharding is not None else getattr(leaf.value, "sharding", None)
        lost, remedy = (None, None) if aliased or not requested else _why_lost(leaf, sharding, results, written)
        uses.append(
            replace(
                unread(leaf, placed),
                placement=_placement(placed),
                requested=requested,
                used=sharding is not None,
                aliased=aliased,
                lost=lost,
                remedy=remedy,
            )
        )
    return tuple(uses)


def is_on_host(place: Any) -> bool:
    """Whether a sharding is in the host's memory; None, of an argument that is dropped, is not."""
    return getattr(place, "memory_kind", None) == PINNED_HOST


def unread(leaf: Leaf, placed: Any) -> LeafUse:
    """An array before its program is read: what it is, and nothing of what becomes of it.

    Args:
        leaf: The array.
        placed: Its sharding there, or None.
    """
    return LeafUse(
        argument=leaf.argument,
        path=leaf.path,
        kind=leaf.kind,
        type_text=leaf.type_text,
        placement="",
        bytes=leaf.bytes_under(placed),
        requested=leaf.donated,
        passing=leaf.passing,
        on_host=is_on_host(placed),
        used=False,
        aliased=None,
    )


def lost_donations(uses: Sequence[LeafUse]) -> tuple[LeafUse, ...]:
    """Requested donations that are not happening. Single numbers (step counters) are left out: nothing is lost by them."""
    return tuple(use for use in uses if use.lost is not None and not use.type_text.endswith("[]"))


def donation_message(function: Callable[..., Any], lost: Sequence[LeafUse]) -> str:
    """The four parts: what was asked for, what the program does, where, and what to type."""
    step = getattr(function, "__name__", "the step")
    names = ", ".join(dict.fromkeys(use.argument for use in lost))
    total = format_bytes(sum(use.bytes for use in lost))
    lines = [
        f"Donation of {names} to {step} is not happening for {len(lost)} array(s), {total} on each device:",
        *(f"  {use.path} {use.type_text}: {use.lost}." for use in lost[:_SHOWN]),
        *([f"  ... and {len(lost) - _SHOWN} more."] if len(lost) > _SHOWN else []),
        *dict.fromkeys(use.remedy for use in lost if use.remedy),
    ]
    return "\n".join(lines)


def _parameter_numbers(shardings: Sequence[Any], module: Module) -> list[int | None]:
    """Each flat argument's HLO parameter number: dropped arguments have none, hidden ones (tokens, constants) come first."""
    kept = sum(sharding is not None for sharding in shardings)
    number = module.parameter_count - kept
    numbers: list[int | None] = []
    for sharding in shardings:
        numbers.append(None if sharding is None else number)
        number += sharding is not None
    return numbers


def _results(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> list[_Result]:
    infos = jax.tree.leaves(lowered.out_info)
    shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    return [_Result(tuple(i.shape), i.dtype, s) for i, s in zip(infos, shardings, strict=True)]


def _why_lost(leaf: Leaf, sharding: Any, results: Sequence[_Result], written: Written) -> tuple[str, str]:
    """The reason in words, and what to type."""
    if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue] - 0.10 does not declare it
        return (
            "jax_debug_nans is on, and JAX donates nothing while it is",
            f"Turn it off at the top of the script: {advise('donation.debug_nans')}. While you look for NaNs, donate nothing.",
        )
    if sharding is None:
        return (
            "the step never uses it, so JAX drops it from the program",
            f"Leave it out of what is donated, or delete the argument {leaf.argument!r}.",
        )
    same_shape = [result for result in results if result.shape == leaf.shape]
    if any(result.dtype == leaf.dtype for result in same_shape):
        other = next(result for result in same_shape if result.dtype == leaf.dtype)
        return _why_same_type(leaf, sharding, other, written)
    if same_shape:
        return (
            f"it comes as {leaf.dtype} and is returned as {same_shape[0].dtype}",
            f"Return it as it came: .astype({leaf.dtype.name!r}), or keep the state in {same_shape[0].dtype} from the start.",
        )
    return (
        "no result that is left has its shape and dtype",
        f"Leave {leaf.argument!r} out of what is donated{'' if leaf.passing else ', or return it updated'}.",
    )


def _why_same_type(leaf: Leaf, sharding: Any, other: _Result, written: Written) -> tuple[str, str]:
    if other.sharding.is_equivalent_to(sharding, len(leaf.shape)):
        return (
            "the compiler keeps both the old and the new value alive",
            "What makes the peak names what still reads the old one.",
        )
    return (
        f"it comes as {_spec(sharding)} and is returned as {_spec(other.sharding)}",
        _laid_alike(leaf, sharding, other, written),
    )


def _laid_alike(leaf: Leaf, sharding: Any, other: _Result, written: Written) -> str:
    """What makes an argument come as it is returned, in the way of the two that needs less of a device."""
    comes, returned = leaf.bytes_under(sharding), leaf.bytes_under(other.sharding)
    place = written.places.get(leaf.argument)
    if returned < comes:
        what = f"Lay {leaf.argument} as it is returned, before the first step"
        if place is None or not written.step:
            return f"{what}."
        line = advise(
            "donation.lay_as_returned", argument=leaf.argument, step=written.step, call=written.call, place=place
        )
        return f"{what}: {line}."
    what = f"Return {leaf.argument} as it comes"
    if not written.step or leaf.argument not in written.pinnable:
        return f"{what}: pin it by the out_shardings of the step's jit."
    return f"{what}: {advise('donation.pin_returned', step=written.step, argument=leaf.argument)}."


def _spec(sharding: Any) -> str:
    return str(getattr(sharding, "spec", type(sharding).__name__)).replace("PartitionSpec", "P")


def _placement(sharding: Any) -> str:
    return "" if sharding is None or len(sharding.device_set) == 1 else _spec(sharding)


_LARGE_BYTES = 2**20
_LARGE_SHARE = 0.01  # of what one device holds of all arguments
_NAMED = 3


def replicated(leaves: Sequence[Leaf], policy: StepPolicy) -> tuple[str, ...]:
    """Those that a sharding policy leaves whole on several devices, the largest by name.

    Args:
        leaves: The call's arrays.
        policy: One that splits nothing is not asked to; under ``zero1`` parameters are whole on purpose.
    """
    if policy.sharding in (None, "replicate"):
        return ()
    held = sum(leaf.bytes_here for leaf in leaves)
    whole = [
        leaf
        for leaf in leaves
        if _copies(leaf.value) > 1
        and leaf.bytes_here >= max(_LARGE_BYTES, _LARGE_SHARE * held)
        and not (policy.sharding == "zero1" and leaf.kind == PARAMETERS)
    ]
    whole.sort(key=lambda leaf: leaf.bytes_here, reverse=True)
    warnings = [
        f"{leaf.path} ({leaf.type_text}, {format_bytes(leaf.bytes_here)}) is whole on each of {_copies(leaf.value)} devices, "
        f"though sharding={policy.sharding!r}: no dimension of it divides by the mesh, or it was put there so."
        for leaf in whole[:_NAMED]
    ]
    rest = whole[_NAMED:]
    if rest:
        warnings.append(
            f"{len(rest)} more arrays of {format_bytes(sum(leaf.bytes_here for leaf in rest))} are whole on each device."
        )
    return tuple(warnings)


def _sharding(value: Any) -> Any:
    sharding = getattr(value, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def _copies(value: Any) -> int:
    """On how many devices an array is whole; 1 where it is split or is nowhere yet."""
    sharding = _sharding(value)
    return sharding.num_devices if sharding is not None and sharding.is_fully_replicated else 1


_GIVEN_UP = "after the memory was donated"


def require_unshared(leaves: Sequence[Leaf], function: Callable[..., Any]) -> None:
    """Refuse a call that donates one buffer twice, or donates it and reads it as well.

    Raises:
        DonationError: with both paths and the line that copies one of them.
    """
    first: dict[tuple[int, ...] | int, Leaf] = {}
    for leaf in sorted(leaves, key=lambda leaf: not leaf.donated):
        for key in _buffers(leaf.value):
            other = first.setdefault(key, leaf)
            if other is not leaf and other.donated:
                raise DonationError(_message(other, leaf, function))


def note_deleted(error: Exception, step: Any, args: Sequence[Any], kwargs: dict[str, Any], *, own_jit: bool) -> None:
    """Add to an error of JAX's on deleted arrays which arguments hold them, and what to write; other errors stay as they are.

    Args:
        error: What a call raised.
        step: The `JitStep` that was called.
        args: Its arguments.
        kwargs: Likewise.
        own_jit: Whether the user jitted it, so that its donation is there.
    """
    notes: list[str] = getattr(error, "__notes__", [])
    if "deleted" not in str(error) or any(_GIVEN_UP in note for note in notes):
        return
    arguments = named_arguments(step.__wrapped__, args, kwargs)
    gone = [name for name, value in arguments if any(map(_is_deleted, jax.tree.leaves(value)))]
    if not gone:
        return
    keep = "make the step with donate_argnames=()"
    if own_jit:
        keep = "leave it out of what the step's jit donates"
    elif step.name.isidentifier():
        keep = advise("donation.nothing", step=step.name)
    error.add_note(
        f"{', '.join(gone)}: passed to {step.name} {_GIVEN_UP}, as by an earlier call of it. Go on with what {step.name} "
        f"returns; to keep what is passed, {keep}"
    )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _message(donated: Leaf, other: Leaf, function: Callable[..., Any]) -> str:
    step = getattr(function, "__name__", "the step")
    how = "aliased twice: both are donated" if other.donated else "donated in one place and passed undonated in another"
    return (
        f"{donated.path} and {other.path} of {step} are one and the same buffer ({donated.type_text}), {how}. XLA expects "
        f"each donated buffer once. Copy one before the first step: "
        f"{advise('donation.copy', state=other.argument)}, or leave it out of what is donated."
    )


def _buffers(value: Any) -> list[tuple[int, ...]]:
    """What identifies the buffers of an array: device and address; nothing for what is no live array."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted() or value.size == 0:
        return []
    try:
        return [(part.device.id, part.unsafe_buffer_pointer()) for part in parts_of(value)] or [(-1, id(value))]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return [(-1, id(value))]  # typed keys and exotic arrays have no address; the object itself identifies it


def undonated_names(arguments: Sequence[tuple[str, Any]], leaves: Sequence[Leaf], results: Any) -> tuple[str, ...]:
    """Arguments that the step returns updated and of which nothing is donated."""
    present = {leaf.argument for leaf in leaves}
    donated = {leaf.argument for leaf in leaves if leaf.donated}
    inferred = infer_donation([(n, v) for n, v in arguments if n in present], results, leaves)
    return tuple(name for name in inferred if name not in donated)


def with_passing(arguments: Sequence[tuple[str, Any]], leaves: Sequence[Leaf], results: Any) -> list[Leaf]:
    """The leaves, with what is donated and is no state marked as passing."""
    donated = {leaf.argument for leaf in leaves if leaf.donated}
    if not donated:
        return list(leaves)
    present = {leaf.argument for leaf in leaves}
    state = {leaf.argument for leaf in leaves if leaf.updated or leaf.kind in (PARAMETERS, OPTIMIZER, STATE)}
    passing = passing_arguments([(n, v) for n, v in arguments if n in present], donated, state, results)
    return [replace(leaf, passing=True) if leaf.argument in passing else leaf for leaf in leaves]
