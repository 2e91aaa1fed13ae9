"""What one step needs, by its compiler: `step_memory`, as text and as an account; and the operations of one call."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxmem_callbacks.programs.causes import Again, causes_of
from jaxmem_callbacks.programs.reading.buffers import Arguments, peak_attached
from jaxmem_callbacks.programs.reading.host_copies import host_copies
from jaxmem_callbacks.programs.steps.donation import (
    LeafUse,
    lost_donations,
    replicated,
    require_unshared,
    worth_donating,
)
from jaxmem_callbacks.programs.steps.host_state import unsaved
from jaxmem_callbacks.programs.steps.leaves import AbstractCall, abstract_call, require_arguments
from jaxmem_callbacks.programs.steps.program import (
    Program,
    Signature,
    argument_buffers,
    disagreement_words,
    large_constants,
    peak_by_totals,
    signature_of,
    unguarded,
)
from jaxmem_callbacks.programs.steps.step import JitStep, jit_step
from jaxmem_callbacks.programs.steps.user_jit import already_jitted, jax_traced
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from jaxmem_callbacks.programs.targets.exporting import flatten_program, refusing_cudnn
from jaxmem_callbacks.programs.targets.step_on_target import compile_step_for, compiling_here, described
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.accounts import ONE_STEP, Account, parts_of
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import require_function
from jaxmem_callbacks.records.documents import Bullets, Document, Table, as_text
from jaxmem_callbacks.records.errors import CompileError, DonationError
from jaxmem_callbacks.records.page import framed, program_page
from jaxmem_callbacks.records.peaks import BY_TOTALS, UNPLACED, Buffer, Peak, StepSchedule, with_total
from jaxmem_callbacks.records.policies import StepPolicy, own_checkpoints_words, policy_words
from jaxmem_callbacks.records.programs import ArgumentMemory, ProgramMemory, program_model
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.arg_roles import OTHER, STATE, batch_of
from jaxmem_callbacks.transforms.costs import FlopCount, count_flops
from jaxmem_callbacks.transforms.frameworks import framework_of


def memory_document(program: ProgramMemory, arguments: Sequence[ArgumentMemory], warnings: Sequence[str]) -> Document:
    """The whole account of one step."""
    hardware = f"attached {program.platform}" if program.target == "attached" else program.target
    return Document(
        [
            f"What one step of {program.name} needs, in bytes on one device (source: the compiler for {hardware})",
            Table((), _figures(program, arguments), ("left", "right", "left")),
            argument_table(arguments),
            *_tiles(program, arguments),
            Bullets(warnings, mark="!"),
        ]
    )


def _tiles(program: ProgramMemory, arguments: Sequence[ArgumentMemory]) -> Iterator[str]:
    """Why sizes by argument add up to less than the figures above them: a TPU rounds arrays up to tiles."""
    elements = sum(row.bytes for row in arguments)
    shown, padded = format_bytes(elements), format_bytes(program.argument_bytes)
    if program.platform == "tpu" and program.argument_bytes > elements and shown != padded:
        yield (
            f"Sizes by argument are those of the elements, {shown}; a TPU's tiles pad them to {padded}, as in the figures "
            "above. peak() has the padding of each array."
        )


def argument_table(rows: Sequence[ArgumentMemory]) -> Table:
    """One line for each argument and kind, and their sums by kind."""
    head = ("argument", "holds", "arrays", "size", "donated", "really reused")
    body = [(row.name, row.kind, *_cells([row])) for row in rows]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    sums = [("", f"all {kind}", *_cells([row for row in rows if row.kind == kind])) for kind in kinds]
    shown = sums if len(rows) > len(kinds) else []
    return Table(head, [*body, *shown], ("left", "left", "right", "right", "right", "right"))


def buffer_table(buffers: Sequence[Buffer]) -> Table:
    """The buffers of the peak, largest first, with the place in the user's code that they come from."""
    head = ("size", "padding", "group", "shape", "from", "source")
    body = [
        (format_bytes(b.bytes), _padding(b), b.group, b.shape, b.operation or "unknown", _near(b.source))
        for b in buffers
    ]
    return Table(head, body, ("right", "right", "left", "left", "left", "left"))


def _padding(buffer: Buffer) -> str:
    waste = buffer.waste_bytes
    return format_bytes(waste) if waste else "unknown" if waste is None else "none"


def _near(source: str | None) -> str:
    """``file:line`` as short as it can be written from the working folder."""
    if source is None:
        return "unknown"
    with contextlib.suppress(FileNotFoundError):  # whoever works in a folder that is gone has no shorter name
        return source.removeprefix(str(Path.cwd()) + os.sep)
    return source


def _figures(program: ProgramMemory, arguments: Sequence[ArgumentMemory]) -> list[tuple[str, ...]]:
    donated = (
        f"outputs that reuse donated arguments ({format_bytes(sum(row.donated_bytes for row in arguments))} donated)"
    )
    host = ("on the host", format_bytes(program.host_temp_bytes), "offloaded values, besides what the device needs")
    return [
        ("step", format_bytes(program.step_bytes), program.step_source),
        ("arguments", format_bytes(program.argument_bytes), "what the step is given and uses"),
        ("outputs", format_bytes(program.output_bytes), "what it returns, reused arguments included"),
        ("aliased", format_bytes(program.alias_bytes), donated),
        ("temporaries", format_bytes(program.temp_bytes), "activations, residuals, workspace"),
        (
            "constants",
            format_bytes(program.constant_bytes),
            "arrays in the program, such as data that the step closes over",
        ),
        *([host] if program.host_temp_bytes else []),
        ("recomputed", str(program.compiler_remat), "instructions that the compiler recomputes by its own choice"),
    ]


def _cells(rows: Sequence[ArgumentMemory]) -> tuple[str, str, str, str]:
    reused = [row.alias_bytes for row in rows]
    known = [bytes_ for bytes_ in reused if bytes_ is not None]
    return (
        str(sum(row.leaves for row in rows)),
        format_bytes(sum(row.bytes for row in rows)),
        format_bytes(sum(row.donated_bytes for row in rows)),
        format_bytes(sum(known) if len(known) == len(reused) else None),
    )


_COMPILERS = {"gpu": "cuda", "tpu": "tpu"}


def account_of_step(memory: StepMemory, policy: StepPolicy, peak: Peak | None) -> Account:
    """The account of one compiled step.

    Args:
        memory: What `jm.step_memory` returned.
        policy: What the step was compiled under.
        peak: What makes its peak, by group; None where nobody asked.
    """
    program = memory.program
    return Account(
        form="step memory",
        name=program.name,
        hardware=f"the attached {jax.devices()[0].device_kind}" if program.target == "attached" else program.target,
        judged={ONE_STEP: memory.step_bytes},
        shown=parts_of(program, peak),
        batch=batch_of(memory.signature),
        conditions={"policy": policy_words(policy), **_versions(program)},
    )


def _versions(program: ProgramMemory) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if program.target != "attached" and program.platform in _COMPILERS:
        found |= compiler_versions(_COMPILERS[program.platform])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What one step needs on one device, by the compiler's own figures. ``print`` it for a table.

    Attributes:
        program: The compiler's figures.
        arguments: One row for each argument and kind of content.
        warnings: What is worth acting on, a sentence each.
        signature: Path of each array argument -> its dtype and shape, such as ``("batch['x']", "float32[8,128]")``.
        read_peak: Makes `peak`'s answer.
        read_causes: Makes `causes`' answer of a peak.
        known_peak: What the first compile shows of it, with the largest buffers only; arguments and totals where the
            compiler hands over no buffers.
        schedule: Its bytes over the step; None likewise.
    """

    program: ProgramMemory
    arguments: tuple[ArgumentMemory, ...]
    warnings: tuple[str, ...] = ()
    signature: Signature = ()
    read_peak: Callable[[], Peak] = field(repr=False, compare=False)
    read_causes: Callable[[Peak], tuple[str, ...]] = field(repr=False, compare=False)
    known_peak: Peak | None = field(default=None, repr=False, compare=False)
    schedule: StepSchedule | None = field(default=None, repr=False, compare=False)

    @property
    def step_bytes(self) -> int:
        """Bytes that the step needs: its buffer assignment, else the larger of its parts added up and the runtime's own total."""
        return self.program.step_bytes

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the program keeps."""
        return self.program.argument_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of the results, those that reuse arguments included."""
        return self.program.output_bytes

    @property
    def alias_bytes(self) -> int:
        """Bytes of the results that reuse a donated argument's memory."""
        return self.program.alias_bytes

    @property
    def temp_bytes(self) -> int:
        """Bytes of temporaries: activations, residuals, workspace."""
        return self.program.temp_bytes

    @property
    def constant_bytes(self) -> int:
        """Bytes of arrays that are part of the program, such as data that the step closes over."""
        return self.program.constant_bytes or 0

    @property
    def donated_bytes(self) -> int:
        """Bytes of the arrays that were to be donated, whether or not the program reuses them."""
        return sum(row.donated_bytes for row in self.arguments)

    @property
    def compiler_remat(self) -> int:
        """Instructions that the compiler chose to recompute by itself near its memory limit."""
        return self.program.compiler_remat

    @unguarded()
    def peak(self) -> Peak:
        """What makes the peak: parameters, optimizer state, gradients, saved activations, temporaries and the rest.

        Costs one more compile (on every platform: only a compile can be asked to write its buffers down), each time.

        Raises:
            CompileError: the compiler wrote no buffer assignment.
        """
        return self.read_peak()

    def causes(self, peak: Peak | None = None) -> tuple[str, ...]:
        """Why the step needs so much, where something can be done about it, a sentence or two each: `programs.causes`.

        Args:
            peak: What `peak` gave; None, and it is asked for.

        Raises:
            CompileError: the compiler wrote no buffer assignment.
        """
        return self.read_causes(self.peak() if peak is None else peak)

    def top_buffers(self, count: int | None = None) -> tuple[Buffer, ...]:
        """The buffers of the peak, largest first, with group, source line and module path. Compiles as `peak` does.

        Args:
            count: How many; None for all.

        Raises:
            CompileError: the compiler wrote no buffer assignment.
        """
        return self.peak().buffers[:count]

    def __str__(self) -> str:
        return as_text(self._document())

    def _repr_html_(self) -> str:
        """The memory page of the step, without another compile."""
        program = program_model(self.program, peak=self.known_peak, schedule=self.schedule)
        head, *blocks = self._document().blocks
        known = self.known_peak is not None and self.known_peak.basis != BY_TOTALS
        unknown = () if known else ("The buffers behind these totals take one more compile: peak() has them.",)
        page = program_page(f"{head}.", "", program, [*unknown, *blocks])
        return framed(page, height=620, table=self._document())

    def _document(self) -> Document:
        return memory_document(self.program, self.arguments, self.warnings)


@unguarded()
def step_memory(step: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> StepMemory:
    """The memory that one step needs, by the compiler; the step does not run.

        print(jm.step_memory(step, state, batch))

    Args:
        step: What `jm.jit_step` returned, a jitted function (used as it is), or a plain one (then as `jm.jit_step` would
            make it, its updated arguments donated).
        *args: The step's arguments: arrays, `jax.ShapeDtypeStruct`, what `jax.eval_shape` gives, NNX objects, abstract too.
        target: Name of the hardware, attached or not, such as ``h100_sxm`` or ``v5e:2x2``; None for the attached devices.
        **kwargs: The step's keyword arguments.

    Returns:
        Bytes on one device, argument by argument; ``print`` it for a table.

    Raises:
        TypeError: a step that is no function, or arguments that it does not take.
        PolicyError: a remat policy on a step that takes no gradient through this library.
        TargetError: ``target`` is unknown, or its compiler is not installed.
        CompileError: the compiler failed, does not know a compiler option of your jit, or finds that the program does not fit
            into a TPU; or the arguments are on different devices.
    """
    require_function(step, "jm.step_memory")
    made = as_step(step)
    require_arguments(made.__wrapped__, args, kwargs, "jm.step_memory")
    if target is not None:
        return _for_target(made, args, kwargs, target)
    with compiling_here(made.name, traces=True):
        compiled = made.compile_call(args, kwargs)
    memory = known_memory(compiled.program, made.name)
    warnings = (
        *_warnings(made, compiled.program),
        *_shared(compiled.leaves, compiled.function),
        *replicated(compiled.leaves, made.policy),
    )
    lowered = compiled.lowered
    known = described(compiled.leaves, compiled.program.undonated)
    used = [each for each, use in zip(known, compiled.program.uses, strict=True) if use.used]
    arguments = Arguments(by_number=dict(enumerate(used)))
    return StepMemory(
        program=memory,
        arguments=argument_rows(compiled.program.uses, compiled.program.undonated),
        warnings=warnings,
        signature=compiled.program.signature,
        read_peak=lambda: with_total(peak_attached(lowered, arguments), memory.step_bytes, UNPLACED),
        read_causes=_causes(made, abstract_call(args, kwargs), None),
        known_peak=compiled.program.peak,
        schedule=compiled.program.schedule,
    )


def _causes(step: JitStep, call: AbstractCall | None, target: str | None) -> Callable[[Peak], tuple[str, ...]]:
    """What `StepMemory.causes` asks. The call is held by its shapes, so that no array stays alive for it."""

    def causes(peak: Peak) -> tuple[str, ...]:
        if call is None:  # a tree that cannot be made again
            return ()
        again = Again(step, call, target)
        return causes_of(step.name, again.traced({}), peak, again)

    return causes


def known_memory(program: Program, name: str) -> ProgramMemory:
    """The compiler's figures of a program that was compiled here.

    Raises:
        CompileError: this platform's compiler gives none.
    """
    if program.memory is None:
        msg = f"What {name} needs is unknown here: {program.unavailable} Pass target='h100_sxm' for a GPU that is not there."
        raise CompileError(msg)
    return program.memory


def argument_rows(uses: Sequence[LeafUse], updated: Sequence[str] = ()) -> tuple[ArgumentMemory, ...]:
    """Arrays added up by argument and kind, in the order of the call. What is updated and has no better word is state.

    What the user's own jit donates and the step does not return is a batch: donation alone makes no state.
    """
    changing = {*updated, *(use.argument for use in uses if use.requested and not use.passing)}
    groups: dict[tuple[str, str], list[LeafUse]] = {}
    for use in uses:
        kind = STATE if use.kind == OTHER and use.argument in changing else use.kind
        groups.setdefault((use.argument, kind), []).append(use)
    return tuple(
        ArgumentMemory(
            name=name,
            kind=kind,
            bytes=sum(use.bytes for use in group),
            leaves=len(group),
            donated_bytes=sum(use.bytes for use in group if use.requested),
            alias_bytes=_aliased(group),
        )
        for (name, kind), group in groups.items()
    )


def _aliased(uses: Sequence[LeafUse]) -> int | None:
    known = [use.bytes if use.aliased else 0 for use in uses if use.aliased is not None]
    return sum(known) if len(known) == len(uses) else None


def as_step(step: Callable[..., Any]) -> JitStep:
    """Any step as `jm.jit_step` would make it; a jitted one without any policy."""
    if isinstance(step, JitStep):
        return step
    return JitStep(step, StepPolicy()) if already_jitted(step) is not None else jit_step(step)


def _for_target(step: JitStep, args: tuple[Any, ...], kwargs: dict[str, Any], target: str) -> StepMemory:
    with refusing_cudnn(step.name, resolve_target(target).platform):
        traced = step.traced(args, kwargs)
    compiled, uses, again = compile_step_for(traced, step.name, target)
    if compiled.memory is None:
        msg = (
            f"{step.name} does not fit into one device of {compiled.target.name}: its compiler needs "
            f"{format_bytes(compiled.needed_bytes)} and has {format_bytes(compiled.limit_bytes)}. Does it "
            "fit under remat='full', or on a larger target? jm.plan compiles both."
        )
        raise CompileError(msg)
    program = Program(signature=(), memory=compiled.memory, uses=uses, undonated=traced.undonated)
    schedule = None if compiled.module is None else host_copies(compiled.module)

    def without() -> float:
        other, call = step.with_state_here(args, kwargs)
        memory = compile_step_for(other.traced(*call), step.name, target)[0].memory
        return math.inf if memory is None else memory.step_bytes

    unsaved_words = unsaved(schedule, compiled.memory.step_bytes, without)
    return StepMemory(
        program=compiled.memory,
        arguments=argument_rows(uses, traced.undonated),
        warnings=(
            *_warnings(step, program),
            *([unsaved_words or schedule.words] if schedule else []),
            *compiled.note_of_reports,
        ),
        signature=signature_of(uses, {}),
        read_peak=again,
        read_causes=_causes(step, abstract_call(args, kwargs), target),
        known_peak=peak_by_totals(compiled.memory, argument_buffers(traced.leaves, uses, traced.undonated)),
    )


def _donating(step: JitStep, program: Program, names: tuple[str, ...]) -> str:
    """A sentence on how the user of a step donates also what is returned updated."""
    own = already_jitted(step.__wrapped__)
    donated = [use.argument for use in program.uses if use.requested and not (use.passing and use.lost)]
    if own is None:
        names = tuple(dict.fromkeys((*donated, *names)))
        return f"Write {advise('donation.argnames', names=repr(names)[1:-1])} in the jm.jit_step of {step.name}."
    return own.donating(step.name, names, donated)


def _warnings(step: JitStep, program: Program) -> tuple[str, ...]:
    """What is worth acting on in a compiled program."""
    found = _donated_in_vain(program)
    undonated = worth_donating(program.undonated, [(use.argument, use.bytes) for use in program.uses])
    if undonated and not jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue] - 0.10
        held = format_bytes(sum(use.bytes for use in program.uses if use.argument in undonated))
        found.append(
            f"{', '.join(undonated)}: returned updated and not donated, so {held} are held twice. "
            f"{_donating(step, program, undonated)}"
        )
    unused = [
        name for name, group in itertools.groupby(program.uses, lambda u: u.argument) if not any(u.used for u in group)
    ]
    found += [f"{name} is never used by {step.name}: JAX drops it from the program." for name in unused]
    if program.memory is not None and program.memory.compiler_remat:
        found.append(
            f"The compiler recomputes {program.memory.compiler_remat} instructions by itself near its memory limit: bytes no "
            "longer grow with the batch, time does."
        )
    if program.memory is not None:
        found += large_constants(step.name, program.memory.step_bytes, program.memory.constant_bytes)
        found += disagreement_words(program.memory)
    if step.left_alone:
        found.append(
            f"{own_checkpoints_words(step.left_alone)}: the policy acts on the rest. With own_checkpoints='replace' in the "
            "policy it replaces them."
        )
    found += step.notes
    if step.policy.offloaded and program.memory is not None and not program.memory.host_temp_bytes:
        found.append(_offloads_nothing(program.memory))
    found += _waiting_on_host(program)
    if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue] - 0.10
        found.append("jax_debug_nans is on: JAX donates nothing while it is.")
    return (*found, *_cross_check(program))


def _donated_in_vain(program: Program) -> list[str]:
    """A sentence for all arrays of an argument that are lost for one reason."""
    alike: dict[tuple[str, str | None, str | None], list[LeafUse]] = {}
    for use in lost_donations(program.uses):
        alike.setdefault((use.argument, use.lost, use.remedy), []).append(use)
    return [
        f"{uses[0].path}{f' and {len(uses) - 1} more of {argument}' if len(uses) > 1 else ''} "
        f"{'are' if len(uses) > 1 else 'is'} donated in vain: {lost}. {remedy or ''}".strip()
        for (argument, lost, remedy), uses in alike.items()
    ]


def _offloads_nothing(memory: ProgramMemory) -> str:
    why = "a CPU's device memory is the host's" if memory.platform == "cpu" else "the compiler moved no value there"
    return (
        f"The policy offloads, but nothing waits in host memory here: {why}. Leave offload out, or name a target, such as "
        "target='h100_sxm'."
    )


def _waiting_on_host(program: Program) -> list[str]:
    """A sentence on the arguments that are no part of the step's bytes; none on a CPU, whose memory is the host's."""
    waiting = [use for use in program.uses if use.on_host]
    if not waiting or program.memory is None or program.memory.platform == "cpu":
        return []
    names = ", ".join(dict.fromkeys(use.argument for use in waiting))
    size = format_bytes(sum(use.bytes for use in waiting))
    return [f"{size} of {names} wait in host memory. The step's bytes are without them."]


def _cross_check(program: Program) -> tuple[str, ...]:
    """Aliases by argument against the compiler's own sum, where sizes are not padded."""
    if program.memory is None or program.memory.platform == "tpu" or any(use.aliased is None for use in program.uses):
        return ()
    counted = [use for use in program.uses if use.aliased and (not use.on_host or program.memory.platform == "cpu")]
    ours, theirs = sum(use.bytes for use in counted), program.memory.alias_bytes
    if abs(ours - theirs) <= theirs // 100 + 64 * len(program.uses):
        return ()
    return (
        f"Aliased by argument adds up to {format_bytes(ours)}, the compiler's own sum is {format_bytes(theirs)}: trust the sum.",
    )


def _shared(leaves: Sequence[Any], function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        require_unshared(leaves, function)
    except DonationError as error:
        return (str(error),)
    return ()


def step_flops(step: Callable[..., Any], *args: Any, **kwargs: Any) -> FlopCount:
    """Operations of one call of a step, traced on the shapes of its arguments; nothing is run.

    What the step changes in place (NNX modules and optimizers) counts as used, like its results.
    """
    framework = framework_of([*args, *kwargs.values()])
    traceable: Any = step if framework is None or hasattr(step, "trace") else framework.jit(step)
    if hasattr(traceable, "trace"):
        return count_flops(jax_traced(traceable.trace(*args, **kwargs)).jaxpr)
    flat = flatten_program(step, args, kwargs)
    return count_flops(jax.make_jaxpr(flat.function)(*flat.leaves))
