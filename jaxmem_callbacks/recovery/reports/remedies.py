"""Remedies of a failure by its forecasts, live buffers and cause: the best first, as lines to paste.

Forecasts are what other policies of a failed step need, compiled before a deadline, or why that is unknown. The step is traced in
this thread, on shapes alone, and compiled by worker processes that are ended at the deadline: no device memory is taken, and
neither a crash nor a hanging compiler reaches the process whose exception waits.

First what saves enough, by the operations that it adds to a step, to the whole percent; of those that add as many, what disturbs
least: donation, remat, microbatches (whose smaller matrices no count of operations shows), then letting go of an array, which
only the user can judge. Half the batch comes behind them, since it is another training. Then what else was compiled or counted,
by bytes; then what nobody has compiled. Where the pool or the device stands in the way, the allocator's settings come first. What
saves nothing is not shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import final

import jax

from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem, find_rows, with_rows
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.programs.steps.placement import mesh_of
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.targets.target import attached_target
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError, JaxmemError, PlanError, in_a_line
from jaxmem_callbacks.records.oom import Holder, OomCause, OomFacts, Remedy
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.terminal import print_line
from jaxmem_callbacks.records.units import MIB, format_bytes, format_extra
from jaxmem_callbacks.recovery.failure import FailingProgram
from jaxmem_callbacks.recovery.reports.live_buffers import VARIABLE
from jaxmem_callbacks.recovery.texts.explain import ELSEWHERE, host_tries

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
        lacking_bytes: What must be saved at least; once a kind of remedy saves it, none that costs more is compiled.
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
    print_line(f"compiling what may make it fit, for {seconds:.0f} s at most")
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
    where = problem.target.name if problem.target is not None else "the attached devices"
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
            self.tried.append(replace(option, why=_TOO_LATE if self.is_over else in_a_line(error)))

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
    plain = replace(base, remat="none", segments=None, levels=1, keep=0.0, assume_fusion=True, save=(), offload=())
    full = replace(plain, remat="full")
    return [policy for policy in (full, replace(full, levels=2)) if policy != base and base.levels <= policy.levels]


_WORTH, _LEAST_BYTES = 0.01, 2**20  # of what lives and of what was lacking; a holder of less is not worth a line
_MOST_HOLDERS = 3
_ORDER = {"donation": 0, "remat": 1, "microbatches": 2, "rows": 4}  # of those that add as many operations
_HOLDER = 3
_OF_THE_POOL = ("fragmentation", "growth", "refused")


def remedies(  # noqa: PLR0913 - what is known of the failure, each once
    program: FailingProgram | None,
    forecasts: Forecasts,
    holders: Sequence[Holder],
    *,
    cause: OomCause,
    lacking_bytes: int | None,
    platform: str,
    facts: OomFacts | None = None,
    device_count: int = 1,
) -> tuple[Remedy, ...]:
    """Ranked.

    Args:
        program: The program that failed.
        forecasts: What was compiled.
        holders: Who holds live arrays.
        cause: Why it did not fit.
        lacking_bytes: What was lacking at least.
        platform: Of the devices.
        facts: What the failure states, or None.
        device_count: Local devices.
    """
    ranked: list[tuple[tuple[float, ...], Remedy]] = []
    for place, each in enumerate(forecasts.tried):
        if _is_no_better(each, forecasts.tried[:place]):
            continue
        remedy = _of_forecast(program, forecasts, each, lacking_bytes)
        if remedy is not None:
            ranked.append((_rank(remedy, _ORDER[each.kind], each.extra_share), remedy))
    ranked += [(_rank(remedy, _HOLDER, 0.0), remedy) for remedy in _of_holders(holders, lacking_bytes)]
    in_host = facts is not None and facts.platform in ("host", "cpu")
    for place, remedy in enumerate(_of_the_host(facts) if facts and in_host else _settings(cause, platform)):
        ranked.append(((-1.0 if cause in _OF_THE_POOL else 3.0, place), remedy))
    for place, remedy in enumerate(_uncompiled(program, forecasts, device_count)):
        ranked.append(((4.0, place), remedy))
    return tuple(remedy for _, remedy in sorted(ranked, key=lambda pair: pair[0]))


def _is_no_better(each: Forecast, earlier: Sequence[Forecast]) -> bool:
    """Whether a cheaper change of the same kind saves as much."""
    sizes = [one.step_bytes for one in earlier if one.kind == each.kind and one.step_bytes is not None]
    return each.step_bytes is not None and bool(sizes) and each.step_bytes >= min(sizes)


def _rank(remedy: Remedy, order: int, extra_share: float | None) -> tuple[float, ...]:
    if remedy.saves_bytes is None:
        return (2.0, order)
    if not remedy.enough:
        return (1.0, order == _ORDER["rows"], -remedy.saves_bytes)
    costs = math.inf if extra_share is None else max(round(extra_share, 2), 0.0)
    return (0.0, order == _ORDER["rows"], costs, order)


def _of_forecast(
    program: FailingProgram | None, forecasts: Forecasts, each: Forecast, lacking_bytes: int | None
) -> Remedy | None:
    if program is None or program.step is None or each.kind not in _ORDER:
        return None
    what, costs = _words(each)
    lines = _lines(program, each)
    plain = forecasts.plain.step_bytes if forecasts.plain is not None else None
    if each.step_bytes is None or plain is None:
        return Remedy(
            what=what, lines=lines, compiled=False, basis=f"not compiled: {each.why or 'unknown'}", costs=costs
        )
    saves = plain - each.step_bytes
    if saves <= 0:
        return None
    basis = (
        f"compiled for {forecasts.target}: {format_bytes(each.step_bytes)} ({each.step_bytes} B) in place of "
        f"{format_bytes(plain)} ({plain} B)"
    )
    enough = None if lacking_bytes is None else saves >= lacking_bytes
    return Remedy(
        what=what,
        lines=lines,
        compiled=True,
        basis=basis,
        saves_bytes=saves,
        needs_bytes=each.step_bytes,
        enough=enough,
        costs=costs,
    )


def _words(each: Forecast) -> tuple[str, str]:
    """What it is, and what it costs."""
    if each.kind == "donation":
        return f"Donate {', '.join(each.names)}", "nothing: the old arrays cannot be used after the call"
    if each.kind == "rows":
        return f"Half the batch: {each.rows} rows", "another batch size, and so another training"
    share = each.extra_share
    more = (
        ""
        if share is None
        else f"{format_extra(share, signed=False)} more operations"
        if share > 0
        else "no more operations"
    )
    if each.kind == "microbatches":
        check = (
            "; jm.jit_step compares the loss at its first call and refuses one whose gradient would be another"
            if each.unchecked
            else "; the loss states its weight, so the gradient stays the same"
        )
        return f"The same batch in {each.policy.microbatches} microbatches", (more or "little time") + check
    return f"Stronger remat: {policy_words(each.policy)}", more


def _lines(program: FailingProgram, each: Forecast) -> tuple[str, ...]:
    if each.kind == "rows":
        names = each.names
        return tuple(advise("oom.rows", name=name, rows=each.rows) for name in names)
    policy = replace(each.policy, donate=None) if each.kind == "donation" else each.policy
    return (jit_step_line(program, policy),)


def jit_step_line(program: FailingProgram, policy: StepPolicy) -> str:
    """``step = jm.jit_step(train_step, jm.StepPolicy(remat='full'))``."""
    code = policy_code(policy)
    pinned = program.step is not None and program.step.state_shardings is not None
    reaches_all = program.step is not None and program.step.gradients == "all"
    arguments = [program.name, *([code] if code else []), *(["state_shardings=state_shardings"] if pinned else [])]
    arguments += ["gradients='all'"] if reaches_all else []
    return advise("step.made", arguments=", ".join(arguments))


def policy_code(policy: StepPolicy) -> str:
    """A policy as Python, without its defaults; empty for the default policy."""
    arguments = [
        f"{field.name}={getattr(policy, field.name)!r}"
        for field in fields(StepPolicy)
        if getattr(policy, field.name) != field.default
    ]
    return advise("train.policy", settings=", ".join(arguments)) if arguments else ""


def _of_holders(holders: Sequence[Holder], lacking_bytes: int | None) -> Iterator[Remedy]:
    """Arrays of the user's that are none of the step's arguments."""
    least = max(_WORTH * sum(holder.bytes for holder in holders), _WORTH * (lacking_bytes or 0), _LEAST_BYTES)
    free = [holder for holder in holders if holder.known_by in (VARIABLE, "") and holder.bytes >= least]
    for holder in free[:_MOST_HOLDERS]:
        variable = holder.name.partition(" (")[0]
        arrays = f"{holder.count} arrays" if holder.count > 1 else "an array"
        what = (
            f"Let go of {holder.name or 'arrays without a name'}: {arrays}, {holder.type_text}, made at {holder.site}"
        )
        line = f"del {variable}" if holder.name else f"# let go of what {holder.site} keeps"
        yield Remedy(
            what=what,
            lines=(line,),
            compiled=False,
            basis="counted among the live arrays; no compile is involved",
            saves_bytes=holder.bytes,
            enough=None if lacking_bytes is None else holder.bytes >= lacking_bytes,
            costs="only where nothing else needs them",
        )


def _of_the_host(facts: OomFacts) -> Iterator[Remedy]:
    """For memory of the host, which no setting of a device's allocator changes."""
    for what, line in host_tries(facts) if facts.platform == "host" else ():
        lines = (line,) if line else ()
        yield Remedy(what=what, lines=lines, compiled=False, basis="not compiled: it is no memory of the program")


def _settings(cause: OomCause, platform: str) -> Iterator[Remedy]:
    """The allocator's settings and what moves its arrays, which only GPUs need."""
    if platform != "gpu":
        return
    why = "not compiled: what an allocator's setting saves depends on the order of allocations"
    if cause == "refused":  # a larger pool asks the device for more of what it does not have
        yield Remedy(what=ELSEWHERE, lines=(), compiled=False, basis="not compiled: it is no memory of the program")
        return
    if cause == "fragmentation":
        yield Remedy(
            what="Move what lives long together, between steps",
            lines=(advise("memory.defragment"),),
            compiled=False,
            basis="not compiled: the report shows the largest free block before and after",
            costs="a copy of what is moved, on the device where there is room",
        )
    yield Remedy(
        what="Nine tenths of the device for JAX, in one piece from the start; it takes three quarters unless set otherwise",
        lines=(
            f"{advise('memory.environment', preset='gpu_preallocate')}  # before JAX starts; jaxmem doctor shows what holds",
        ),
        compiled=False,
        basis=why,
        costs="less room for CUDA, cuDNN, NCCL and other processes",
    )
    if cause in ("fragmentation", "growth"):
        yield Remedy(
            what="CUDA's own pool, which maps free pieces together",
            lines=(f"{advise('memory.environment', preset='gpu_async')}  # before JAX starts",),
            compiled=False,
            basis=why,
            costs="allocations take longer, and the pool reports fewer figures",
        )


def _uncompiled(program: FailingProgram | None, forecasts: Forecasts, device_count: int) -> Iterator[Remedy]:
    """What was not tried here."""
    if program is None:  # no program: an allocation on the host or a device
        return
    if program.step is None:
        yield Remedy(
            what="Make the failing function a step of this library, so that it can be explained and made smaller",
            lines=(advise("step.made", arguments="train_step"), advise("oom.look", step="train_step")),
            compiled=False,
            basis="not compiled: only steps of jm.jit_step can be compiled again",
        )
        return
    names = list(dict.fromkeys(leaf.argument for leaf in program.leaves)) or ["..."]
    call = ", ".join([program.name, *names])
    if not forecasts.tried:
        yield Remedy(
            what="The cheapest policy that fits, by compiling",
            lines=(advise("oom.plan", call=call),),
            compiled=False,
            basis="not compiled: see how predictions were made",
        )
    if device_count > 1 and not any(leaf.value is not None and _is_spread(leaf.value) for leaf in program.leaves):
        yield Remedy(
            what=f"Split the state over the {device_count} devices that are here",
            lines=(
                advise("sharding.set_mesh", axes='{"fsdp": -1}'),
                jit_step_line(program, StepPolicy(sharding="fsdp")),
            ),
            compiled=False,
            basis="not compiled: the state must be placed again first (docs/sharding.md)",
        )
    yield Remedy(
        what="Do other programs hold memory beside the step, such as evaluation? beside= of jm.plan plans them together",
        lines=(),
        compiled=False,
        basis="not compiled: which programs run beside it is not known here",
    )


def _is_spread(value: object) -> bool:
    return int(getattr(getattr(value, "sharding", None), "num_devices", 1) or 1) > 1
