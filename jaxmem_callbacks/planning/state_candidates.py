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
from jaxmem_callbacks.programs.steps.place_state import place_state
from jaxmem_callbacks.programs.steps.program import flags_now
from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.records.policies import CompilerOptions, jax_line, platform_word
from jaxmem_callbacks.records.units import format_bytes

#: Compiles with the state on the host in one plan.
MOST_OF_STATE = 2
# XLA's schedulers that hide latency bring all of the state at the beginning of the step (results/state_offload_*.json).
_SCHEDULER = {"tpu": "xla_tpu_enable_latency_hiding_scheduler"}


def on_host(problem: Problem) -> Problem:
    """The same problem, with the optimizer's state on the host and what lets the compiler bring it piece by piece.

    Raises:
        PolicyError: the step has no optimizer state that can be moved.
    """
    step = problem.step(problem.base)
    args, kwargs = jax.tree.map(_shape, (problem.args, dict(problem.kwargs)))
    with problem.in_mesh():
        values = place_state(step, *args, **kwargs)
    base = replace(problem.base, state_offload="optimizer", compiler_options=_options(problem))
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


def _options(problem: Problem) -> Any:
    """The options of the problem's policy, and those without which nothing would be saved."""
    own, platform = problem.base.options, platform_word(problem.platform)
    name = _SCHEDULER.get(platform)
    if name is None or name in flags_now() or (own is not None and name in own.by_name):
        return own
    values = {**({} if own is None else own.by_name), name: False}
    return CompilerOptions(platform=platform, jax=jax_line(jax.__version__), values=tuple(sorted(values.items())))


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
    if platform_word(problem.platform) in _SCHEDULER and problem.device_count > 1:
        queue.results.note(
            "State on the host was not tried: several TPUs need the scheduler that hides latency for their collectives, and it "
            "brings all of the state at once."
        )
        return
    try:
        compiler = Compiler(on_host(problem))
    except PolicyError as error:
        queue.results.note(f"State on the host was not tried: {error}")
        return
    alike = [entry for entry in queue.results.entries if entry.compiler is best.compiler]
    plain = min(alike, key=lambda entry: (cost(entry.candidate), bytes_or_inf(entry.candidate)))
    for entry in dict.fromkeys((plain.candidate.policy, best.candidate.policy)):
        before = next(each for each in alike if each.candidate.policy == entry)
        _compile(compiler, before, queue)


def _compile(compiler: Compiler, before: Entry, queue: CompileQueue) -> None:
    """One policy with the state on the host, dropped where it saves nothing."""
    base = compiler.problem.base
    policy = replace(before.candidate.policy, state_offload=base.state_offload, compiler_options=base.compiler_options)
    (made,) = queue.compile([(compiler, policy)])
    if made is None:
        return
    moved = host_bytes(compiler.facts(policy).traced.jaxpr) // (2 * compiler.problem.workers)
    was, now = before.candidate.step_bytes, made.step_bytes
    if was is None or now is None:
        return
    state = f"{format_bytes(moved)} of optimizer state on the host"
    if now >= was:
        entries = queue.results.entries
        entries[:] = [each for each in entries if each.candidate is not made]
        queue.results.note(
            f"{state} does not make the step smaller: {format_bytes(now)} with it and {format_bytes(was)} without, both "
            "compiled. The compiler brings it to the device at once, or it is one memory with the device's."
        )
    else:
        queue.results.note(f"{state} takes {format_bytes(was - now)} from the step's peak, compiled.")


def can_be_moved(problem: Problem, need_bytes: int | None) -> bool:
    """Whether the optimizer's state is at least half of what a step needs, and can be moved."""
    try:
        moving = on_host(problem)
        with moving.in_mesh():
            traced = moving.step(moving.base).traced(moving.args, dict(moving.kwargs))
    except PolicyError:
        return False
    return host_bytes(traced.jaxpr) // moving.workers >= (need_bytes or 0)
