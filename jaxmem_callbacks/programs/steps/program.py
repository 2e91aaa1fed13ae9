"""A traced or compiled step: what it needs, how it was compiled, and what it copied in spite of donation."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxmem_callbacks.programs.reading.assigned import assigned_peak
from jaxmem_callbacks.programs.reading.buffer_assignment import program_memory
from jaxmem_callbacks.programs.reading.buffers import Argument, Arguments
from jaxmem_callbacks.programs.reading.hlo import Module, parse_module
from jaxmem_callbacks.programs.reading.host_copies import HostCopies, host_copies
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.donation import UNWRITTEN, LeafUse, Written, leaf_uses, lost_donations
from jaxmem_callbacks.programs.steps.leaves import Leaf, state_arguments
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.peaks import (
    BY_TOTALS,
    CONSTANTS,
    RESULTS,
    TEMPORARIES,
    UNKNOWN,
    UNPLACED,
    Buffer,
    Peak,
    StepSchedule,
    peak_of,
    with_total,
)
from jaxmem_callbacks.records.plans import FrontierPoint
from jaxmem_callbacks.records.policies import CompilerOptions
from jaxmem_callbacks.records.programs import Compilation, Conditions, ProgramMemory
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import OTHER, STATE

# What pins a value on a mesh is no part of the mathematics.
_PLACING = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
# Flags that change no program: where files go, how many CPU devices there are (which is counted), and what JAX sets on every TPU.
_HARMLESS = ("xla_dump", "xla_force_host_platform_device_count", "xla_tpu_use_enhanced_launch_barrier")


def operations_of(jaxpr: Any) -> str:
    """A short hash of a jaxpr's operations with shapes and dtypes of their results, inner jaxprs included."""
    known: dict[int, str] = {}  # by identity: all of them are held by the jaxpr that is read

    def hashed(jaxpr: Any) -> str:
        if id(jaxpr) not in known:
            eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
            text = "\n".join(line(eqn) for eqn in eqns if eqn.primitive.name not in _PLACING)
            known[id(jaxpr)] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return known[id(jaxpr)]

    def line(eqn: Any) -> str:
        types = [f"{getattr(v.aval, 'dtype', '')}{getattr(v.aval, 'shape', '')}" for v in eqn.outvars]
        inner = [hashed(each) for name in sorted(eqn.params) for each in _jaxprs(eqn.params[name])]
        return f"{eqn.primitive.name} {types} {inner} {eqn.params.get('length', '')}"

    return hashed(jaxpr)


@contextmanager
def unguarded() -> Generator[None]:
    """Where this library traces and compiles a step: what JAX watches in the caller's own code changes no program, and is off.

    What changes the program holds, such as ``jax_debug_nans``, under which JAX donates nothing. Without a jit there is no program
    at all: under ``jax_disable_jit`` a step is shown as it is jitted.
    """
    with ExitStack() as off:
        off.enter_context(jax.transfer_guard("allow"))
        for watch in (jax.check_tracer_leaks, jax.debug_infs, jax.debug_key_reuse, jax.no_tracing):
            off.enter_context(watch(False))
        off.enter_context(jax.disable_jit(False))
        yield


def flags_now() -> dict[str, str]:
    """The flags that XLA's compilers take from this process, without those that change no program."""
    words = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    parted = (word.lstrip("-").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in parted if not name.startswith(_HARMLESS)}


def kind_here() -> str:
    """What the attached devices are."""
    return jax.local_devices()[0].device_kind


def conditions_of(compiled: jax.stages.Compiled, operations: str) -> Conditions:
    """What a compiled program runs on, and what it was compiled with.

    Args:
        compiled: For the devices of this process.
        operations: What `operations_of` gave, or empty.
    """
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    devices: Iterable[Any] = max((each.device_set for each in shardings), key=len, default=())
    kinds, meshes = {each.device_kind for each in devices}, [_axes(each) for each in shardings]
    return Conditions(
        device_kind=kinds.pop() if len(kinds) == 1 else "",
        device_count=len(list(devices)) or None,
        mesh=next((axes for axes in meshes if axes), {}),
        flags=flags_now(),
        operations=operations,
    )


def _axes(sharding: Any) -> Mapping[str, int]:
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    return {} if mesh is None else {str(name): int(size) for name, size in mesh.shape.items()}


def _jaxprs(value: Any) -> list[Any]:
    parts = value if isinstance(value, list | tuple) else (value,)
    return [part for part in parts if hasattr(getattr(part, "jaxpr", part), "eqns")]


Signature = tuple[tuple[str, str], ...]
_SHOWN = 8


def signature_of(uses: Sequence[LeafUse], static: Mapping[str, object]) -> Signature:
    """Path -> type of every array (sharding added where it is not a single device's), then the static arguments."""
    arrays = [(use.path, f"{use.type_text} {use.placement}".rstrip()) for use in uses]
    return (*arrays, *((name, f"static {value!r:.60}") for name, value in static.items()))


def changes(before: Signature | None, after: Signature) -> tuple[str, ...]:
    """One sentence for each path that differs: ``batch['tokens']: int32[16,129] -> int32[7,129]``."""
    if before is None:
        return ()
    old, new = dict(before), dict(after)
    changed = [f"{path}: {old[path]} -> {new[path]}" for path in new if path in old and old[path] != new[path]]
    changed += [f"{path}: new, {new[path]}" for path in new if path not in old]
    changed += [f"{path}: gone, was {old[path]}" for path in old if path not in new]
    if len(changed) > _SHOWN:
        return (*changed[:_SHOWN], f"and {len(changed) - _SHOWN} more")
    return tuple(changed) or ("nothing in the arguments: the jit or the policy is another one",)


class Traced(NamedTuple):
    """A call that was traced only."""

    jaxpr: Any
    leaves: list[Leaf]
    undonated: tuple[str, ...]
    out_shardings: tuple[Any, ...]  # of each result in order, None where nothing is known of it
    compiler_options: Mapping[str, Any] = MappingProxyType({})  # of the step's jit, the policy's among them
    compiled_with: CompilerOptions | None = None  # the policy's, with the hardware that they are for
    notes: tuple[str, ...] = ()  # what the policy left as it was, a sentence each
    frontiers: tuple[
        tuple[FrontierPoint, ...], ...
    ] = ()  # of each loss that is surveyed, what it could keep besides its cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One compiled signature of a step. Holds no arrays and no executable.

    Attributes:
        signature: What it was compiled for.
        memory: Its bytes, or None with the reason in ``unavailable``.
        uses: What it does with each array of the call.
        undonated: Arguments that the step returns updated and that nobody donates.
        unavailable: Why ``memory`` is None.
        conditions: On what and with what it was compiled.
        peak: What makes its peak; None where nobody asked, and where the compiler hands over no buffer assignment.
        schedule: Its bytes over the step; None likewise.
        host: Its arguments in host memory, and when they are on the device; None where all of them are there.
    """

    signature: Signature
    memory: ProgramMemory | None
    uses: tuple[LeafUse, ...]
    undonated: tuple[str, ...] = ()
    unavailable: str | None = None
    conditions: Conditions = field(default_factory=Conditions)
    peak: Peak | None = None
    schedule: StepSchedule | None = None
    host: HostCopies | None = None

    def compilation(self, name: str, changed: tuple[str, ...]) -> Compilation:
        """The record of this compile, made now.

        Args:
            name: The step's.
            changed: What differs from the compile before.
        """
        lost = [use for use in lost_donations(self.uses) if not use.passing]  # of a batch nothing is lost
        kinds: dict[str, Counter[str]] = {}
        for use in (use for use in self.uses if not use.on_host):
            kinds.setdefault(use.type_text, Counter())[use.kind] += 1
        return Compilation(
            program=name,
            time_s=time.time(),
            signature=self.signature,
            kinds={type_text: dict(counts) for type_text, counts in kinds.items()},
            changed=changed,
            memory=self.memory,
            unavailable=self.unavailable,
            conditions=self.conditions,
            peak=self.peak,
            schedule=self.schedule,
            lost=tuple(f"{use.path}: {use.lost}" for use in lost),
            lost_bytes=sum(use.bytes for use in lost),
            remedy=" ".join(list(dict.fromkeys(use.remedy for use in lost if use.remedy))[:_REMEDIES]),
        )


@contextmanager
def without_donation_warning() -> Generator[None]:
    """JAX's own warning of unusable donations names no argument; ours follows in its place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable", category=UserWarning)
        yield


def read_program(  # noqa: PLR0913 - what the call and the compile know, each once
    name: str,
    leaves: Sequence[Leaf],
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    *,
    static: Mapping[str, Any],
    requested_names: Sequence[str] = (),
    undonated: Sequence[str] = (),
    operations: str = "",
    written: Written = UNWRITTEN,
    known_bytes: int = -1,
) -> Program:
    """What the compiled step needs on one device, from the compiler's own account.

    What makes its peak is read where it needs more than ``known_bytes``, what its compiles needed before.
    """
    module = parse_module(compiled.as_text())
    uses = leaf_uses(leaves, lowered, compiled, module=module, requested_names=requested_names, written=written)
    try:
        platform = _platform(compiled)
        memory = program_memory(compiled, name=name, platform=platform, target="attached", module=module)
        unavailable = None
    except ValueError as error:
        memory, unavailable = None, str(error)
    peak, schedule = None, None
    if memory is not None and memory.step_bytes > known_bytes:
        found = _assigned_peak(compiled, module, memory, lambda: _described(leaves, uses, undonated))
        summed = peak_by_totals(memory, argument_buffers(leaves, uses, undonated)).largest(_NAMED)
        peak, schedule = found or (summed, None)
    return Program(
        signature=signature_of(uses, static),
        memory=memory,
        uses=uses,
        undonated=tuple(undonated),
        unavailable=unavailable,
        conditions=conditions_of(compiled, operations),
        peak=peak,
        schedule=schedule,
        host=host_copies(module),
    )


_NAMED = (
    12  # buffers of each group of a peak that are kept; a step that is compiled a thousand times keeps each of them
)


def argument_buffers(leaves: Sequence[Leaf], uses: Sequence[LeafUse], undonated: Sequence[str]) -> list[Buffer]:
    """What a program's arguments hold on one device, by their shapes. What is updated and has no better word is state."""
    changing = state_arguments(leaves, undonated)
    return [
        Buffer(
            bytes=use.bytes,
            shape=use.type_text,
            kind="argument",
            operation=use.path,
            group=STATE if use.kind == OTHER and use.argument in changing else use.kind,
        )
        for use in uses
        if use.used and not use.on_host
    ]


_TILES = "tiles and alignment of the arguments, which their shapes do not show"


def peak_by_totals(memory: ProgramMemory, arguments: Sequence[Buffer]) -> Peak:
    """What makes a peak as far as totals and arguments show it: of a TPU's program nothing more comes with the compile.

    Args:
        memory: The compiler's totals.
        arguments: What `argument_buffers` gave.
    """
    results, constants = max(memory.output_bytes - memory.alias_bytes, 0), memory.constant_bytes or 0
    tiles = memory.argument_bytes - sum(each.bytes for each in arguments)
    rest = memory.step_bytes - memory.argument_bytes - results - constants
    parts = (
        Buffer(bytes=tiles, shape="unknown", kind="unplaced", group=UNKNOWN, why=_TILES),
        Buffer(bytes=results, shape="all results", kind="output", group=RESULTS),
        Buffer(bytes=constants, shape="all constants", kind="constant", group=CONSTANTS),
        Buffer(bytes=rest, shape="all temporaries", kind="temporary", group=TEMPORARIES),
    )
    return peak_of([*arguments, *(each for each in parts if each.bytes > 0)], basis=BY_TOTALS)


def _described(leaves: Sequence[Leaf], uses: Sequence[LeafUse], undonated: Sequence[str]) -> Iterator[Argument]:
    """What each parameter of the program holds. What is updated and has no better word is state."""
    changing = state_arguments(leaves, undonated)
    for leaf, use in zip(leaves, uses, strict=True):
        if use.used:
            kind = STATE if leaf.kind == OTHER and leaf.argument in changing else leaf.kind
            yield Argument(path=leaf.path, kind=kind, elements=math.prod(leaf.shape))


def _assigned_peak(
    compiled: jax.stages.Compiled, module: Module, memory: ProgramMemory, described: Callable[[], Iterable[Argument]]
) -> tuple[Peak, StepSchedule] | None:
    """The same as `assigned_peak`; what a compiler of another version hands over otherwise costs the picture and no step."""
    try:
        arguments = Arguments(by_number=dict(enumerate(described())))
        found = assigned_peak(compiled, module, memory.platform, arguments)
        return None if found is None else (with_total(found[0], memory.step_bytes, UNPLACED).largest(_NAMED), found[1])
    except Exception:  # noqa: BLE001 - a training must not end for a picture of it
        return None


def step_bytes_of(name: str, lowered: jax.stages.Lowered) -> int | float:
    """Bytes of a step that is compiled for no other reason; infinite where its compiler finds no room for it."""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError:
        return math.inf
    module = parse_module(compiled.as_text())
    return program_memory(
        compiled, name=name, platform=_platform(compiled), target="attached", module=module
    ).step_bytes


def _platform(compiled: jax.stages.Compiled) -> str:
    """Where the program runs, by the devices of its results or arguments."""
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    return next(iter(shardings[0].device_set)).platform if shardings else jax.default_backend()


# Constants of so many bytes, and of this share of what the step needs, are worth a warning.
_LARGE = 2**20
_LARGE_SHARE = 0.01


def disagreement_words(program: ProgramMemory) -> tuple[str, ...]:
    """A sentence for each other figure of the same bytes that differs by more than 1 %, and which of them is right."""
    step = format_bytes(program.step_bytes)
    less = (
        "It leaves out memory that XLA keeps apart, as a flag such as xla_gpu_temp_buffer_use_separate_color asks for"
    )
    more = "It counts memory that no value is given"
    return tuple(
        f"{program.name} needs {step} by {program.step_source}, and {words} {format_bytes(count)}. "
        f"{less if count < program.step_bytes else more}; the program asks for {step}."
        for words, count in program.disagreements
    )


def large_constants(name: str, step_bytes: int | None, constant_bytes: int | None) -> tuple[str, ...]:
    """What to do about arrays in a program that are worth it; empty where none are."""
    held = constant_bytes or 0
    if held < max(_LARGE, _LARGE_SHARE * (step_bytes or 0)):
        return ()
    size = format_bytes(held)
    msg = f"{size} of constants: {name} closes over arrays, which each compiled program holds. Give them as arguments."
    return (msg,)


_REMEDIES = 3  # in one record: an event is read at a glance
_WORTH = 2**20  # bytes of all of them together from which on it is recorded: a viewed counter is nothing
_WHY = "the runtime copied it, since something outside of JAX holds its memory, such as a NumPy view (np.asarray)"


def record_copies(name: str, program: Program, leaves: Sequence[Leaf]) -> None:
    """Write the copies of a first run to the registry, where they are large enough."""
    copied = _copied(leaves, program.uses)
    if sum(use.bytes for use in copied) < _WORTH:
        return
    registry.record(
        replace(
            program.compilation(name, ()),
            lost=tuple(f"{use.path}: {_WHY}" for use in copied),
            lost_bytes=sum(use.bytes for use in copied),
            remedy=f"Let its views go before the first step, or copy where they are made: {advise('donation.own_copy')}.",
            has_run=True,
        )
    )


def _copied(leaves: Sequence[Leaf], uses: Sequence[LeafUse]) -> list[LeafUse]:
    """Donated arrays that are still alive after the step was dispatched."""
    return [
        use
        for leaf, use in zip(leaves, uses, strict=True)
        if use.requested and use.aliased and _was_in_place(leaf.value, use) and not leaf.value.is_deleted()
    ]


def _was_in_place(value: object, use: LeafUse) -> bool:
    """Whether an array was where the program wants it: one without a place of its own is moved there, once."""
    return isinstance(value, jax.Array) and (value.committed or not use.placement)
