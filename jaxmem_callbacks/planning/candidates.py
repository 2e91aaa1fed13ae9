"""A train step, its arguments and a policy enter; a compiled `Candidate` leaves. Nothing runs, no device memory is taken."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import jax

from jaxmem_callbacks.planning.budget import Budget
from jaxmem_callbacks.planning.modelled import modelled_seconds
from jaxmem_callbacks.planning.speeds import speed_of
from jaxmem_callbacks.programs.reading.collectives import collectives_of
from jaxmem_callbacks.programs.reading.compiler_figures import program_memory
from jaxmem_callbacks.programs.reading.recomputed import recomputed_flops
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.targets.compile import TargetCompilation
from jaxmem_callbacks.programs.targets.step_on_target import compile_step_for
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.transforms.flops import count_flops
from jaxmem_callbacks.transforms.keeping import Share

Survey = Callable[[list[Share]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be planned.

    Attributes:
        train_step: The user's own step, not jitted by this library.
        args: Its arguments, real or abstract.
        kwargs: Its keyword arguments.
        target: Hardware that is not there, or None for the attached devices.
        budget: What a step may use.
        resident_bytes: What must fit beside it on each device.
        device_count: Devices the work is spread over.
        mesh: An abstract mesh that the policies' sharding means, or None.
        base: The policy of the plain step: its sharding, if any.
    """

    train_step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Target | None
    budget: Budget
    resident_bytes: int = 0
    device_count: int = 1
    mesh: Any = None
    base: StepPolicy = field(default_factory=StepPolicy)

    def step(self, policy: StepPolicy, survey: Survey | None = None) -> JitStep:
        """The step under a policy."""
        return JitStep(self.train_step, policy, survey=survey)

    def in_mesh(self) -> AbstractContextManager[Any]:
        """Where the step is traced: on the mesh, where there is one."""
        return contextlib.nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a traced step tells before any compile.

    Attributes:
        flops: Operations of one call.
        modelled_s: Modelled seconds on the target, or None where its speed is unknown.
        fingerprint: Identifies the program.
        shares: What each loss could keep besides its cuts; empty where nothing is cut.
    """

    flops: int
    modelled_s: float | None
    fingerprint: str
    shares: tuple[tuple[Share, ...], ...] = field(repr=False)


@final
class Compiler:
    """Traces and compiles one step under policies, each once.

    Args:
        problem: What is to be planned.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.answers: list[TargetCompilation] = []
        self.notes: dict[str, None] = {}
        self.plain = self.facts(problem.base)

    def facts(self, policy: StepPolicy, *, survey: bool = False) -> Facts:
        """What the step under a policy tells without a compile.

        Raises:
            PolicyError, LossRefusedError: the step takes no gradient through this library, or cannot be cut.
        """
        problem = self.problem
        found: list[tuple[Share, ...]] = []
        step = problem.step(policy, (lambda some: found.append(tuple(some))) if survey else None)
        with problem.in_mesh():
            traced = step.traced(problem.args, dict(problem.kwargs))
        self.notes |= dict.fromkeys(step.notes)
        speed = speed_of(problem.target)
        text = f"{jax.__version__}\n{traced.jaxpr}"
        return Facts(
            flops=count_flops(traced.jaxpr).flops,
            modelled_s=None if speed is None else modelled_seconds(traced.jaxpr, speed, problem.device_count),
            fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
            shares=tuple(found),
        )

    def candidate(self, policy: StepPolicy) -> Candidate:
        """The step under a policy, as the target's own compiler sees it.

        Raises:
            CompileError, TargetError: the compiler failed, crashed or took too long.
        """
        facts = self.facts(policy)
        if self.problem.target is None:
            memory, hlo = self._attached(policy)
            return self._judged(policy, facts, memory, hlo)
        problem = self.problem
        assert problem.target is not None
        with problem.in_mesh():
            answer, *_ = compile_step_for(problem.step(policy), problem.args, dict(problem.kwargs), problem.target.name)
        self.answers.append(answer)
        if answer.memory is not None:
            return self._judged(policy, facts, answer.memory, answer.hlo_text or "", answer)
        return Candidate(
            policy=policy,
            step_bytes=answer.needed_bytes,
            fits=False,
            flops=facts.flops,
            extra_flops=facts.flops - self.plain.flops,
            modelled_s=facts.modelled_s,
            refusal=answer.refusal,
            cached=answer.cached,
        )

    def _attached(self, policy: StepPolicy) -> tuple[ProgramMemory, str]:
        """Compiled for the devices of this process; the same compile serves the step's first call."""
        problem = self.problem
        compiled = problem.step(policy).lower(*problem.args, **problem.kwargs).compile()
        hlo = compiled.as_text() or ""
        platform = jax.default_backend()
        return program_memory(compiled, name="step", platform=platform, target="attached", hlo_text=hlo), hlo

    def _judged(
        self,
        policy: StepPolicy,
        facts: Facts,
        memory: ProgramMemory,
        hlo: str,
        answer: TargetCompilation | None = None,
    ) -> Candidate:
        hidden = max(recomputed_flops(hlo), 1) * self.problem.device_count if memory.compiler_remat else 0
        return Candidate(
            policy=policy,
            step_bytes=memory.step_bytes,
            fits=self._fits(memory.step_bytes, answer),
            flops=facts.flops,
            extra_flops=facts.flops - self.plain.flops + hidden,
            compiler_remat=memory.compiler_remat,
            modelled_s=self._with_collectives(facts.modelled_s, hlo),
            argument_bytes=memory.argument_bytes,
            output_bytes=memory.output_bytes,
            alias_bytes=memory.alias_bytes,
            temp_bytes=memory.temp_bytes,
            host_bytes=memory.host_temp_bytes,
            cached=answer is not None and answer.cached,
            seconds=None if answer is None or answer.cached else answer.compile_seconds,
        )

    def _with_collectives(self, modelled_s: float | None, hlo: str) -> float | None:
        """Modelled time with what goes through the links, as if nothing of it were hidden behind other work."""
        speed = speed_of(self.problem.target)
        if modelled_s is None or speed is None or self.problem.device_count == 1:
            return modelled_s
        return modelled_s + collectives_of(hlo, self.problem.device_count).moved_bytes / speed.link

    def _fits(self, step_bytes: int, answer: TargetCompilation | None) -> bool | None:
        if answer is not None and answer.fits is False:
            return False
        limit = self.problem.budget.bytes
        return None if limit is None else step_bytes + self.problem.resident_bytes <= limit
