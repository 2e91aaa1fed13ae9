"""An out-of-memory failure: whether an exception is one, which program failed, and what bounds this process's memory.

A step of `jm.jit_step` is found where the exception passed through its call, which also holds the arrays of that call, and so
shows which of its compiles it was. An error that came later, when a result was waited for, is matched by the program's name, or
by the bytes that were requested: that is probable, and no proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxmem_callbacks._compat.backends import backend_exists
from jaxmem_callbacks._compat.executables import LiveProgram, programs_here
from jaxmem_callbacks.programs.reading.buffer_assignment import figures_of
from jaxmem_callbacks.programs.reading.hlo import library_bytes, parse_module
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.leaves import AbstractCall, Leaf, abstract_call, named_arguments, user_leaves
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.steps.user_jit import already_jitted
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.oom import MemoryLimit, OomFacts
from jaxmem_callbacks.records.programs import Compilation, ProgramMemory
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.records.units import KIB, format_bytes
from jaxmem_callbacks.recovery.monitor_snapshot import CallCounts
from jaxmem_callbacks.recovery.texts.parsing import read_failure

_CALLS = {JitStep.__call__.__code__, JitStep.compile_call.__code__, JitStep.lower.__code__}
_COMPILING = JitStep.compile_call.__code__  # where a step is lowered and compiled, and never run
_ALONE = "probably this one: of the programs here it takes most, and more than is left"
_AS_LARGE = "probably this one: what it takes is as large as what was asked for"
_LARGEST = "; its figures are those of its largest compile, since none for these arguments is known"
_LOOKED_AT = 16  # of the newest programs, where nothing else identifies it
_NAMED = 1000  # whose name or size is compared: a loop compiles many small ones after its step
_NEAR = 0.01  # printed sizes are rounded, and allocators round up


@dataclass(frozen=True, kw_only=True, slots=True)
class FailingProgram:
    """The program that failed. It holds a step and the arrays of its call: do not keep it.

    Attributes:
        name: Its name.
        known_by: How it was identified, in words.
        proved: Whether no other program is possible.
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


def failing_program(error: BaseException, facts: OomFacts, before: CallCounts | None = None) -> FailingProgram | None:
    """The program that an out-of-memory failure is about, or None where it is unknown.

    Args:
        error: The failure.
        facts: What its text states.
        before: Steps that were not called since are left out; None for all.
    """
    return in_traceback(error) or by_name(facts) or by_size(facts, before)


def in_traceback(error: BaseException) -> FailingProgram | None:
    """The step whose call the exception passed through, the innermost one."""
    found = [frame for frame in frames_of(error) if frame.f_code in _CALLS]
    if not found:
        return None
    inside = found[-1].f_locals
    step, args, kwargs = inside["self"], inside["args"], inside["kwargs"]
    compiling = any(frame.f_code is _COMPILING for frame in frames_of(error))
    how = "the exception passed through its " + ("compile" if compiling else "call")
    call = abstract_call(args, kwargs)
    return _of_step(step, how, call=call, arguments=(args, kwargs), compiling=compiling)


def by_name(facts: OomFacts) -> FailingProgram | None:
    """The program that the text names."""
    if facts.program is None:
        return None
    how = "the exception names it"
    name = facts.program
    named = [(step, each) for step, each in _steps() if name in (step.name, f"jit_{step.name}")]
    if named:
        every = [(step, each) for step, _ in named for each in registry.of(step)]
        requested = [
            pair for pair in every if pair[1].memory and _matches_request(pair[1].memory, facts.requested_bytes)
        ]
        step, compilation = (requested or named)[0]
        return replace(_of_step(step, how, compilation), proved=len(named) == 1)
    others = [memory for memory in _others() if memory.name == name]
    found = others[0] if others else None
    return FailingProgram(
        name=name, known_by=how, memory=found, unavailable=None if found else "the runtime lists it no longer"
    )


def by_size(facts: OomFacts, before: CallCounts | None = None) -> FailingProgram | None:
    """The program whose temporaries are what was asked for, where the exception came after its call."""
    if facts.requested_bytes is None:
        return None
    found = _first(lambda memory: _matches_request(memory, facts.requested_bytes), _AS_LARGE, before)
    return None if found is None else replace(found, proved=False)


def _matches_request(memory: ProgramMemory, requested: int | None) -> bool:
    sizes = (memory.temp_bytes, memory.total_bytes or 0, memory.assigned_bytes or 0)
    return requested is not None and any(size and abs(size - requested) <= _NEAR * requested for size in sizes)


def too_large(error: BaseException, left_bytes: int, before: CallCounts | None = None) -> FailingProgram | None:
    """The program on the CPU that takes more than is left: the one that the exception passed through, else the largest here.

    Args:
        error: The failure.
        left_bytes: What is left.
        before: Steps that were not called since are left out; None for all.
    """
    live = {program.name: program for program in programs_here(_LOOKED_AT)}
    passed = in_traceback(error)
    if passed is not None:
        live_program = live.get(f"jit_{passed.name}")
        found = replace(
            passed, library_bytes=0 if live_program is None else library_bytes(parse_module(live_program.hlo_text()))
        )
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
            largest = known or FailingProgram(name=name, known_by=_ALONE, memory=memory)
            largest = replace(largest, proved=False, library_bytes=size)
    return largest


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames that an exception passed through, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _called(step: JitStep, before: CallCounts | None) -> bool:
    return step.calls > 0 if before is None else before.called_since(step)


def _first(is_it: Callable[[ProgramMemory], bool], how: str, before: CallCounts | None) -> FailingProgram | None:
    """The largest of the steps that were called, else of the other programs, that fulfils a condition."""
    called = [step for step, _ in _steps() if _called(step, before)]
    steps = [(step, each) for step in called for each in registry.of(step) if each.memory and is_it(each.memory)]
    if steps:
        step, compilation = max(steps, key=lambda pair: pair[1].memory.temp_bytes if pair[1].memory else 0)
        return _of_step(step, how, compilation)
    registered = {f"jit_{step.name}" for step, _ in _steps()}
    others = [memory for memory in _others() if memory.name not in registered and is_it(memory)]
    if others:
        found = max(others, key=lambda memory: memory.temp_bytes)
        return FailingProgram(name=found.name, known_by=how, memory=found)
    return None


def _steps() -> list[tuple[JitStep, Compilation]]:
    return [(step, compilation) for step, compilation in registry.steps() if isinstance(step, JitStep)]


def _is_for(compilation: Compilation, leaves: Sequence[Leaf]) -> bool:
    """Whether it was compiled for arrays of these shapes: of a dtype JAX may take another one, and they may be elsewhere."""
    shapes = {path: text.partition(" ")[0].partition("[")[2] for path, text in compilation.signature}
    return all(shapes.get(leaf.path) == leaf.type_text.partition("[")[2] for leaf in leaves)


def _others() -> list[ProgramMemory]:
    """Programs that can still run, the newest first; those of registered steps too."""
    return [_memory(program) for program in programs_here(_NAMED)] if backend_exists() else []


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
) -> FailingProgram:
    known = call or step.latest_call
    given = arguments or ((known.args, known.kwargs) if known else ((), {}))
    leaves = tuple(_leaves(step, *given))
    if compilation is None:
        every = registry.of(step)
        compilation = next((each for each in every if _is_for(each, leaves)), None)
        if compilation is None and every and not compiling:
            compilation, how = every[0], how + _LARGEST
    memory = None if compilation is None or compiling else compilation.memory
    why = "its compile did not come to an end" if compiling else "its compiler reported no figures"
    return FailingProgram(
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
    """The arrays of a call by path."""
    jitted = already_jitted(step.__wrapped__)
    function = step.__wrapped__ if jitted is None else jitted.function
    if jitted is not None:
        args, kwargs = jitted.full(args, kwargs)
    for name, value in named_arguments(function, args, kwargs):
        yield from (leaf for leaf in user_leaves(name, value) if hasattr(leaf.value, "dtype"))


ADDRESS_SPACE = "address space (RLIMIT_AS)"
DATA = "data (RLIMIT_DATA)"
GROUP = "control group"
MACHINE = "the machine's memory and swap"


def host_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[MemoryLimit, ...]:
    """Every bound of host memory that is known here, the one with least left first.

    Args:
        proc: Where the kernel shows processes.
        groups: Where it shows control groups.
    """
    found = [*_of_the_process(proc), *_of_the_group(proc, groups), *_of_the_machine(proc)]
    return tuple(sorted(found, key=lambda limit: limit.left_bytes))


def device_limits(readings: Iterable[Reading]) -> tuple[MemoryLimit, ...]:
    """What the allocators of devices may use, by their own statistics."""
    return tuple(
        MemoryLimit(
            name=reading.device,
            limit_bytes=reading.limit_bytes,
            used_bytes=reading.in_use_bytes + (reading.reserved_bytes or 0),
            source="the allocator's statistics",
            largest_free_bytes=reading.largest_free_bytes,
            pool_bytes=reading.pool_bytes,
        )
        for reading in readings
        if reading.limit_bytes is not None and reading.in_use_bytes is not None
    )


def _of_the_process(proc: Path) -> Iterator[MemoryLimit]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    sizes = _kib_of(proc / "self" / "status")
    for name, kind, key in ((ADDRESS_SPACE, resource.RLIMIT_AS, "VmSize"), (DATA, resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and key in sizes:
            source = f"getrlimit, and {key} of /proc/self/status"
            yield MemoryLimit(name=name, limit_bytes=limit, used_bytes=sizes[key], source=source)


def _of_the_group(proc: Path, groups: Path) -> Iterator[MemoryLimit]:
    """The control group's bound (version 2, else 1); what it could give back without writing is not counted as used."""
    text = _text(proc / "self" / "cgroup")
    second = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    first = re.search(r"^\d+:(?:[\w,]*,)?memory(?:,[\w,]*)?:(/.*)$", text, re.MULTILINE)
    places = [
        *_around(groups, second[1] if second else "/", "memory.max", "memory.current", "inactive_file"),
        *_around(
            groups / "memory",
            first[1] if first else "/",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    yield from sorted(places, key=lambda limit: limit.left_bytes)[:1]


def _around(root: Path, path: str, most: str, used: str, spare: str) -> Iterator[MemoryLimit]:
    """The bounds of a group and of those around it; inside a container the path may begin anywhere, so the root counts too."""
    inner = root / path.strip("/")
    for folder in dict.fromkeys([inner, *[each for each in inner.parents if root in each.parents], root]):
        limit, taken = _number(folder / most), _number(folder / used)
        if limit is None or taken is None or limit >= 2**60:  # version 1 writes a number near 2**63 for none
            continue
        stat = re.search(rf"^{spare} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        held = max(taken - int(stat[1]), 0) if stat else taken
        yield MemoryLimit(name=GROUP, limit_bytes=limit, used_bytes=held, source=f"{most} and {used} of its group")


def _of_the_machine(proc: Path) -> Iterator[MemoryLimit]:
    sizes = _kib_of(proc / "meminfo")
    if {"MemTotal", "MemAvailable"} <= set(sizes):
        whole = sizes["MemTotal"] + sizes.get("SwapTotal", 0)
        left = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
        source = "MemTotal and MemAvailable, with swap, of /proc/meminfo"
        yield MemoryLimit(name=MACHINE, limit_bytes=whole, used_bytes=whole - left, source=source)


def _kib_of(path: Path) -> dict[str, int]:
    """``Name: 123 kB`` lines as bytes."""
    return {name: int(size) * KIB for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # another system, or a sandbox that hides it
        return ""


_CAUSES = 10  # `raise ... from ...` again and again
# JAX's own is a RuntimeError; of other types a name in passing is no proof.
_WORDS = 300  # characters of an error in one line
_OF_RUNTIMES = (RuntimeError, MemoryError, OSError)
# An error of the user's own function, which the runtime wraps; it has a text of its own.
_OF_A_CALLBACK = ("CpuCallback error", "Traceback (most recent call last)")


@dataclass(frozen=True, kw_only=True, slots=True)
class OomFailure:
    """An out-of-memory failure. It holds the exception and the call that failed: do not keep it.

    Attributes:
        error: The exception itself, or the one that it was raised from.
        facts: What its text states.
        evidence: Why it counts as one, in words.
        program: The program, or None where it is unknown.
        limits: Bounds of host memory now.
    """

    error: BaseException
    facts: OomFacts
    evidence: str
    program: FailingProgram | None
    limits: tuple[MemoryLimit, ...] = ()


def oom_failure(error: BaseException, before: CallCounts | None = None) -> OomFailure | None:
    """The out-of-memory failure that an exception is, or was explicitly raised from; None where it is none.

    Args:
        error: The exception.
        before: The calls of steps before the code that failed; None where nobody counted.
    """
    if not isinstance(error, Exception):
        return None
    for each in _chain(error):
        if isinstance(each, JaxmemError) or not isinstance(each, Exception):
            return None
        found = _by_text(each, before) or _by_limits(each, before)
        if found is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, members of a group, and what it was explicitly raised from."""
    waiting, left = [error], _CAUSES
    while waiting and left:
        current, left = waiting.pop(0), left - 1
        yield current
        waiting += current.exceptions[:_CAUSES] if isinstance(current, BaseExceptionGroup) else ()
        waiting += [current.__cause__] if current.__cause__ is not None else []


def _by_text(error: Exception, before: CallCounts | None) -> OomFailure | None:
    # The text alone: an error that came while another was handled is not that one's failure.
    facts, surely = read_failure(f"{type(error).__name__}: {error}")
    evidence = "its text states it"
    if facts is not None and not surely and not _is_of_a_runtime(error):
        return None
    if facts is None and isinstance(error, MemoryError):
        facts, evidence = OomFacts(phase="run", platform="host"), "it is a MemoryError"
    if facts is None:
        return None
    found = failing_program(error, facts, before)
    if found is not None and found.compiling and facts.phase is None:
        facts = replace(facts, phase="compile")
    return OomFailure(error=error, facts=facts, evidence=evidence, program=found, limits=host_limits())


def _is_of_a_runtime(error: Exception) -> bool:
    of_a_callback = isinstance(error, jax.errors.JaxRuntimeError) and any(each in str(error) for each in _OF_A_CALLBACK)
    return isinstance(error, _OF_RUNTIMES) and not of_a_callback


def _by_limits(error: Exception, before: CallCounts | None) -> OomFailure | None:
    """An INTERNAL error on the CPU is one where the program takes more than some bound leaves."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or not text.lstrip().startswith("INTERNAL"):
        return None
    if not _is_of_a_runtime(error):
        return None
    limits = host_limits()
    tightest = min(limits, key=_bound, default=None)
    if tightest is None:
        return None
    found = too_large(error, _bound(tightest), before)
    own = None if found is None else found.own_bytes
    if found is None or found.memory is None or found.memory.platform != "cpu":
        return None
    library = ""
    if found.library_bytes:
        library = (
            f", {format_bytes(found.library_bytes)} of them in a kernel library that XLA's compiler does not count"
        )
    evidence = (
        f"its text is only {text.strip().splitlines()[0]!r}, but {found.name} takes {format_bytes(own)} besides its "
        f"arguments{library}, and {format_bytes(tightest.left_bytes)} of {format_bytes(tightest.limit_bytes)} are left of the "
        f"{tightest.name.removeprefix('the ')}"
    )
    facts = OomFacts(phase="run", platform="cpu")
    return OomFailure(error=error, facts=facts, evidence=evidence, program=found, limits=limits)


def _bound(limit: MemoryLimit) -> int:
    """What an allocation must exceed to be refused: a machine lends more than is left, and refuses only more than it has."""
    return limit.limit_bytes if limit.name == MACHINE else limit.left_bytes


def oom_facts(error: BaseException) -> OomFacts | None:
    """The facts that an out-of-memory exception states, or None for any other. It keeps nothing of the call."""
    failure = oom_failure(error)
    return None if failure is None else failure.facts


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_WORDS]
