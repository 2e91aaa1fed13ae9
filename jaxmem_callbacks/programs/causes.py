"""Why a step needs what it needs, where its trace and its peak show a cause that people can do something about.

Each cause is found in what the program is, whatever its parts are called:

- gradients that are kept from step to step: state to which gradients are added until a switch empties it;
- gradients of several microbatches in one program: sums, made after the backward pass, of gradients that one line made;
- what is whole on each device: the batch, or a value that has all rows of a batch which the devices divide.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem_callbacks._compat.jaxprs import open_jaxpr, source_lines, subjaxprs
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.peaks import SAVED, TEMPORARIES, Peak
from jaxmem_callbacks.records.programs import Buffer
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.equations import inlined, is_variable
from jaxmem_callbacks.transforms.kinds import BATCH
from jaxmem_callbacks.transforms.own_checkpoints import own_lines, short_place
from jaxmem_callbacks.transforms.residuals import nbytes

_BACKWARD = "transpose("
_SUMS = {"add", "add_any"}
_SCALED = {"mul", "div", "convert_element_type"}
_SHARE = 0.02  # of the peak: a cause of less is not worth a sentence
_SCHEDULER, _LEAST_MEMORY = "xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
_DIMENSIONS = re.compile(r"\[([\d,]*)\]")


def causes_of(name: str, closed: Any, leaves: Sequence[Leaf], peak: Peak) -> tuple[str, ...]:
    """A sentence or two for each cause that is found.

    Args:
        name: The step's name.
        closed: Its trace, with global shapes.
        leaves: The arrays of its call.
        peak: What makes its peak, on one device.
    """
    if closed is None:
        return ()
    least = int(_SHARE * peak.bytes)
    return tuple(
        words
        for words in (
            _kept_gradients(leaves, least),
            _python_loop(name, closed, peak),
            _whole_batch(leaves, peak, least),
            _whole_values(closed, leaves, peak, least),
        )
        if words
    )


def scheduled_at_once(name: str, lowered: Any, peak: Peak) -> str:
    """A sentence on temporaries that a CPU's scheduler holds at once, to compute them side by side; empty where it holds few.

    One more compile shows what another schedule needs, where most of the peak are temporaries of which one line made several.

    Args:
        name: The step's name.
        lowered: What JAX made of its call, for the attached devices.
        peak: What makes its peak.
    """
    alike = Counter((each.source, each.shape) for each in peak.buffers if each.group == TEMPORARIES)
    if (
        jax.default_backend() != "cpu"
        or 2 * peak.bytes_of(TEMPORARIES) < peak.bytes
        or max(alike.values(), default=0) == 1
    ):
        return ""
    memory = lowered.compile(compiler_options={_SCHEDULER: _LEAST_MEMORY}).memory_analysis()
    kept = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    needs = kept + memory.output_size_in_bytes + memory.temp_size_in_bytes
    if needs > (1 - _SHARE) * peak.bytes:
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
    held = sum(map(_bytes_here, kept))
    if not kept or held < least:
        return ""
    largest = max(kept, key=_bytes_here)
    others = f" and {len(kept) - 1} more hold" if len(kept) > 1 else " holds"
    return (
        f"{largest.path}{others} {format_bytes(held)} of gradients from step to step, as optax.MultiSteps does: they are in "
        "memory in every step. In one step over the rows of K such steps they are in memory for a part of it: "
        f"{advise('causes.microbatches', count='K')}, and an optimizer that is called once."
    )


@dataclass(slots=True)
class _Sum:
    """A sum of gradients: the equations that made its parts."""

    parts: list[Any] = field(default_factory=list[Any])


def _python_loop(name: str, closed: Any, peak: Peak) -> str:
    """Of gradients that are taken one after the other and added up."""
    eqns = inlined(closed).eqns
    counts = [_alike(each.parts) for each in _sums_of_gradients(eqns)]
    count = max(counts, default=1)
    if count == 1:
        return ""
    made, alive = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for eqn in eqns:
        if _BACKWARD not in str(eqn.source_info.name_stack):
            made[_place(eqn), eqn.primitive.name] += sum(map(nbytes, eqn.outvars))
    for each in peak.buffers:
        if each.group == SAVED and each.source and each.operation:
            alive[each.source, each.operation.rpartition("/")[2]] += each.bytes
    is_cut_short = sum(each.bytes for each in peak.buffers if each.group == SAVED) < peak.bytes_of(SAVED)
    is_most = 2 * peak.bytes_of(SAVED) > peak.bytes
    if not any(held > made[line] // count > 0 for line, held in alive.items()) and not (is_cut_short and is_most):
        return ""  # those of one microbatch at a time: the compiler puts them one after the other
    return (
        f"{name} takes the gradients of {count} microbatches in a Python loop: the program holds {count} copies of the loss, and "
        "activations of several are in memory at the peak. In one loop of the program they are those of one: take the loss over "
        f"all rows at once, under {advise('causes.microbatches', count=count)}, or add the gradients up in a jax.lax.scan."
    )


def _sums_of_gradients(eqns: Sequence[Any]) -> Iterable[_Sum]:
    """Sums that are made after the backward passes; the whole of each, and no part of it besides."""
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    sums: dict[Any, _Sum] = {}
    inner: set[Any] = set()
    for eqn in eqns:
        if not _is_after(eqn) or eqn.primitive.name not in _SUMS or not eqn.outvars[0].aval.shape:
            continue
        found = _Sum()
        for atom in eqn.invars:
            var = _unscaled(atom, made_by)
            if var in sums:
                found.parts += sums[var].parts
                inner.add(var)
            elif var in made_by and _BACKWARD in str(made_by[var].source_info.name_stack):
                found.parts.append(made_by[var])
        if found.parts:
            sums[eqn.outvars[0]] = found
    return [each for var, each in sums.items() if var not in inner]


def _is_after(eqn: Any) -> bool:
    dtype = getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and _BACKWARD not in str(eqn.source_info.name_stack)


def _unscaled(atom: Any, made_by: dict[Any, Any]) -> Any:
    """What a value is a multiple of, such as ``g`` of ``g / K``."""
    while is_variable(atom) and atom in made_by:
        eqn = made_by[atom]
        if eqn.primitive.name not in _SCALED or _BACKWARD in str(eqn.source_info.name_stack):
            break
        like = [each for each in eqn.invars if is_variable(each) and each.aval.shape == atom.aval.shape]
        if len(like) != 1:
            break
        (atom,) = like
    return atom if is_variable(atom) else None


def _alike(parts: Sequence[Any]) -> int:
    """How many gradients of a sum one line made: a loop's, and not those of several losses."""
    return max(Counter((eqn.primitive.name, _place(eqn)) for eqn in parts).values(), default=1)


def _whole_batch(leaves: Sequence[Leaf], peak: Peak, least: int) -> str:
    """Of a batch of which each of several devices has all rows."""
    count, mesh = _devices(leaves)
    batch = [leaf for leaf in leaves if leaf.kind == BATCH and leaf.shape]
    if count == 1 or not batch or any(_split_rows(leaf) for leaf in batch):
        return ""
    whole = {each.operation: each for each in peak.buffers if each.group == BATCH}
    large = [leaf for leaf in batch if leaf.path in whole and _dimensions(whole[leaf.path]) == leaf.shape]
    held = sum(whole[leaf.path].bytes for leaf in large)
    axis = None if mesh is None else max(mesh.shape, key=mesh.shape.__getitem__)
    if not large or held < least or axis is None or _is_divided(leaves):
        return ""  # where parameters are divided, an axis that divides rows too may need more
    if any(leaf.shape[0] % mesh.shape[axis] for leaf in large):
        return ""
    largest = max(large, key=lambda leaf: whole[leaf.path].bytes)
    line = advise("causes.split_batch", batch=largest.argument, axis=axis)
    return (
        f"{largest.argument} lies whole on each of {count} devices, {format_bytes(held)}, and so do the activations made of it: "
        f"each device computes all rows. Divide the rows where the batch is made, with the mesh of the parameters:\n    {line}"
    )


def _whole_values(closed: Any, leaves: Sequence[Leaf], peak: Peak, least: int) -> str:
    """Of a value with all rows of a batch that the devices divide."""
    count, _ = _devices(leaves)
    rows = {rows for leaf in leaves if leaf.kind == BATCH and (rows := _split_rows(leaf))}
    if count == 1 or not rows:
        return ""
    eqns = list(_everywhere(open_jaxpr(closed)))
    known = {leaf.shape for leaf in leaves if leaf.kind != BATCH}
    shapes = {
        (_place(eqn), shape)
        for eqn in eqns
        for var in eqn.outvars
        if (shape := getattr(var.aval, "shape", ()))
        and shape not in known
        and any(d % r == 0 for d in shape for r in rows)
    }
    whole = [
        each
        for each in peak.buffers
        if each.group in (SAVED, TEMPORARIES)
        and each.bytes >= least
        and (_buffer_place(each), _dimensions(each)) in shapes
    ]
    if not whole:
        return ""
    largest = max(whole, key=lambda each: each.bytes)
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    axis = _axis_of_rows(leaves)
    constraint = next((each for each in eqns if _lays_whole(each, rows)), None)
    if constraint is None:
        return ""  # it may be a gathered weight, whose width the rows divide
    where = f"at {_written(constraint)}, which lays it whole"
    return (
        f"{largest.shape.partition('{')[0]} at {largest.source}{more}, {format_bytes(sum(each.bytes for each in whole))} at the "
        f"peak, {'have' if more else 'has'} all rows of the batch on each of {count} devices, though the batch is divided. "
        f"Divide the rows {where}: {advise('causes.split_rows', axis=axis)}."
    )


def _everywhere(jaxpr: Any) -> Iterator[Any]:
    """Its equations and those inside them, but for what sees one device's part only."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "shard_map":
            for inner in subjaxprs(eqn):
                yield from _everywhere(inner)


def _lays_whole(eqn: Any, rows: set[int]) -> bool:
    if eqn.primitive.name != "sharding_constraint" or not eqn.params["sharding"].is_fully_replicated:
        return False
    return any(d % r == 0 for d in eqn.outvars[0].aval.shape for r in rows)


def _devices(leaves: Sequence[Leaf]) -> tuple[int, Any]:
    """On how many devices the arrays of a call lie, and the mesh that says so."""
    known = [each for leaf in leaves if (each := getattr(leaf.value, "sharding", None)) is not None]
    largest = max(known, key=lambda each: each.num_devices, default=None)
    return (1, None) if largest is None else (largest.num_devices, getattr(largest, "mesh", None))


def _is_divided(leaves: Sequence[Leaf]) -> bool:
    """Whether the devices divide any array of the call."""
    shardings = (getattr(leaf.value, "sharding", None) for leaf in leaves)
    return any(each is not None and not each.is_fully_replicated for each in shardings)


def _split_rows(leaf: Leaf) -> int:
    """All rows of an array that the devices divide by rows; 0 for another."""
    sharding = getattr(leaf.value, "sharding", None)
    if sharding is None or not leaf.shape:
        return 0
    return leaf.shape[0] if sharding.shard_shape(leaf.shape)[0] < leaf.shape[0] else 0


def _axis_of_rows(leaves: Iterable[Leaf]) -> str:
    specs = (leaf.value.sharding.spec for leaf in leaves if leaf.kind == BATCH and _split_rows(leaf))
    return repr(next(specs)[0])


def _bytes_here(leaf: Leaf) -> int:
    """What one device holds of it."""
    sharding = getattr(leaf.value, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * getattr(leaf.dtype, "itemsize", 0)


def _dimensions(buffer: Buffer) -> tuple[int, ...]:
    found = _DIMENSIONS.search(buffer.shape)
    return tuple(map(int, found[1].split(","))) if found and found[1] else ()


def _place(eqn: Any) -> str:
    """The line outside JAX that made an equation, as the compiler has it too."""
    inside = str(pathlib.Path(jax.__file__ or "").parent)
    return next((f"{file}:{line}" for file, line in source_lines(eqn) if not file.startswith(inside)), "")


def _buffer_place(buffer: Buffer) -> str:
    return buffer.source or ""


def _written(eqn: Any) -> str:
    return short_place(own_lines(eqn))
