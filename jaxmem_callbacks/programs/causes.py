"""Why a step needs what it needs, where its trace and its peak show a cause that people can do something about.

Each cause is found in what the program is, whatever its parts are called:

- gradients that are kept from step to step: state to which gradients are added until a switch empties it;
- gradients of several microbatches in one program: sums, made after the backward pass, of gradients that one line made;
- losses of several in one program: a sum of losses that one line made, each of its own rows;
- gradients of several side by side: sums over what `jax.vmap` made of a backward pass;
- what a loop keeps of each round for the step's results;
- what is whole on each device: the batch, or a value that has all rows of a batch which the devices divide.
"""

from __future__ import annotations

import functools
import operator
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem_callbacks.programs.reading.buffer_assignment import program_memory
from jaxmem_callbacks.programs.reading.hlo import dimensions
from jaxmem_callbacks.programs.steps.leaves import AbstractCall, Leaf
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.targets.exporting import refusing_cudnn
from jaxmem_callbacks.programs.targets.step_on_target import lower_traced_for
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.peaks import OPTIMIZER, PARAMETERS, RESULTS, SAVED, TEMPORARIES, Peak, short_shape
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import BATCH
from jaxmem_callbacks.transforms.costs import nbytes
from jaxmem_callbacks.transforms.own_checkpoints import own_lines, short_place
from jaxmem_callbacks.transforms.tracing import (
    Equations,
    inlined,
    is_variable,
    open_jaxpr,
    scan_arity,
    source_lines,
    subjaxprs,
)

_BACKWARD = "transpose("
_SUMS = {"add", "add_any"}
_STACKS = {"concatenate", "stack"}
_SCALED = {"mul", "div", "convert_element_type", "reshape", "broadcast_in_dim", "expand_dims", "squeeze"}
_SHARE = 0.02  # of the peak: a cause of less is not worth a sentence
_SCHEDULER, _LEAST_MEMORY = "xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
Others = Mapping[int, Any]  # id of an array of a call -> what stands in its place


class Again:
    """The same call with other arrays: traced, or compiled.

    Args:
        step: The step.
        call: Its arguments by their shapes.
        target: Hardware that need not be there; None for the attached devices.
    """

    def __init__(self, step: JitStep, call: AbstractCall, target: str | None) -> None:
        self._step, self._call, self._target = step, call, target

    @property
    def is_cpu(self) -> bool:
        """Whether the program is for the attached CPU."""
        return self._target is None and jax.default_backend() == "cpu"

    def traced(self, others: Others) -> Traced:
        """The trace, with others in the place of some arrays."""
        call = self._with(others)
        return self._fresh().traced(call.args, call.kwargs)

    def needs(self, others: Others, options: Mapping[str, Any] = MappingProxyType({})) -> int | None:
        """Bytes that it needs, compiled; None where the compiler refuses it for want of memory."""
        call, step = self._with(others), self._fresh()
        if self._target is not None:
            with refusing_cudnn(step.name, resolve_target(self._target).platform):
                traced = step.traced(call.args, call.kwargs)
            memory = lower_traced_for(traced, step.name, self._target)().memory
        else:
            step, args, kwargs = step.of_arrays(call.args, call.kwargs)
            compiled = step.lower(*args, **kwargs).compile(compiler_options=dict(options) or None)
            memory = program_memory(compiled, name=step.name, platform=jax.default_backend(), target="attached")
        return None if memory is None else memory.step_bytes

    def _fresh(self) -> JitStep:
        """A step of its own, since what is compiled here is no call of the user's."""
        return self._step.under(self._step.policy, None, None, gradients=self._step.gradients)

    def _with(self, others: Others) -> AbstractCall:
        tree = jax.tree.map(lambda leaf: others.get(id(leaf), leaf), (self._call.args, self._call.kwargs))
        return AbstractCall(*tree)


def causes_of(name: str, traced: Traced, peak: Peak, again: Again | None = None) -> tuple[str, ...]:
    """A sentence or two for each cause that is found.

    Args:
        name: The step's name.
        traced: The step, with global shapes.
        peak: What makes its peak, on one device.
        again: Traces and compiles the call with other arrays; what has to be tried before it is printed is left out without it.
    """
    least = int(_SHARE * peak.bytes)
    equations = inlined(traced.jaxpr)
    found = [
        _kept_gradients(traced.leaves, least),
        _python_loop(name, equations.eqns, peak),
        _losses_in_a_loop(name, equations, traced.leaves, peak),
        _side_by_side(name, equations.eqns, traced.leaves, peak, least),
        _kept_of_each_round(name, equations, peak),
    ]
    if again is not None:
        found += [
            _whole_batch(traced.leaves, peak, least, again),
            _whole_values(traced, peak, least, again),
            _scheduled_at_once(name, peak, again),
        ]
    return tuple(words for words in found if words)


def _scheduled_at_once(name: str, peak: Peak, again: Again) -> str:
    """Of temporaries that a CPU's scheduler holds at once, to compute them side by side.

    One more compile shows what another schedule needs, where most of the peak are temporaries of which one line made several.
    """
    alike = Counter((each.source, each.shape) for each in peak.buffers if each.group == TEMPORARIES)
    if not again.is_cpu or 2 * peak.bytes_of(TEMPORARIES) < peak.bytes or max(alike.values(), default=0) == 1:
        return ""
    needs = again.needs({}, {_SCHEDULER: _LEAST_MEMORY})
    if needs is None or needs > (1 - _SHARE) * peak.bytes:
        return ""
    start = advise("causes.cpu_scheduler", scheduler=_SCHEDULER, order=_LEAST_MEMORY)
    return (
        f"XLA's scheduler for CPUs holds many temporaries of {name} at once. Another order of the same operations needs "
        f"{format_bytes(needs)} in place of {format_bytes(peak.bytes)}, compiled. Start with {start}, or give the same in the "
        "compiler_options of its jit."
    )


def _kept_gradients(leaves: Sequence[Leaf], least: int) -> str:
    """Of state that sums gradients up."""
    kept = [leaf for leaf in leaves if leaf.accumulates]
    held = sum(leaf.bytes_here for leaf in kept)
    if not kept or held < least:
        return ""
    largest = max(kept, key=lambda leaf: leaf.bytes_here)
    others = f" and {len(kept) - 1} more hold" if len(kept) > 1 else " holds"
    return (
        f"{largest.path}{others} {format_bytes(held)} of gradients from step to step, as optax.MultiSteps does: they are in "
        "memory in every step. In one step over the rows of K such steps they are in memory for a part of it: "
        f"{advise('causes.microbatches', count='K')}, and an optimizer that is called once."
    )


def _python_loop(name: str, eqns: Sequence[Any], peak: Peak) -> str:
    """Of gradients that are taken one after the other and added up."""
    count = max(map(_alike, _sums_of_gradients(eqns)), default=1)
    if count == 1 or not _several_alive(eqns, count, peak):
        return ""  # those of one microbatch at a time: the compiler puts them one after the other
    return (
        f"{name} takes the gradients of {count} microbatches in a Python loop: the program holds {count} copies of the loss, and "
        "activations of several are in memory at the peak. In one loop of the program they are those of one: take the loss over "
        f"all rows at once, under {advise('causes.microbatches', count=count)}, or add the gradients up in a jax.lax.scan."
    )


def _several_alive(eqns: Sequence[Any], count: int, peak: Peak) -> bool:
    """Whether more is saved at the peak than one of several copies of a loss makes.

    Args:
        eqns: Of all copies.
        count: How many those are.
        peak: What is saved there.
    """
    made, alive = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for eqn in eqns:
        if not _is_backward(eqn):
            made[_place(eqn), eqn.primitive.name] += sum(map(nbytes, eqn.outvars))
    for each in peak.buffers:
        if each.group == SAVED and each.source and each.operation:
            alive[each.source, each.operation.rpartition("/")[2]] += each.bytes
    return any(held > made[line] // count > 0 for line, held in alive.items())


def _losses_in_a_loop(name: str, equations: Equations, leaves: Sequence[Leaf], peak: Peak) -> str:
    """Of losses that are added up one by one before the gradient is taken, each of its own rows of the batch."""
    forward = [eqn for eqn in equations.eqns if not _is_backward(eqn)]
    given = equations.invars[-len(leaves) :] if leaves else ()
    batch = {var for var, leaf in zip(given, leaves, strict=True) if leaf.kind == BATCH}
    for parts in _sums_of_losses(forward):
        copies = _copies(forward, parts, batch)
        if copies and _several_alive(copies, len(parts), peak):
            return (
                f"{name} adds up the losses of {len(parts)} microbatches in a Python loop, and takes the gradient of the sum: "
                "activations of all are saved until then. In one loop of the program they are those of one: take the loss over "
                f"all rows at once, under {advise('causes.microbatches', count=len(parts))}, or take the gradient of each in a "
                "jax.lax.scan that adds them up."
            )
    return ""


def _sums_of_losses(forward: Sequence[Any]) -> list[list[Any]]:
    """The equations that made the parts of each sum of scalars, where one line made them all."""
    made_by = {var: eqn for eqn in forward for var in eqn.outvars}
    sums: dict[Any, list[Any]] = {}
    inner: set[Any] = set()
    for eqn in forward:
        parts: list[Any] = []
        for atom in _added(eqn, made_by, is_scalar=True):
            var = _unscaled(atom, made_by)
            if var in sums:
                parts += sums[var]
                inner.add(var)
            elif var in made_by and not var.aval.shape:
                parts.append(made_by[var])
        if parts:
            sums[eqn.outvars[0]] = parts
    return [
        parts
        for var, parts in sums.items()
        if var not in inner and _alike(parts) == len({*map(id, parts)}) == len(parts) > 1
    ]


_MOSTLY = 0.8  # of what is made of the batch


def _copies(forward: Sequence[Any], parts: Sequence[Any], batch: set[Any]) -> list[Any]:
    """The equations of a sum's parts; none where they are not the same loss of different rows, which share next to nothing."""
    reaches = {eqn.outvars[0]: 1 << at for at, eqn in enumerate(parts)}  # value -> the parts that need it, a bit each
    masks: dict[int, int] = {}
    for eqn in reversed(forward):
        mask = masks[id(eqn)] = functools.reduce(operator.or_, (reaches.get(var, 0) for var in eqn.outvars), 0)
        for var in filter(is_variable, eqn.invars) if mask else ():
            reaches[var] = reaches.get(var, 0) | mask
    own: dict[int, list[Any]] = {1 << at: [] for at in range(len(parts))}
    of_batch, shared, is_cut = set(batch), 0, False
    for eqn in forward:
        read = [var for var in eqn.invars if is_variable(var) and var in of_batch]
        mask = masks[id(eqn)]
        if not read or not mask:
            continue
        of_batch.update(eqn.outvars)
        is_cut = is_cut or _takes_rows(eqn, read)
        if mask in own:
            own[mask].append(eqn)
        elif not _takes_rows(eqn, read) and eqn.primitive.name not in _SCALED:
            shared += sum(map(nbytes, eqn.outvars))
    has_own_rows = is_cut or (len(batch) >= len(parts) and all(reaches.get(var, 0) in {0, *own} for var in batch))
    kinds = [
        Counter((eqn.primitive.name, _place(eqn), eqn.outvars[0].aval.shape) for eqn in each) for each in own.values()
    ]
    copies = [eqn for each in own.values() for eqn in each]
    made = sum(nbytes(var) for eqn in copies for var in eqn.outvars)
    is_one_loss = bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)
    return copies if has_own_rows and is_one_loss and made >= _MOSTLY * (made + shared) else []


_TAKES = {"slice", "dynamic_slice", "gather", "split", "unstack"}


def _takes_rows(eqn: Any, read: Sequence[Any]) -> bool:
    """Whether an equation takes some rows of what it reads, and all else of them."""
    if eqn.primitive.name not in _TAKES:
        return False
    (rows, *given), (taken, *rest) = (*read[0].aval.shape, 0), (*eqn.outvars[0].aval.shape, 0)
    return eqn.primitive.name == "unstack" or (taken < rows and rest == given) or rest == given[1:]


def _side_by_side(name: str, eqns: Sequence[Any], leaves: Sequence[Leaf], peak: Peak, least: int) -> str:
    """Of gradients that `jax.vmap` takes, an axis of them, and that are then added up."""
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    shapes = {leaf.shape for leaf in leaves if leaf.kind == PARAMETERS}
    several: dict[tuple[int, ...], bool] = {}  # shape with the axis -> whether they are added up as they are
    for eqn in eqns:
        if eqn.primitive.name != "reduce_sum" or tuple(eqn.params["axes"]) != (0,) or _is_backward(eqn):
            continue
        (added,) = eqn.invars
        if added.aval.shape[1:] in shapes and _is_of_vmap(_made_like(added, made_by)):
            of_gradient = made_by.get(_unscaled(added, made_by))
            several[added.aval.shape] = of_gradient is not None and _is_backward(of_gradient)
    held = [each for each in peak.buffers if each.group not in _GIVEN and dimensions(each.shape) in several]
    size = sum(each.bytes for each in held)
    if not held or size < least:
        return ""
    largest = dimensions(max(held, key=lambda each: each.bytes).shape)
    count = largest[0]
    what = f"{name} takes {count} gradients side by side, under jax.vmap, and adds them up: {format_bytes(size)} of the peak."
    if several[largest]:
        return (
            f"{what} The gradient of the loss over all rows at once is one; where the activations of all rows are too much, "
            f"take it under {advise('causes.microbatches', count=count)}."
        )
    return (
        f"{what} Each is changed before that, as where examples are clipped: a jax.lax.scan that adds each up as it comes holds "
        "one."
    )


_GIVEN = {PARAMETERS, OPTIMIZER, BATCH, RESULTS}


def _made_like(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    """The equation of a backward pass that a value of the same shape goes back to; None where it goes back to none."""
    waiting, seen = [atom], set[Any]()
    while waiting:
        var = waiting.pop()
        eqn = made_by.get(var) if is_variable(var) and var not in seen else None
        seen.add(var)
        if eqn is None or var.aval.shape != atom.aval.shape:
            continue
        if _is_backward(eqn):
            return eqn
        waiting += filter(is_variable, eqn.invars)
    return None


def _is_backward(eqn: Any) -> bool:
    return _BACKWARD in str(eqn.source_info.name_stack)


def _is_of_vmap(eqn: Any) -> bool:
    return eqn is not None and f"vmap({_BACKWARD}" in str(eqn.source_info.name_stack)


def _kept_of_each_round(name: str, equations: Equations, peak: Peak) -> str:
    """Of results that a loop keeps of each of its rounds, where they are most of the peak."""
    results = set(filter(is_variable, equations.outvars))
    kept = {
        tuple(var.aval.shape): eqn
        for eqn in equations.eqns
        if eqn.primitive.name == "scan"
        for var in eqn.outvars[scan_arity(eqn)[1] :]
        if var in results
    }
    held = [each for each in peak.buffers if each.group == RESULTS and dimensions(each.shape) in kept]
    size = sum(each.bytes for each in held)
    if 2 * size < peak.bytes or not held:
        return ""
    largest = max(held, key=lambda each: each.bytes)
    loop = kept[dimensions(largest.shape)]
    length, place = loop.params["length"], short_place(own_lines(loop))
    return (
        f"{format_bytes(size)} of the peak are results of {name} that a loop of {length} rounds{f' at {place}' if place else ''} "
        f"keeps of each round, the largest {short_shape(largest.shape)}. Return from a round what is needed of them, such as "
        "their mean; or call it for fewer rounds at a time, and copy their results to the host."
    )


def _sums_of_gradients(eqns: Sequence[Any]) -> list[list[Any]]:
    """The equations that made the parts of each sum of gradients that is made after the backward passes."""
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    sums: dict[Any, list[Any]] = {}
    inner: set[Any] = set()
    for eqn in eqns:
        if not _is_after(eqn):
            continue
        parts: list[Any] = []
        for atom in _added(eqn, made_by, is_scalar=False):
            var = _unscaled(atom, made_by)
            if var in sums:
                parts += sums[var]
                inner.add(var)
            elif var in made_by and _is_backward(made_by[var]):
                parts.append(made_by[var])
        if parts:
            sums[eqn.outvars[0]] = parts
    return [each for var, each in sums.items() if var not in inner]


def _added(eqn: Any, made_by: Mapping[Any, Any], *, is_scalar: bool) -> Sequence[Any]:
    """What an equation adds up to a scalar, or to an array: its operands, or what was stacked for it."""
    if not eqn.outvars or bool(eqn.outvars[0].aval.shape) == is_scalar:
        return ()
    if eqn.primitive.name in _SUMS:
        return eqn.invars
    stack = made_by.get(_unscaled(eqn.invars[0], made_by)) if eqn.primitive.name == "reduce_sum" else None
    return stack.invars if stack is not None and stack.primitive.name in _STACKS else ()


def _is_after(eqn: Any) -> bool:
    dtype = getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and not _is_backward(eqn)


def _unscaled(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    """What a value is a multiple of, by one number, such as ``g`` of ``g / K``."""
    while is_variable(atom) and atom in made_by:
        eqn = made_by[atom]
        if eqn.primitive.name not in _SCALED or _is_backward(eqn):
            break
        like = [each for each in eqn.invars if is_variable(each) and each.aval.size == atom.aval.size]
        if len(like) != 1 or any(is_variable(each) and 1 < each.aval.size < atom.aval.size for each in eqn.invars):
            break  # by rows is no scale of the whole
        (atom,) = like
    return atom if is_variable(atom) else None


def _alike(parts: Sequence[Any]) -> int:
    """How many gradients of a sum one line made: a loop's, and not those of several losses."""
    return max(Counter((eqn.primitive.name, _place(eqn)) for eqn in parts).values(), default=1)


def _whole_batch(leaves: Sequence[Leaf], peak: Peak, least: int, again: Again) -> str:
    """Of an argument with a batch of which each of several devices has all rows; what dividing it would save is compiled."""
    mesh, holder = _mesh(leaves)
    batch = [leaf for leaf in leaves if leaf.kind == BATCH]
    if mesh is None or any(_split_rows(leaf) for leaf in batch):
        return ""
    here = {each.operation: each for each in peak.buffers if each.group == BATCH}
    whole = [leaf for leaf in batch if leaf.path in here and dimensions(here[leaf.path].shape) == leaf.shape != ()]
    held = sum(here[leaf.path].bytes for leaf in whole)
    if not whole or held < least:
        return ""
    argument = max(whole, key=lambda leaf: here[leaf.path].bytes).argument
    parts = [leaf for leaf in leaves if leaf.argument == argument]
    tried = {axis: again.needs(_divided(parts, mesh, axis)) for axis in _axes(parts, mesh)}
    needs = {axis: size for axis, size in tried.items() if size is not None and size < (1 - _SHARE) * peak.bytes}
    if not needs:
        return ""
    axis = min(needs, key=needs.__getitem__)
    line = advise("causes.split_batch", batch=argument, mesh=f"{_mesh(parts)[1] or holder}.sharding.mesh", axis=axis)
    return (
        f"{argument} is whole on each of {mesh.size} devices, {format_bytes(held)}, and so are the activations made of it. "
        f"With its rows divided over {axis!r} the step needs {format_bytes(needs[axis])} in place of {format_bytes(peak.bytes)}, "
        f"compiled. Divide them before the step is called:\n    {line}"
    )


def _axes(parts: Sequence[Leaf], mesh: Any) -> list[str]:
    """The axes of a mesh that divide the rows of all arrays of an argument."""
    return [
        axis
        for axis, size in mesh.shape.items()
        if size > 1 and all(leaf.shape and leaf.shape[0] % size == 0 for leaf in parts)
    ]


def _divided(parts: Sequence[Leaf], mesh: Any, axis: str) -> dict[int, Any]:
    place = jax.NamedSharding(mesh, jax.P(axis))
    return {id(leaf.value): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for leaf in parts}


def _whole_values(traced: Traced, peak: Peak, least: int, again: Again) -> str:
    """Of a value with all rows of a batch that the devices divide."""
    mesh, _ = _mesh(traced.leaves)
    batch = [leaf for leaf in traced.leaves if leaf.kind == BATCH and _split_rows(leaf)]
    if mesh is None or not batch:
        return ""
    eqns = list(_everywhere(open_jaxpr(traced.jaxpr)))
    shapes = {(_place(eqn), getattr(var.aval, "shape", ())) for eqn in eqns for var in eqn.outvars}
    whole = [
        each
        for each in peak.buffers
        if each.group in (SAVED, TEMPORARIES)
        and each.bytes >= least
        and (each.source, dimensions(each.shape)) in shapes
    ]
    growing = _growing(eqns, batch, again) if whole else []
    rows = {(_place(eqn), shape) for eqn, shape in growing}
    whole = [each for each in whole if (each.source, dimensions(each.shape)) in rows]
    if not whole:
        return ""
    largest = max(whole, key=lambda each: each.bytes)
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    constraint = next((eqn for eqn, _ in growing if _lays_whole(eqn)), None)
    where = f"where it is made, at {largest.source}"
    if constraint is not None:
        where = f"at {short_place(own_lines(constraint))}, which places it whole"
    axis = repr(batch[0].value.sharding.spec[0])
    return (
        f"{largest.shape.partition('{')[0]} at {largest.source}{more}, {format_bytes(sum(each.bytes for each in whole))} at the "
        f"peak, {'have' if more else 'has'} all rows of the batch on each of {mesh.size} devices, though the batch is divided. "
        f"Divide the rows {where}: {advise('causes.split_rows', axis=axis)}."
    )


def _growing(eqns: Sequence[Any], batch: Sequence[Leaf], again: Again) -> list[tuple[Any, tuple[int, ...]]]:
    """What has rows of the batch, by equation and shape: what is larger in a trace with twice as many."""
    twice = {
        id(leaf.value): jax.ShapeDtypeStruct(
            (2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=leaf.value.sharding
        )
        for leaf in batch
    }
    try:
        others = list(_everywhere(open_jaxpr(again.traced(twice).jaxpr)))
    except Exception:  # noqa: BLE001 - a step with the number of rows written into it fails in its own way
        return []
    if [each.primitive for each in eqns] != [each.primitive for each in others]:
        return []
    pairs = [
        (eqn, *both)
        for eqn, other in zip(eqns, others, strict=True)
        for both in zip(eqn.outvars, other.outvars, strict=False)
    ]
    return [(eqn, var.aval.shape) for eqn, var, larger in pairs if var.aval != larger.aval]


def _everywhere(jaxpr: Any) -> Iterator[Any]:
    """Its equations and those inside them, but for what sees one device's part only."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "shard_map":
            for inner in subjaxprs(eqn):
                yield from _everywhere(inner)


def _lays_whole(eqn: Any) -> bool:
    return eqn.primitive.name == "sharding_constraint" and eqn.params["sharding"].is_fully_replicated


def _mesh(leaves: Sequence[Leaf]) -> tuple[Any, str]:
    """The mesh of several devices on which arrays of a call are, and the path of one of them; None where there is none."""
    for leaf in leaves:
        mesh = getattr(getattr(leaf.value, "sharding", None), "mesh", None)
        if mesh is not None and mesh.size > 1:
            return mesh, leaf.path
    return None, ""


def _split_rows(leaf: Leaf) -> int:
    """All rows of an array that the devices divide by rows; 0 for another."""
    sharding = getattr(leaf.value, "sharding", None)
    if sharding is None or not leaf.shape:
        return 0
    return leaf.shape[0] if sharding.shard_shape(leaf.shape)[0] < leaf.shape[0] else 0


def _place(eqn: Any) -> str:
    """The line outside JAX that made an equation, as the compiler has it too."""
    inside = str(pathlib.Path(jax.__file__ or "").parent)
    return next((f"{file}:{line}" for file, line in source_lines(eqn) if not file.startswith(inside)), "")
