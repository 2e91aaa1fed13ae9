"""Candidate compiler options of a step: what was compiled without them, once more with options that move bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax

from jaxmem_callbacks._compat.jit_settings import compiler_options_of
from jaxmem_callbacks.planning.choice import bytes_or_inf, chosen, cost, has_options
from jaxmem_callbacks.planning.compile_limit import SLOP, slop_for_budget
from jaxmem_callbacks.planning.compiles import CompileQueue, Entry
from jaxmem_callbacks.planning.problem import ParsedRequest, Problem, own_jit
from jaxmem_callbacks.planning.request import Space
from jaxmem_callbacks.programs.steps.program import flags_now
from jaxmem_callbacks.records.policies import CompilerOptions, OptionValue, StepPolicy, jax_line, platform_word

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
# What may be left of a step's temporaries until options were tried on it: less than any family of that table has.
_OPTIMISTIC = 0.3
# What other options leave, as a part of what the first that were tried left: in no family less.
_LESS = 0.95


def known_options(platform: str, devices: int) -> tuple[Row, ...]:
    """The options that ``"compiler_options": True`` tries on a platform; empty where none is known to save bytes.

    On one GPU there are no collectives, and only the slop is left, which depends on the step and its budget.
    """
    if devices == 1 and platform_word(platform) == "gpu":
        return ()
    return _KNOWN.get((platform_word(platform), jax_line(jax.__version__)), ())


def most_of_options(space: Space) -> int:
    """Compiles that are set aside for options; none where the largest batch is searched, which they are not tried on."""
    if space.batch is not None:
        return 0
    return _MOST if space.compiler_options == "all" else min(len(space.compiler_options), 2 * _MOST)


def try_options(parsed: ParsedRequest, queue: CompileQueue) -> None:
    """Compile steps again with other compiler options: first what costs least, of what may fit.

    Args:
        parsed: The request; without a budget what needs fewest bytes is tried under all options.
        queue: Compiles them. Options are tried on what it has compiled.
    """
    if parsed.space.batch is not None:
        queue.results.note("Compiler options were not tried: the largest batch is searched without them.")
        return
    queue, before = queue.at_most(most_of_options(parsed.space)), len(queue.results.known)
    while queue.remaining and (one := _next(parsed, queue)) is not None:
        entry, policy = one
        queue.compile([(entry.compiler, policy)])
    platform = platform_word(parsed.problem.platform)
    if len(queue.results.known) == before and not known_options(platform, parsed.problem.device_count):
        queue.results.note(
            f"Compiler options were not tried: none is known that saves bytes on {platform} by jax {jax_line(jax.__version__)}."
        )


def _next(parsed: ParsedRequest, queue: CompileQueue) -> _Try | None:
    """What to compile next; None where nothing that is left can be better than what is known."""
    entries = queue.results.entries
    bases = [each for each in entries if not has_options(each) and each.candidate.temp_bytes is not None]
    left = [
        one
        for entry in bases
        for one in _tries(entry, parsed.space)
        if (one[0].compiler, one[1]) not in queue.results.known
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


def _tries(entry: Entry, space: Space) -> list[_Try]:
    """A step under each set of options that changes something of it."""
    policy, problem = entry.candidate.policy, entry.compiler.problem
    own, here = _users(problem), {} if policy.options is None else policy.options.by_name
    rows: Sequence[Row] = _known_for(entry) if space.compiler_options == "all" else space.compiler_options
    found: list[_Try] = []
    for row in rows:
        new = {name: value for name, value in row.items() if name not in own}
        if new:  # what the user has set stays
            options = CompilerOptions(
                platform=platform_word(problem.platform),
                jax=jax_line(jax.__version__),
                values=tuple(sorted({**here, **new}.items())),
            )
            found.append((entry, replace(policy, compiler_options=options)))
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
    left = parts.get(True, parts.get(False, _OPTIMISTIC / _LESS) * _LESS)
    return (base.need_bytes or 0) - (1 - left) * (base.temp_bytes or 0)
