"""Candidates whose optimizer state waits in host memory: what was compiled without, once more with it there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxmem_callbacks.planning.choice import bytes_or_inf, chosen, cost
from jaxmem_callbacks.planning.compiles import CompileQueue, Compiler, Entry
from jaxmem_callbacks.planning.problem import ParsedRequest, Problem
from jaxmem_callbacks.planning.step_time import host_bytes
from jaxmem_callbacks.programs.steps.program import flags_now
from jaxmem_callbacks.programs.steps.step import place_state
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import CompilerOptions, StepPolicy, jax_line, platform_word
from jaxmem_callbacks.records.units import format_bytes

#: Compiles with the state on the host in one plan: two policies, each under two sets of options.
MOST_OF_STATE = 4
# A TPU's scheduler that hides latency brings all of the state at the beginning of the step. Without it, or where it may use next
# to no memory, the arrays come one by one: which of the two saves more depends on the step (results/state_offload_*.json).
_SCHEDULER = "xla_tpu_enable_latency_hiding_scheduler"
#: Platform -> sets of compiler options under which the state is tried on the host.
OPTIONS: dict[str, tuple[dict[str, bool | int], ...]] = {
    "tpu": ({_SCHEDULER: False}, {"xla_tpu_scheduler_percent_shared_memory_limit": 1}),
}


def on_host(problem: Problem) -> Problem:
    """The same problem, with the optimizer's state on the host.

    Raises:
        PolicyError: the step has no optimizer state that can be moved.
    """
    step = problem.step(problem.base)
    args, kwargs = jax.tree.map(_shape, (problem.args, dict(problem.kwargs)))
    with problem.in_mesh():
        values = place_state(step, *args, **kwargs)
    base = replace(problem.base, state_offload="optimizer")
    return replace(
        problem,
        args=values[: len(args)],
        kwargs=dict(zip(sorted(kwargs), values[len(args) :], strict=True)),
        base=base,
        plain=None,
    )


def _shape(leaf: Any) -> Any:
    """An array as its shape and place; the step is only traced."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _options(problem: Problem) -> list[CompilerOptions | None]:
    """The options of the problem's policy, with each set that saves; several devices keep the scheduler."""
    own, platform = problem.base.options, platform_word(problem.platform)
    here = {} if own is None else own.by_name
    sets = [
        each
        for each in OPTIONS.get(platform, ())
        if not each.keys() & (here.keys() | flags_now().keys())
        and (problem.device_count == 1 or _SCHEDULER not in each)
    ]
    line = jax_line(jax.__version__)
    made = [
        CompilerOptions(platform=platform, jax=line, values=tuple(sorted({**here, **each}.items()))) for each in sets
    ]
    return [*made] or [own]


def try_state_on_host(parsed: ParsedRequest, queue: CompileQueue) -> None:
    """Compile what was chosen, and what computes nothing again, with the optimizer's state on the host.

    Args:
        parsed: The request.
        queue: Compiles them. What does not need fewer bytes so is no candidate.
    """
    queue = queue.at_most(MOST_OF_STATE)
    if parsed.space.batch is not None:
        queue.results.note("State on the host was not tried: the largest batch is searched without it.")
        return
    best = chosen(queue.results.entries)[0]
    problem = best.compiler.problem
    try:
        compiler = Compiler(on_host(problem))
    except PolicyError as error:
        queue.results.note(f"State on the host was not tried: {error}")
        return
    alike = [entry for entry in queue.results.entries if entry.compiler is best.compiler]
    plain = min(alike, key=lambda entry: (cost(entry.candidate), bytes_or_inf(entry.candidate)))
    for policy in dict.fromkeys((plain.candidate.policy, best.candidate.policy)):
        before = next(each for each in alike if each.candidate.policy == policy)
        for options in _options(problem):
            _compile(compiler, replace(policy, state_offload="optimizer", compiler_options=options), before, queue)


def _compile(compiler: Compiler, policy: StepPolicy, before: Entry, queue: CompileQueue) -> None:
    """One policy with the state on the host, dropped where it saves nothing."""
    if not queue.remaining:
        return
    (made,) = queue.compile([(compiler, policy)])
    if made is None:
        return
    moved = host_bytes(compiler.facts(policy).traced.jaxpr) // (2 * compiler.problem.workers)
    was, now = before.candidate.step_bytes, made.step_bytes
    if was is None or now is None:
        return
    words = "" if policy.options is None else f" under {policy.options.words}"
    state = f"{format_bytes(moved)} of optimizer state on the host{words}"
    if now >= was:
        entries = queue.results.entries
        entries[:] = [each for each in entries if each.candidate is not made]
        queue.results.note(
            f"{state} does not make the step smaller: {format_bytes(now)} with it and {format_bytes(was)} without, both "
            f"compiled. {compiler.schedules.get(policy, 'It is one memory with the device.')}"
        )
    else:
        schedule = compiler.schedules.get(policy, "")
        queue.results.note(
            f"{state} takes {format_bytes(was - now)} from the step's peak, compiled. {schedule}".rstrip()
        )


def can_be_moved(problem: Problem, need_bytes: int | None) -> bool:
    """Whether the optimizer's state is at least half of what a step needs, and can be moved."""
    try:
        moving = on_host(problem)
        with moving.in_mesh():
            traced = moving.step(moving.base).traced(moving.args, dict(moving.kwargs))
    except PolicyError:
        return False
    return host_bytes(traced.jaxpr) // moving.workers >= (need_bytes or 0)
