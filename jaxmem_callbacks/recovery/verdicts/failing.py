"""The program that failed: its step, its call and its compiler's figures, from an exception.

A step of `jm.jit_step` is found where the exception passed through its call, which also tells the arrays of that call, and so
which of its compiles it was. An error that came later, when a result was waited for, is told by the program's name, or by the
bytes that were asked for: that is probable, and no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import jax

from jaxmem_callbacks._compat.backends import backend_exists
from jaxmem_callbacks._compat.executables import LiveProgram, programs_here
from jaxmem_callbacks.programs.reading.buffer_assignment import figures_of
from jaxmem_callbacks.programs.reading.hlo import parse_module
from jaxmem_callbacks.programs.reading.hlo_costs import library_bytes
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.call import AbstractCall, abstract_call
from jaxmem_callbacks.programs.steps.leaves import Leaf, named_arguments, user_leaves
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.steps.user_jit import already_jitted
from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.recovery.witness import CallsBefore

_CALLS = {JitStep.__call__.__code__, JitStep.judge.__code__, JitStep.lower.__code__}
_COMPILING = "JitStep._judged"  # where a step is lowered and compiled, and never run
_ALONE = "probably this one: of the programs here it takes most, and more than is left"
_AS_LARGE = "probably this one: what it takes is as large as what was asked for"
_LARGEST = "; its figures are those of its largest compile, since none for these arguments is known"
_LOOKED_AT = 16  # of the newest programs, when nothing else tells which it was
_NEAR = 0.01  # printed sizes are rounded, and allocators round up


@dataclass(frozen=True, kw_only=True, slots=True)
class Failing:
    """The program that failed. Holds a step, and of its call the arrays: not to be kept.

    Attributes:
        name: Its name.
        known_by: How it was told from others, in words.
        proved: Whether that leaves no other program.
        memory: What it needs by its compiler, or None with the reason in ``unavailable``.
        unavailable: Why there are no figures.
        step: The step, where it is one of `jm.jit_step`.
        call: Its arguments by their shapes, to compile it again.
        leaves: The arguments' arrays with their paths; by their shapes where the call itself is not known.
        is_call: Whether ``leaves`` are the arrays of the very call that failed.
        compiling: Whether it failed before it ran.
        library_bytes: The largest value that a kernel library makes by itself, which its compiler does not count.
    """

    name: str
    known_by: str
    proved: bool = True
    memory: ProgramMemory | None = None
    unavailable: str | None = None
    step: JitStep | None = None
    call: AbstractCall | None = None
    leaves: tuple[Leaf, ...] = field(default=(), repr=False)
    is_call: bool = False
    compiling: bool = False
    library_bytes: int = 0

    @property
    def own_bytes(self) -> int | None:
        """What it takes besides its arguments: temporaries, results in memory of their own, and what a library makes."""
        return None if self.memory is None else _own(self.memory) + self.library_bytes


def failing_program(error: BaseException, facts: OomFacts, before: CallsBefore | None = None) -> Failing | None:
    """The program that an out-of-memory failure is about, or None where nothing tells.

    Args:
        error: The failure.
        facts: What its text says.
        before: Steps that were not called since are not asked about; None for all.
    """
    return in_traceback(error) or by_name(facts) or by_size(facts, before)


def in_traceback(error: BaseException) -> Failing | None:
    """The step whose call the exception passed through, the innermost one."""
    found = [frame for frame in frames_of(error) if frame.f_code in _CALLS]
    if not found:
        return None
    inside = found[-1].f_locals
    step, args, kwargs = inside["self"], inside["args"], inside["kwargs"]
    compiling = any(frame.f_code.co_qualname == _COMPILING for frame in frames_of(error))
    how = "the exception passed through its " + ("compile" if compiling else "call")
    call = abstract_call(args, kwargs)
    return _of_step(step, how, call=call, arguments=(args, kwargs), compiling=compiling)


def by_name(facts: OomFacts) -> Failing | None:
    """The program that the text names."""
    if facts.program is None:
        return None
    how = "the exception names it"
    name = facts.program
    named = [(step, each) for step, each in _steps() if name in (step.name, f"jit_{step.name}")]
    if named:
        every = [(step, each) for step, _ in named for each in registry.of(step)]
        asked = [pair for pair in every if pair[1].memory and _is_asked(pair[1].memory, facts.requested_bytes)]
        step, compilation = (asked or named)[0]
        return replace(_of_step(step, how, compilation), proved=len(named) == 1)
    others = [memory for memory in _others() if memory.name == name]
    found = others[0] if others else None
    return Failing(
        name=name, known_by=how, memory=found, unavailable=None if found else "the runtime lists it no longer"
    )


def by_size(facts: OomFacts, before: CallsBefore | None = None) -> Failing | None:
    """The program whose temporaries are what was asked for, where the exception came after its call."""
    if facts.requested_bytes is None:
        return None
    found = _first(lambda memory: _is_asked(memory, facts.requested_bytes), _AS_LARGE, before)
    return None if found is None else replace(found, proved=False)


def _is_asked(memory: ProgramMemory, asked: int | None) -> bool:
    sizes = (memory.temp_bytes, memory.total_bytes or 0, memory.assigned_bytes or 0)
    return asked is not None and any(size and abs(size - asked) <= _NEAR * asked for size in sizes)


def too_large(error: BaseException, left_bytes: int, before: CallsBefore | None = None) -> Failing | None:
    """The program on the CPU that takes more than is left: the one that the exception passed through, else the largest here.

    Args:
        error: The failure.
        left_bytes: What is left.
        before: Steps that were not called since are not asked about; None for all.
    """
    live = {program.name: program for program in programs_here(_LOOKED_AT)}
    passed = in_traceback(error)
    if passed is not None:
        there = live.get(f"jit_{passed.name}")
        found = replace(passed, library_bytes=0 if there is None else library_bytes(parse_module(there.hlo_text())))
        return found if (found.own_bytes or 0) > left_bytes else None
    named = {f"jit_{step.name}": (step, compilation) for step, compilation in _steps()}
    largest, most = None, left_bytes
    for name, program in live.items():
        if name in named and not _called(named[name][0], before):
            continue
        memory = _memory(program)
        size = library_bytes(parse_module(program.hlo_text()))
        if memory.platform == "cpu" and _own(memory) + size > most:
            most = _own(memory) + size
            known = _of_step(named[name][0], _ALONE, named[name][1]) if name in named else None
            largest = known or Failing(name=name, known_by=_ALONE, memory=memory)
            largest = replace(largest, proved=False, library_bytes=size)
    return largest


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames that an exception passed through, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _called(step: JitStep, before: CallsBefore | None) -> bool:
    return step.calls > 0 if before is None else before.called_since(step)


def _first(is_it: Callable[[ProgramMemory], bool], how: str, before: CallsBefore | None) -> Failing | None:
    """The largest of the steps that were called, else of the other programs, for which something holds."""
    called = [step for step, _ in _steps() if _called(step, before)]
    steps = [(step, each) for step in called for each in registry.of(step) if each.memory and is_it(each.memory)]
    if steps:
        step, compilation = max(steps, key=lambda pair: pair[1].memory.temp_bytes if pair[1].memory else 0)
        return _of_step(step, how, compilation)
    registered = {f"jit_{step.name}" for step, _ in _steps()}
    others = [memory for memory in _others() if memory.name not in registered and is_it(memory)]
    if others:
        found = max(others, key=lambda memory: memory.temp_bytes)
        return Failing(name=found.name, known_by=how, memory=found)
    return None


def _steps() -> list[tuple[JitStep, Compilation]]:
    return [(step, compilation) for step, compilation in registry.steps() if isinstance(step, JitStep)]


def _is_for(compilation: Compilation, leaves: Sequence[Leaf]) -> bool:
    """Whether it was compiled for arrays of these shapes: of a dtype JAX may take another one, and they may lie elsewhere."""
    shapes = {path: text.partition(" ")[0].partition("[")[2] for path, text in compilation.signature}
    return all(shapes.get(leaf.path) == leaf.type_text.partition("[")[2] for leaf in leaves)


def _others() -> list[ProgramMemory]:
    """Programs that can still run, the newest first; those of registered steps too."""
    return [_memory(program) for program in programs_here()] if backend_exists() else []


def _memory(program: LiveProgram) -> ProgramMemory:
    platform = jax.local_devices()[0].platform
    figures: Any = figures_of(program.statistics, platform)
    return ProgramMemory(name=program.name, platform=platform, target="attached", **figures)


def _own(memory: ProgramMemory) -> int:
    """Temporaries, and results in memory of their own."""
    return memory.temp_bytes + max(memory.output_bytes - memory.alias_bytes, 0)


def _of_step(  # noqa: PLR0913 - what is known of the call, each once
    step: JitStep,
    how: str,
    compilation: Compilation | None = None,
    *,
    call: AbstractCall | None = None,
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    compiling: bool = False,
) -> Failing:
    known = call or step.latest_call
    given = arguments or ((known.args, known.kwargs) if known else ((), {}))
    leaves = tuple(_leaves(step, *given))
    if compilation is None:
        every = registry.of(step)
        compilation = next((each for each in every if _is_for(each, leaves)), None)
        if compilation is None and every and not compiling:
            compilation, how = every[0], how + _LARGEST
    memory = None if compilation is None or compiling else compilation.memory
    why = "its compile did not come to an end" if compiling else "its compiler told no figures"
    return Failing(
        name=step.name,
        known_by=how,
        memory=memory,
        unavailable=None if memory else why,
        step=step,
        call=known,
        leaves=leaves,
        is_call=arguments is not None,
        compiling=compiling,
    )


def _leaves(step: JitStep, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Leaf]:
    """The arrays of a call by path; what is no array has no bytes worth telling."""
    jitted = already_jitted(step.__wrapped__)
    function = step.__wrapped__ if jitted is None else jitted.function
    if jitted is not None:
        args, kwargs = jitted.full(args, kwargs)
    for name, value in named_arguments(function, args, kwargs):
        yield from (leaf for leaf in user_leaves(name, value) if hasattr(leaf.value, "dtype"))
