"""The memory for which a GPU's compiler plans: beyond it XLA computes again by itself, whatever a policy keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from jaxmem_callbacks.environment.process import FRACTION
from jaxmem_callbacks.planning.compiles import CompileResults, Entry
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import platform_word
from jaxmem_callbacks.records.units import format_bytes

SLOP = "xla_gpu_memory_limit_slop_factor"
_DEFAULT_SLOP = 95  # percent, XLA's own
_NEAR = 0.95  # of the limit: what is closer may cross it with another batch or another compiler
_MOST_OF_A_GPU = 0.95  # the rest is CUDA's context, its libraries' and NCCL's


def slop_for_budget(candidate: Candidate, problem: Problem) -> int | None:
    """The slop in percent at which the compiler of a step plans its temporaries for the budget, and no more.

    Returns:
        None where the step is for no GPU, there is no budget, or its arguments and results alone are too much.
    """
    budget = problem.budget
    if platform_word(problem.platform) != "gpu" or budget.bytes is None or budget.limit_bytes is None:
        return None
    outside = _outside(candidate)
    room, whole = budget.bytes - problem.resident_bytes - outside, budget.limit_bytes - outside
    slop = math.floor(100 * room / whole) if 0 < room <= whole else 0
    return slop or None


def note_limit(results: CompileResults, best: Entry) -> None:
    """Note where a step stands at the limit for which XLA plans a GPU's memory, and which settings avoid it.

    At run time that is what JAX's allocator takes, less the arguments and results of the step, times the slop. Where temporaries
    take more, XLA computes instructions again: the step is slower, and no policy's bytes are its own.
    """
    problem, candidate = best.compiler.problem, best.candidate
    usable = problem.budget.limit_bytes
    if platform_word(problem.platform) != "gpu" or usable is None or candidate.temp_bytes is None:
        return
    slop, outside = _slop_of(candidate), _outside(candidate)
    limit = (usable - outside) * slop / 100
    temporaries = _free_of_recomputation(candidate, (entry.candidate for entry in results.entries))
    if not candidate.compiler_remat and candidate.temp_bytes <= _NEAR * limit:
        return
    crossed = bool(candidate.compiler_remat) or candidate.temp_bytes > limit
    results.note(
        f"This step {'is beyond' if crossed else 'stands at'} the limit for which XLA plans: {format_bytes(int(limit))} of "
        f"temporaries, {slop}% (the slop) of the {format_bytes(usable)} that JAX takes less {format_bytes(outside)} of arguments "
        f"and results; beyond it XLA computes instructions again by itself. {_avoiding(temporaries, outside, problem)}"
    )


def _avoiding(temporaries: int | None, outside: int, problem: Problem) -> str:
    """Which fraction and slop leave room for a step's temporaries."""
    budget = problem.budget
    if temporaries is None:
        return "How far beyond it is, a compile under a larger slop shows: search compiler options."
    room = (budget.limit_bytes or 0) - outside
    ways: list[str] = []
    if budget.device_bytes is not None:
        fraction = math.ceil(100 * (temporaries * 100 / _DEFAULT_SLOP / _NEAR + outside) / budget.device_bytes) / 100
        ways += [f"{FRACTION} of {fraction:g} or more"] if fraction <= _MOST_OF_A_GPU else []
    if temporaries <= room:
        ways.append(f"a slop of {math.ceil(100 * temporaries / room)} or more")
    if not ways:
        return f"Its {format_bytes(temporaries)} need more than the GPU has: only fewer bytes avoid it."
    return f"What avoids it, for its {format_bytes(temporaries)}: {', or '.join(ways)}."


def _outside(candidate: Candidate) -> int:
    """Bytes of arguments and results, those that share memory counted once."""
    return (candidate.argument_bytes or 0) + (candidate.output_bytes or 0) - (candidate.alias_bytes or 0)


def _slop_of(candidate: Candidate) -> int:
    options = candidate.policy.options
    given = _DEFAULT_SLOP if options is None else options.by_name.get(SLOP, _DEFAULT_SLOP)
    try:
        return int(given)
    except ValueError:  # its compiler has said so
        return _DEFAULT_SLOP


def _free_of_recomputation(candidate: Candidate, known: Iterable[Candidate]) -> int | None:
    """Temporaries of the step where the compiler computes nothing again; None where it was not compiled so."""

    def alike(each: Candidate) -> bool:
        return replace(each.policy, compiler_options=None) == replace(candidate.policy, compiler_options=None)

    sizes = [each.temp_bytes for each in (candidate, *known) if alike(each) and not each.compiler_remat]
    return min((size for size in sizes if size is not None), default=None)
