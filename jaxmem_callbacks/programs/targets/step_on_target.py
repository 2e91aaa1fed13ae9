"""A step as a target's compiler answers for it, argument by argument.

The step is traced here under its policy and handed over as a function of arrays only, so that NNX objects, static
arguments and the user's own jit go the same way as plain trees.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun

from jaxmem_callbacks.programs.reading.buffers import Argument
from jaxmem_callbacks.programs.reading.hlo import Module
from jaxmem_callbacks.programs.steps.donation import LeafUse, unread
from jaxmem_callbacks.programs.steps.leaves import Leaf, abstract, state_arguments
from jaxmem_callbacks.programs.steps.program import Traced, argument_buffers, without_donation_warning
from jaxmem_callbacks.programs.targets.compile import (
    Compiling,
    TargetCompilation,
    lower_for_target,
    refuse_devices_apart,
    refuse_unknown_option,
    refused_for_memory,
)
from jaxmem_callbacks.programs.targets.exporting import without_reports
from jaxmem_callbacks.programs.targets.target import Target, resolve_target
from jaxmem_callbacks.records.errors import CompileError, JaxmemError
from jaxmem_callbacks.records.peaks import REFUSED, Peak, peak_of, with_total
from jaxmem_callbacks.records.source_files import Owner, is_installed, owner_of
from jaxmem_callbacks.transforms.arg_roles import OTHER, STATE

_UNSEEN = "the compiler refused the program before it placed its buffers"
# Of the device's own memory: a kernel that asks for too much of a chip's small ones takes no less under another policy.
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED.*out of memory(?! in memory space (?!hbm))", re.IGNORECASE | re.DOTALL)
_TEXT_LIMIT = 3000


def compile_step_for(
    traced: Traced, name: str, target: str
) -> tuple[TargetCompilation, tuple[LeafUse, ...], Callable[[], Peak]]:
    """Compile a traced step for hardware that need not be there.

    Returns:
        The compiler's answer, what becomes of each array, and a function that finds what makes the peak with its source
        lines, and compiles once more for that.
    """
    answer = lower_traced_for(traced, name, target)()
    uses = _uses(traced, answer.module)
    # What may be asked later holds no array of the caller's.
    by_shapes = traced._replace(leaves=[replace(leaf, value=abstract(leaf.value)) for leaf in traced.leaves])

    def peak() -> Peak:
        found = lower_traced_for(by_shapes, name, target, want_buffers=True)().peak
        assert found is not None  # a program that is refused has no memory, and nobody gets this far with it
        return found

    return answer, uses, peak


def described(leaves: Sequence[Leaf], updated: Sequence[str] = ()) -> tuple[Argument, ...]:
    """What each array of a call holds. What is updated and has no better word is state."""
    changing = state_arguments(leaves, updated)
    return tuple(
        Argument(
            path=leaf.path,
            kind=STATE if leaf.kind == OTHER and leaf.argument in changing else leaf.kind,
            elements=math.prod(leaf.shape),
        )
        for leaf in leaves
    )


def refused_peak(traced: Traced, needed_bytes: int | None) -> Peak | None:
    """What is known of the peak of a step that its compiler refused: its arguments, and how much the rest is.

    Args:
        traced: The step.
        needed_bytes: What it needs by the refusal; None, and there is no peak to report, where that has no figure.
    """
    if needed_bytes is None:
        return None
    held = argument_buffers(traced.leaves, _uses(traced, None), traced.undonated)
    return with_total(peak_of(held, basis=REFUSED), needed_bytes, _UNSEEN)


def lower_traced_for(  # noqa: PLR0913 - the compile's own options
    traced: Traced,
    name: str,
    target: str | Target,
    *,
    donate: Sequence[str] = (),
    want_buffers: bool = False,
    need_lines: bool = True,
    timeout_s: float | None = None,
) -> Compiling:
    """Lower a traced step for hardware that need not be there, in the calling thread.

    Args:
        traced: The step.
        name: What it is called.
        target: The hardware.
        donate: Arguments that are donated besides those that the step donates.
        want_buffers: Also find what makes the peak.
        need_lines: Whether a peak from the disk cache without source lines is no use.
        timeout_s: Seconds after which the compiler is ended; None for the setting of the process.

    Returns:
        The compile that is left to do, in any thread. Of a program that is refused it returns what is known of the peak.

    Raises:
        PolicyError: the policy's compiler options are for other hardware or another JAX.
    """
    if traced.compiled_with is not None:
        platform = (resolve_target(target) if isinstance(target, str) else target).platform
        traced.compiled_with.refuse_elsewhere(platform, jax.__version__)
    compiling = lower_for_target(
        _flat_function(traced.jaxpr, name),
        [_abstract(leaf) for leaf in traced.leaves],
        target=target,
        donate_argnums=_donated(traced, donate),
        out_shardings=_pinned_results(traced),
        compiler_options=traced.compiler_options,
        want_buffers=want_buffers,
        need_lines=need_lines,
        timeout_s=timeout_s,
        arguments=described(traced.leaves, traced.undonated),
    )

    def compiled() -> TargetCompilation:
        answer = compiling()
        return answer if answer.memory is not None else replace(answer, peak=refused_peak(traced, answer.needed_bytes))

    return compiled


class MemoryRefusalError(CompileError):
    """The attached devices' compiler refused a program for its memory. For whoever compiled it; no user sees one.

    Attributes:
        words: The compiler's own.
        needed_bytes: What the program needs on one device, where they have it.
    """

    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{_title(name)}: the compiler refused the program for its memory.\n{words[:_TEXT_LIMIT]}")
        self.words = words
        self.needed_bytes = refused_for_memory(name, words)[0]


@contextmanager
def compiling_here(name: str, *, traces: bool = False) -> Generator[None]:
    """Where a program is lowered or compiled for the devices of this process: what they refuse is an error of this library.

    Args:
        name: What the program is called.
        traces: Whether it is traced there too: what its own code raises then stays as it is.

    Raises:
        MemoryRefusalError: the program takes more memory than there is.
        CompileError: it has something that they, or JAX for them, cannot compile; the message holds their words.
    """
    try:
        yield
    except JaxmemError:
        raise
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        words = str(error)
        refuse_unknown_option(_title(name), words)
        refuse_devices_apart(name, words)
        if _OUT_OF_MEMORY.search(words):
            raise MemoryRefusalError(name, words) from error
        if traces and _is_of_step(error):
            raise
        why = (
            "Expected arguments placed as its jit says. Find in the words below which one is not, and place it so; "
            if isinstance(error, ValueError)
            else "Expected operations that these devices have. Find in the words below which one they do not, and leave it out "
            "or replace it; "
        )
        msg = (
            f"{_title(name)}: the program was traced and cannot be compiled. {why}JAX's own compile of the step "
            f"shows the same error.\n{words[:_TEXT_LIMIT]}"
        )
        raise CompileError(msg) from error


def _is_of_step(error: Exception) -> bool:
    """Whether the step's own code raised it, or what that calls: JAX lowers and compiles without such code."""
    inside = str(Path(jax.__file__ or "").parent)
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    others = {file for file in files if not file.startswith(inside)}
    return any(owner_of(file) is Owner.USER or is_installed(file) for file in others)


def _title(name: str) -> str:
    return f"{name} for the attached {jax.default_backend()}"


def compile_traced_here(traced: Traced, name: str, *, donate: Sequence[str] = ()) -> jax.stages.Compiled:
    """The same for the devices of this process; to be called on the mesh of the step, where it has one.

    Raises:
        MemoryRefusalError, CompileError: as in `compiling_here`.
    """
    if traced.compiled_with is not None:
        traced.compiled_with.refuse_elsewhere(jax.default_backend(), jax.__version__)
    pinned = _pinned_results(traced)
    out: dict[str, Any] = {} if pinned is None else {"out_shardings": pinned}
    jitted = jax.jit(_flat_function(traced.jaxpr, name), donate_argnums=_donated(traced, donate), **out)
    with without_donation_warning(), compiling_here(name):
        lowered = jitted.lower(*(_abstract(leaf) for leaf in traced.leaves))
        return lowered.compile(compiler_options=dict(traced.compiler_options) or None)


def _donated(traced: Traced, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, leaf in enumerate(traced.leaves) if leaf.donated or leaf.argument in names)


def _pinned_results(traced: Traced) -> list[Any] | None:
    results = [_portable(sharding) for sharding in traced.out_shardings]
    return results if any(sharding is not None for sharding in results) else None


def _flat_function(jaxpr: Any, name: str) -> Callable[..., Any]:
    function = jaxpr_as_fun(jaxpr)

    def step(*leaves: Any) -> Any:
        return function(*leaves)

    step.__name__ = name
    return step


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_portable(getattr(leaf.value, "sharding", None)))


def _portable(sharding: Any) -> Any:
    """A sharding that means the same on other devices, else None."""
    of_one = isinstance(sharding, jax.sharding.SingleDeviceSharding) and sharding.memory_kind == "pinned_host"
    return sharding if of_one or isinstance(sharding, jax.sharding.NamedSharding) else None


def taken_inputs(jaxpr: Any) -> list[bool]:
    """Which inputs the step's results need; JAX drops the others from the program."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return [v in needed for v in jaxpr.invars]


def _uses(traced: Traced, module: Module | None) -> tuple[LeafUse, ...]:
    """What the target's program does with each array; which are reused is unknown where JAX dropped yet others of them."""
    taken = taken_inputs(without_reports(traced.jaxpr)[0])
    count, aliases = (0, {}) if module is None else (module.parameter_count, module.aliases)
    known = count == sum(taken)
    numbers = iter(range(count))
    uses: list[LeafUse] = []
    for leaf, is_taken in zip(traced.leaves, taken, strict=True):
        aliased = (is_taken and next(numbers) in aliases) if known else None
        uses.append(
            replace(
                unread(leaf, getattr(leaf.value, "sharding", None)),
                used=is_taken,
                aliased=aliased,
                lost=_lost(leaf, is_taken) if aliased is False else None,
            )
        )
    return tuple(uses)


def _lost(leaf: Leaf, is_taken: bool) -> str | None:  # noqa: FBT001 - one fact
    """Why an array is donated in vain; None where nobody donated it."""
    if not leaf.donated:
        return None
    return "this target's compiler reuses it for no result" if is_taken else "the step never uses it"
