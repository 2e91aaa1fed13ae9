"""Candidate compiler options of a step: what was compiled without them, once more with options that move bytes.

One of them is the slop: the part of a GPU's memory for which its compiler plans. Beyond it XLA computes again by itself, whatever
a policy keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax

from jaxmem_callbacks._compat.jit_settings import compiler_options_of
from jaxmem_callbacks.environment.process import FRACTION
from jaxmem_callbacks.planning.choice import bytes_or_inf, chosen, cost
from jaxmem_callbacks.planning.compiles import CompileQueue, CompileResults, Entry
from jaxmem_callbacks.planning.problem import ParsedRequest, Problem, own_jit
from jaxmem_callbacks.planning.request import MOST_OF_A_GPU, Space
from jaxmem_callbacks.programs.steps.program import flags_now
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import (
    CompilerOptions,
    OptionValue,
    StepPolicy,
    jax_line,
    platform_word,
    policy_words,
)
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.transforms.costs import NOTABLE

Row: TypeAlias = Mapping[str, OptionValue]
_Try: TypeAlias = tuple[Entry, StepPolicy]

_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
_FENCING = "xla_gpu_experimental_scheduler_memory_fencing"
# Collectives as the step has them: joined ones hold what all of them bring until the last of it is used.
_APART = {f"xla_gpu_{each}_combine_threshold_bytes": 0 for each in ("all_gather", "all_reduce", "reduce_scatter")}
# Platform and JAX line -> what moved bytes in results/compiler_options_*.json, the row of most effect first. Before 0.12 XLA does
# not order GPU programs by the latency of their collectives, and these options change nothing there.
_KNOWN: dict[tuple[str, str], tuple[Row, ...]] = {
    ("gpu", "0.12"): (
        {_HIDING: False, **_APART},
        {f"{_FENCING}_threshold_bytes": 2**20, f"{_FENCING}_slack_windows": 0},
        _APART,
        {_HIDING: False},
    ),
    ("cpu", "0.10"): ({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},),
    ("cpu", "0.12"): ({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},),
}
_MOST = 4  # compiles of those that are known
SLOP = "xla_gpu_memory_limit_slop_factor"
_DEFAULT_SLOP = 95  # percent, XLA's own
_NEAR = 1 - NOTABLE  # of the limit: what is closer may cross it with another batch or another compiler


def known_options(platform: str, devices: int) -> tuple[Row, ...]:
    """The options that ``"compiler_options": True`` tries on a platform; empty where none is known to save bytes.

    On one GPU there are no collectives, and only the slop is left, which depends on the step and its budget.
    """
    if devices == 1 and platform_word(platform) == "gpu":
        return ()
    return _KNOWN.get((platform_word(platform), jax_line(jax.__version__)), ())


def most_of_options(space: Space) -> int:
    """Compiles that are set aside for options."""
    return _MOST if space.compiler_options == "all" else min(len(space.compiler_options), 2 * _MOST)


def try_options(parsed: ParsedRequest, queue: CompileQueue) -> None:
    """Compile steps again with other compiler options: first what costs least, of what may fit.

    Args:
        parsed: The request; without a budget what needs fewest bytes is tried under all options.
        queue: Compiles them. Options are tried on what it has compiled.
    """
    queue, before = queue.at_most(most_of_options(parsed.space)), len(queue.results.known)
    while queue.remaining and (one := _next(parsed, queue)) is not None:
        entry, policy = one
        queue.compile([(entry.compiler, policy)])
    if len(queue.results.known) == before:
        note_none_known(parsed.problem, queue.results)
    if parsed.space.compiler_options == "all":
        _drop_larger(queue.results)


def _drop_larger(results: CompileResults) -> None:
    """Leave no step that options of this library's choice make no smaller; what was tried is noted with both figures."""
    for entry in [each for each in results.entries if each.has_options]:
        policy, needs = replace(entry.candidate.policy, compiler_options=None), bytes_or_inf(entry.candidate)
        without = [
            each.candidate
            for each in results.entries
            if each.compiler is entry.compiler
            and not each.has_options
            and replace(each.candidate.policy, compiler_options=None) == policy
        ]
        options = entry.candidate.policy.options
        if options is None or not without or needs < bytes_or_inf(without[0]):
            continue
        results.entries.remove(entry)
        if needs < math.inf and without[0].step_bytes is not None:
            results.note(
                f"{options.words} does not make the step under {policy_words(policy)} smaller: "
                f"{format_bytes(int(needs))} with it and {format_bytes(without[0].step_bytes)} without, both compiled."
            )


def note_none_known(problem: Problem, results: CompileResults) -> None:
    """Note where no option is known that saves bytes."""
    platform = platform_word(problem.platform)
    if not known_options(platform, problem.device_count):
        results.note(
            f"Compiler options were not tried: none is known that saves bytes on {platform} by jax {jax_line(jax.__version__)}."
        )


def _next(parsed: ParsedRequest, queue: CompileQueue) -> _Try | None:
    """What to compile next; None where nothing that is left can be better than what is known."""
    entries = queue.results.entries
    bases = [each for each in entries if not each.has_options and each.candidate.temp_bytes is not None]
    left = [
        (entry, policy)
        for entry in bases
        for policy in policies_with_options(entry, parsed.space)
        if (entry.compiler, policy) not in queue.results.known
    ]
    limit, best = parsed.problem.budget.bytes, chosen(entries)[0].candidate
    if limit is None or parsed.is_open:
        least = min(bases, key=lambda each: bytes_or_inf(each.candidate), default=None)
        return next((one for one in left if one[0] is least), None)

    def needs(one: _Try) -> float:
        return _foreseen(one, entries)

    def price(one: _Try) -> tuple[float, float]:
        return cost(one[0].candidate), needs(one)

    fitting = [one for one in left if needs(one) <= limit]
    if best.fits:  # options take nothing from the cost of a step
        return min((one for one in fitting if cost(one[0].candidate) < cost(best)), key=price, default=None)
    return min(fitting, key=price, default=None) or min(left, key=needs, default=None)


def policies_with_options(entry: Entry, space: Space) -> list[StepPolicy]:
    """The policy of a step with each set of options that changes something of it."""
    policy, problem = entry.candidate.policy, entry.compiler.problem
    own, here = _users(problem), {} if policy.options is None else policy.options.by_name
    rows: Sequence[Row] = _known_for(entry) if space.compiler_options == "all" else space.compiler_options
    found: list[StepPolicy] = []
    for row in rows:
        new = {name: value for name, value in row.items() if name not in own}
        if new:  # what the user has set stays
            options = CompilerOptions(
                platform=platform_word(problem.platform),
                jax=jax_line(jax.__version__),
                values=tuple(sorted({**here, **new}.items())),
            )
            found.append(replace(policy, compiler_options=options))
    return found


def _known_for(entry: Entry) -> tuple[Row, ...]:
    """The known options for a step: on a GPU also the slop at which the compiler plans for the budget."""
    problem = entry.compiler.problem
    slop = slop_for_budget(entry.candidate, problem)
    return (*known_options(problem.platform, problem.device_count), *([] if slop is None else [{SLOP: slop}]))


def _users(problem: Problem) -> set[str]:
    """Names of the options that the user has set: in his own jit, in the step's policy and in the environment."""
    own, policy = own_jit(problem.train_step), problem.base.options
    given = set() if own is None else set(compiler_options_of(own.lowering))
    return given | set(() if policy is None else policy.by_name) | set(flags_now())


def _foreseen(one: _Try, entries: Sequence[Entry]) -> float:
    """Bytes that a step may need under some options: of its temporaries as large a part as the options left of another step's."""
    base, options = one[0].candidate, one[1].options
    known = {each.candidate.policy: each.candidate.temp_bytes for each in entries if each.compiler is one[0].compiler}
    parts: dict[bool, float] = {}  # whether of these options -> the least part that any left
    for policy, temporaries in known.items():
        before = known.get(replace(policy, compiler_options=base.policy.compiler_options))
        if policy.options != base.policy.options and temporaries is not None and before:
            is_same = policy.options == options
            parts[is_same] = min(parts.get(is_same, math.inf), temporaries / before)
    # Until options were tried on the step all of its temporaries may go; others then leave about as much as those that were.
    left = parts.get(True, (1 - NOTABLE) * parts.get(False, 0.0))
    return (base.need_bytes or 0) - (1 - left) * (base.temp_bytes or 0)


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
        ways += [f"{FRACTION} of {fraction:g} or more"] if fraction <= MOST_OF_A_GPU else []
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
