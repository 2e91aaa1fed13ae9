"""Forecasts: what other policies of a failed step need, compiled before a deadline, or why that is unknown.

The step is traced in this thread, on shapes alone, and compiled by worker processes that are ended at the deadline: no device
memory is taken, and neither a crash nor a hanging compiler reaches the process whose exception waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import jax

from jaxmem_callbacks.planning.compile_candidate import Compiler
from jaxmem_callbacks.planning.problem import Problem, find_rows, with_rows
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.programs.steps.placement import mesh_of
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.targets.target import attached_target
from jaxmem_callbacks.records.errors import CompileError, JaxmemError, PlanError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.recovery.failure import FailingProgram

_LEAST_S = 1.0  # no compile ends in less
_TOO_LATE = "the time for planning was over; give jm.oom_guard more plan_seconds"
# Tracing takes memory of this process. With less left of its address space a compiler library would end the process.
LEAST_LEFT_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """One policy, or one change of the call, compiled.

    Attributes:
        kind: ``remat``, ``donation``, ``microbatches`` or ``rows``.
        policy: What was compiled.
        step_bytes: What the step then needs, or None with the reason in ``why``.
        why: Why nothing was compiled.
        extra_share: Operations above the failed step's, as a share of them; None where unknown.
        unchecked: Whether the loss must still be compared with its accumulation, which `jm.jit_step` does.
        names: Arguments that are donated, or that hold the batch.
        rows: Rows of the batch.
    """

    kind: str
    policy: StepPolicy
    step_bytes: int | None = None
    why: str = ""
    extra_share: float | None = None
    unchecked: bool = False
    names: tuple[str, ...] = ()
    rows: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecasts:
    """What was compiled for one failed step.

    Attributes:
        plain: The failed step itself, by the same compiler.
        tried: Everything else.
        how: How it was done, or why it was not, a sentence.
        target: What it was compiled for.
    """

    plain: Candidate | None = None
    tried: tuple[Forecast, ...] = ()
    how: str = ""
    target: str = ""


def forecast(
    program: FailingProgram | None, seconds: float, left_bytes: int | None, *, lacking_bytes: int | None = None
) -> Forecasts:
    """Compile what may save memory, the cheapest for the training first, until the time is over.

    Args:
        program: The program that failed.
        seconds: How long it may take; 0 compiles nothing.
        left_bytes: What is left of the process's own bounds of memory, or None where it has none.
        lacking_bytes: What must be saved at least; of a kind that saves it nothing dearer is compiled.
    """
    if seconds <= 0:
        return Forecasts(how="Nothing was compiled, because no time was given for it (plan_seconds=0).")
    if program is None or program.step is None or program.call is None:
        return Forecasts(
            how="Nothing was compiled, because the program that failed is no step of jm.jit_step, whose policy can be varied."
        )
    if left_bytes is not None and left_bytes < LEAST_LEFT_BYTES:
        return Forecasts(
            how=f"Nothing was compiled, because {format_bytes(left_bytes)} are left to this process, too few to trace a step."
        )
    began = time.monotonic()
    try:
        problem = _problem(program, program.step)
        compiles = _Compiles(problem, began + seconds, lacking_bytes)
        compiles.run()
    except KeyboardInterrupt:
        return Forecasts(how="Nothing was compiled, because compiling was interrupted.")
    except JaxmemError as error:
        over = time.monotonic() - began > seconds - _LEAST_S
        return Forecasts(how=f"Nothing was compiled: {_TOO_LATE if over else error}")
    took = time.monotonic() - began
    where = problem.target.name if problem.target is not None else "attached"
    return Forecasts(
        plain=compiles.plain,
        tried=tuple(compiles.tried),
        how=(
            f"{compiles.compiles} compiles for {where} ({problem.device_count} device{'s' * (problem.device_count > 1)}) in "
            f"{took:.0f} s, by worker processes and without this process's devices, after the failure."
        ),
        target=where,
    )


def _problem(program: FailingProgram, step: JitStep) -> Problem:
    """The failed step under its own policy, for the devices that it ran on, by shapes."""
    assert program.call is not None  # forecast has asked
    places = [getattr(leaf.value, "sharding", None) for leaf in program.leaves]
    count = max((int(getattr(place, "num_devices", 1) or 1) for place in places if place is not None), default=1)
    device = jax.local_devices()[0]
    return Problem(
        train_step=step.__wrapped__,
        args=program.call.args,
        kwargs=program.call.kwargs,
        target=attached_target(device.platform, device.device_kind, count),
        budget=Budget(bytes=None, limit_bytes=None, reason="none: figures are compared"),
        device_count=count,
        mesh=None if step.policy.sharding is None else mesh_of([step.state_shardings, *places]),
        base=replace(step.policy, donate=step.donation),
        state_shardings=step.state_shardings,
        gradients=step.gradients,
    )


@final
class _Compiles:
    """Compiles one problem under policies, one after the other, until a deadline."""

    def __init__(self, problem: Problem, deadline: float, lacking_bytes: int | None) -> None:
        self._problem, self._deadline, self._lacking = problem, deadline, lacking_bytes
        self._compiler = Compiler(problem)
        self.plain: Candidate | None = None
        self.tried: list[Forecast] = []
        self.compiles = 0

    def run(self) -> None:
        """Everything, what costs the training least first.

        Raises:
            JaxmemError: the failed step itself cannot be compiled.
        """
        base = self._problem.base
        self.plain = self._compiled(self._compiler, base)
        with self._problem.in_mesh():
            traced = self._problem.step(base).traced(self._problem.args, dict(self._problem.kwargs))
        if traced.undonated:
            option = Forecast(kind="donation", policy=base, names=traced.undonated, extra_share=0.0)
            self._attempt(option, self._donating)
        for policy in _stronger(base):
            self._attempt(Forecast(kind="remat", policy=policy), self._under_policy)
        try:
            rows = find_rows(self._problem, traced)
        except PlanError:
            return
        for count in (2, 4):
            if rows.count % (count * base.microbatches) == 0:
                policy = replace(base, microbatches=count * base.microbatches)
                self._attempt(Forecast(kind="microbatches", policy=policy), self._under_policy)
        if rows.count % (2 * base.microbatches) == 0:
            half = with_rows(self._problem, rows, rows.count // 2)
            option = Forecast(kind="rows", policy=base, names=rows.arguments, rows=rows.count // 2)
            self._attempt(
                option, lambda option: replace(option, step_bytes=self._compiled(Compiler(half), base).step_bytes)
            )

    def _attempt(self, option: Forecast, action: Callable[[Forecast], Forecast]) -> None:
        """One change, unless its kind has saved enough already; one that cannot be compiled is kept with the reason."""
        if any(each.kind == option.kind and self._saves_enough(each) for each in self.tried):
            return
        try:
            self.tried.append(action(option))
        except Exception as error:  # noqa: BLE001 - the user's own function may raise under a policy, or for want of memory
            words = str(error).strip().splitlines() or ["without a word"]
            why = _TOO_LATE if self.is_over else f"{type(error).__name__}: {words[0]}"
            self.tried.append(replace(option, why=why))

    @property
    def is_over(self) -> bool:
        """Whether the deadline has come, so near that no compile would end."""
        return self._deadline - time.monotonic() < _LEAST_S

    def _saves_enough(self, each: Forecast) -> bool:
        if self._lacking is None or each.step_bytes is None or self.plain is None or self.plain.step_bytes is None:
            return False
        return self.plain.step_bytes - each.step_bytes >= self._lacking

    def _under_policy(self, option: Forecast) -> Forecast:
        self._compiler.unchecked = False
        compiled = self._compiled(self._compiler, option.policy)
        unchecked = self._compiler.unchecked
        return replace(option, step_bytes=compiled.step_bytes, extra_share=compiled.extra_share, unchecked=unchecked)

    def _donating(self, option: Forecast) -> Forecast:
        size, _ = self._compiler.donating(option.policy, option.names, timeout_s=self._left())
        self.compiles += 1
        return replace(option, step_bytes=size)

    def _compiled(self, compiler: Compiler, policy: StepPolicy) -> Candidate:
        self._left()
        compiling = compiler.lowered(policy, timeout_s=self._left())
        self.compiles += 1
        return compiling()

    def _left(self) -> float:
        """Seconds until the deadline.

        Raises:
            CompileError: it is over.
        """
        if self.is_over:
            raise CompileError(_TOO_LATE)
        return self._deadline - time.monotonic()


def _stronger(base: StepPolicy) -> list[StepPolicy]:
    """Policies that keep less between the passes, the cheaper first."""
    plain = replace(base, remat="none", segments=None, levels=1, keep=0.0, save=(), offload=())
    full = replace(plain, remat="full")
    return [policy for policy in (full, replace(full, levels=2)) if policy != base and base.levels <= policy.levels]
