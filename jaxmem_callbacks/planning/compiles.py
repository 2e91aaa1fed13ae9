"""The compiles of a plan: a policy compiled for a step to a `Candidate`, their budget, and the queue that makes two at a time."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

import jax

from jaxmem_callbacks.planning.interrupts import interruption_here
from jaxmem_callbacks.planning.problem import Problem, mesh_sizes
from jaxmem_callbacks.planning.step_time import modelled_seconds, waiting_seconds
from jaxmem_callbacks.programs.reading.buffer_assignment import program_memory
from jaxmem_callbacks.programs.reading.buffers import Argument, Arguments, compiled_with_peak, past_the_cache
from jaxmem_callbacks.programs.reading.hlo import Module, collectives_of, parse_module, recomputed_flops
from jaxmem_callbacks.programs.reading.host_copies import host_copies
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.programs.steps.program import disagreement_words, operations_of
from jaxmem_callbacks.programs.steps.step import JitStep, Traced
from jaxmem_callbacks.programs.steps.user_jit import jax_traced
from jaxmem_callbacks.programs.targets.compile import TargetCompilation
from jaxmem_callbacks.programs.targets.step_on_target import (
    MemoryRefusalError,
    compile_traced_here,
    compiling_here,
    described,
    lower_traced_for,
    refused_peak,
    taken_inputs,
)
from jaxmem_callbacks.programs.targets.target import roomier
from jaxmem_callbacks.programs.targets.worker import end_workers
from jaxmem_callbacks.records.errors import (
    CompileError,
    CompileTimeoutError,
    JaxmemError,
    LossRefusedError,
    PolicyError,
    in_a_line,
)
from jaxmem_callbacks.records.peaks import UNPLACED, Peak, with_total
from jaxmem_callbacks.records.plans import Candidate, FrontierPoint
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy, policy_words
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.transforms.costs import count_flops

#: Of a share (`StepPolicy.keep`), as people write it.
SHARE_DIGITS = 5
_LEAST_SHARE = 10**-SHARE_DIGITS
_COUNTED_ONCE = (
    "The step has while loops, and a trace does not show how often they run: operations and modelled time count their bodies "
    "once. A jax.lax.scan or fori_loop with fixed bounds is counted as often as it runs."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a traced step before any compile.

    Attributes:
        step: The step under its policy.
        traced: Its trace.
        flops: Operations of one call.
        modelled_s: Modelled seconds on the target, or None where its speed is unknown.
        operations: Identifies them, with shapes and dtypes.
        arguments: What each array argument that is used holds, in order.
        shares: What each loss could keep besides its cuts; empty where nothing is cut. Their operations are of the whole step.
        unchecked: Whether a loss without an explicit weight is accumulated, and was not compared yet.
    """

    step: JitStep = field(repr=False)
    traced: Traced = field(repr=False)
    flops: int
    modelled_s: float | None
    operations: str
    arguments: tuple[Argument, ...] = field(repr=False)
    shares: tuple[tuple[FrontierPoint, ...], ...] = field(repr=False)
    unchecked: bool = False


@final
class Compiler:
    """Traces and compiles one step under policies, each once.

    Args:
        problem: What is to be planned.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.leaves: tuple[Leaf, ...] = ()
        self.answers: list[TargetCompilation] = []
        self.notes: dict[str, None] = {}
        self.left_alone: dict[OwnCheckpoint, None] = {}
        self.obstacles: dict[str, None] = {}  # those of them that policies cannot change
        self._disagreed: tuple[str, ...] = ()
        self.plain = self._last = self._traced(problem.step(problem.base))
        self.schedules: dict[
            StepPolicy, str
        ] = {}  # policy -> what of a state on the host its step has on the device at once
        # Microbatches and number of losses -> how often the step takes their gradients.
        self._calls: dict[tuple[int, int], int] = {}
        self._waits: dict[StepPolicy, float] = {}  # policy -> modelled seconds that its step waits for collectives
        self.unchecked = False  # whether any candidate accumulates a loss that was not compared with its whole batch

    def title(self, policy: StepPolicy) -> str:
        """What a compile is called while it runs."""
        rows = self.problem.batch_rows
        return policy_words(policy) + (f" at {rows} rows" if rows is not None else "")

    def facts(self, policy: StepPolicy, *, survey: bool = False) -> Facts:
        """What is known of the step under a policy without a compile.

        What was traced last is often asked for next, as the lower end is after its survey.

        Args:
            policy: The policy.
            survey: Whether to find what the losses could keep too.

        Raises:
            PolicyError, LossRefusedError: the step takes no gradient through this library, or cannot be cut.
        """
        known = [each for each in (self.plain, self._last) if each.step.policy == policy]
        if known and not survey:
            return known[0]
        self._last = found = self._traced(self.problem.step(policy, survey=survey))
        once = sum(curve[0].flops for curve in found.shares)
        if survey and once and round((found.flops - self.plain.flops) / once) > 1:
            self._last = replace(found, shares=self._of_all_calls(found))
        return self._last

    def _of_all_calls(self, found: Facts) -> tuple[tuple[FrontierPoint, ...], ...]:
        """What losses could keep, with the operations of every time that the step takes their gradients, such as in a scan.

        A loss does not know how often that is, but the step's trace counts its operations as often. It is traced with the least
        share, since what keeps nothing may be cut elsewhere. Of several losses all are taken to be differentiated as often. It is
        the same however the losses are cut, so one such trace is enough.
        """
        kind = found.step.policy.microbatches, len(found.shares)
        if kind not in self._calls:
            least = self._traced(self.problem.step(replace(found.step.policy, keep=_LEAST_SHARE)))
            once = sum([point for point in curve if point.share <= _LEAST_SHARE][-1].flops for curve in found.shares)
            self._calls[kind] = max(round((least.flops - self.plain.flops) / once), 1) if once else 1
        times = self._calls[kind]
        return tuple(
            tuple(replace(point, flops=times * point.flops, work=times * point.work) for point in curve)
            for curve in found.shares
        )

    def _traced(self, step: JitStep) -> Facts:
        problem = self.problem
        try:
            with problem.in_mesh(), self._trace_errors_explained(step.policy):
                traced = step.traced(problem.args, dict(problem.kwargs))
        finally:  # a loss may be refused for its own checkpoints
            self.left_alone |= dict.fromkeys(step.left_alone)
        self.notes |= dict.fromkeys(traced.notes)
        self.obstacles |= dict.fromkeys(traced.notes)
        self.leaves = self.leaves or tuple(traced.leaves)
        speed, counted = problem.speed, count_flops(traced.jaxpr)
        if counted.loops_once:
            self.notes[_COUNTED_ONCE] = None
        return Facts(
            step=step,
            traced=traced,
            flops=counted.flops,
            modelled_s=None if speed is None else modelled_seconds(traced.jaxpr, speed, problem.workers),
            operations=operations_of(traced.jaxpr),
            arguments=tuple(_used(traced)),
            shares=traced.frontiers,
            unchecked=step.unchecked,
        )

    @contextmanager
    def _trace_errors_explained(self, policy: StepPolicy) -> Generator[None]:
        """Where JAX traces the step without the policy but not under it, only that policy fails and not the plan."""
        try:
            yield
        except Exception as error:
            if policy == self.problem.base or isinstance(error, JaxmemError | MemoryError):
                raise
            msg = f"JAX cannot trace the step under it ({in_a_line(error)}), though it can without."
            raise LossRefusedError(msg) from error

    def lowered(self, policy: StepPolicy, *, timeout_s: float | None = None) -> Callable[[], Candidate]:
        """The step under a policy, lowered in the calling thread, whose settings (a mesh, ``enable_x64``) JAX obeys.

        Args:
            policy: The policy.
            timeout_s: Seconds after which a worker's compile is ended; None for the process's own limit.

        Returns:
            The compile that is left to do, in any thread: the candidate as the target's own compiler sees it. It raises
            CompileError where the compiler failed, crashed or took too long.

        Raises:
            PolicyError, LossRefusedError: the step takes no gradient through this library, or cannot be cut.
            CompileError, TargetError: the program cannot be lowered for its devices, cannot leave this process, or needs more
                devices than the target has.
        """
        problem = self.problem
        facts = self.facts(policy)
        self.unchecked |= facts.unchecked
        if problem.target is None:
            return self._lowered_here(facts)
        with problem.in_mesh():
            compiling = lower_traced_for(
                facts.traced, facts.step.name, problem.target, want_buffers=True, need_lines=False, timeout_s=timeout_s
            )
        return lambda: self._answered(policy, facts, compiling())

    def _answered(self, policy: StepPolicy, facts: Facts, answer: TargetCompilation) -> Candidate:
        self.answers.append(replace(answer, module=None))
        self.notes |= dict.fromkeys(answer.note_of_reports)
        if answer.memory is not None and answer.module is not None:
            judged = self._judged(policy, facts, answer.memory, answer.module, answer)
            return replace(judged, peak=answer.peak)
        refused = self._refused(policy, facts, answer.needed_bytes, answer.refusal, answer.peak)
        return replace(refused, cached=answer.cached)

    def _refused(
        self, policy: StepPolicy, facts: Facts, needed_bytes: int | None, words: str | None, peak: Peak | None
    ) -> Candidate:
        """A policy under which the compiler refused the step for its memory."""
        problem = self.problem
        need, largest = self._need(needed_bytes)
        return Candidate(
            policy=policy,
            step_bytes=needed_bytes,
            fits=False,
            flops=facts.flops,
            extra_flops=facts.flops - self.plain.flops,
            plain_flops=self.plain.flops,
            need_bytes=need,
            sets_need=largest,
            beside=problem.beside,
            batch_rows=problem.batch_rows,
            mesh=mesh_sizes(problem.mesh),
            operations=facts.operations,
            compiler_remat=None,
            peak=peak,
            refusal=words,
        )

    def placed_elsewhere(self, policy: StepPolicy) -> tuple[Peak | None, str, bool]:
        """What makes the peak of a step that a TPU's compiler refused, as that of a kind with more memory places it.

        Returns:
            The peak, what placed it, and whether the cache knew it. No peak where there is no such kind, or it refuses too.

        Raises:
            CompileError: the compiler failed, crashed or took too long.
        """
        problem = self.problem
        larger = None if problem.target is None else roomier(problem.target)
        if larger is None:
            return None, "", True
        with problem.in_mesh():
            step = problem.step(policy)
            traced = step.traced(problem.args, dict(problem.kwargs))
            answer = lower_traced_for(traced, step.name, larger, want_buffers=True, need_lines=False)()
        return answer.peak if answer.memory is not None else None, larger.name, answer.cached

    def donating(
        self, policy: StepPolicy, names: Sequence[str], *, timeout_s: float | None = None
    ) -> tuple[int | None, bool]:
        """Bytes of the step under a policy with some more arguments donated, and whether the cache knew them.

        Raises:
            CompileError: the compiler failed, crashed or took too long.
        """
        problem = self.problem
        with problem.in_mesh():
            step = problem.step(policy)
            traced = step.traced(problem.args, dict(problem.kwargs))
            if problem.target is not None:
                answer = lower_traced_for(traced, step.name, problem.target, donate=names, timeout_s=timeout_s)()
                return answer.needed_bytes, answer.cached
            compiled = compile_traced_here(traced, step.name, donate=names)
        memory = program_memory(compiled, name="step", platform=jax.default_backend(), target="attached")
        return memory.step_bytes, False

    def _lowered_here(self, facts: Facts) -> Callable[[], Candidate]:
        """Lower for the devices of this process. Where JAX's own cache is on it may answer, and then the peak is unknown."""
        problem, step = self.problem, facts.step
        arguments = Arguments(
            by_number=dict(enumerate(facts.arguments)), by_name={each.path: each for each in facts.arguments}
        )
        with problem.in_mesh(), compiling_here(step.name):
            if step.policy.microbatches == 1:
                lowered = step.lower(*problem.args, **problem.kwargs)
            else:  # `lower` would compare the loss on real rows, which was done once before
                lowered = jax_traced(step.trace(*problem.args, **problem.kwargs)).lower()

        def compiled() -> Candidate:
            try:
                with problem.in_mesh(), compiling_here(step.name):
                    program, peak = (
                        (lowered.compile(), None) if past_the_cache() else compiled_with_peak(lowered, arguments)
                    )
            except MemoryRefusalError as refusal:
                needed = refusal.needed_bytes
                return self._refused(step.policy, facts, needed, refusal.words, refused_peak(facts.traced, needed))
            module, platform = parse_module(program.as_text()), jax.default_backend()
            memory = program_memory(program, name="step", platform=platform, target="attached", module=module)
            placed = peak and with_total(peak, memory.step_bytes, UNPLACED)
            return replace(self._judged(step.policy, facts, memory, module), peak=placed)

        return compiled

    def _judged(
        self,
        policy: StepPolicy,
        facts: Facts,
        memory: ProgramMemory,
        module: Module,
        answer: TargetCompilation | None = None,
    ) -> Candidate:
        again = max(recomputed_flops(module), 1) if memory.compiler_remat else 0
        if policy.state_offload is not None and (schedule := host_copies(module)) is not None:
            self.schedules[policy] = schedule.words
        if not self._disagreed:  # one sentence a plan: the others' differ in their bytes only
            self._disagreed = disagreement_words(memory)
            self.notes |= dict.fromkeys(self._disagreed)
        need, largest = self._need(memory.step_bytes)
        return Candidate(
            policy=policy,
            step_bytes=memory.step_bytes,
            fits=self._fits(need, answer),
            flops=facts.flops,
            extra_flops=facts.flops - self.plain.flops + again * self.problem.workers,
            plain_flops=self.plain.flops,
            need_bytes=need,
            sets_need=largest,
            beside=self.problem.beside,
            batch_rows=self.problem.batch_rows,
            mesh=mesh_sizes(self.problem.mesh),
            operations=facts.operations,
            compiler_remat=memory.compiler_remat,
            modelled_s=self._as_compiled(facts.modelled_s, again, module, self._lost_overlap(policy, module)),
            argument_bytes=memory.argument_bytes,
            output_bytes=memory.output_bytes,
            alias_bytes=memory.alias_bytes,
            temp_bytes=memory.temp_bytes,
            constant_bytes=memory.constant_bytes,
            host_bytes=memory.host_temp_bytes,
            cached=answer is not None and answer.cached,
            seconds=None if answer is None or answer.cached else answer.compile_seconds,
        )

    def _as_compiled(self, modelled_s: float | None, again: int, module: Module, lost_s: float) -> float | None:
        """Modelled time with what a trace does not know.

        Args:
            modelled_s: Of the trace.
            again: Operations on each device that the compiler does again by itself, charged at the speed of bfloat16 products:
                the least that they may take.
            module: The compiled program, for what goes through the links, as if nothing of it were hidden behind other work.
            lost_s: Seconds of that which compiler options expose and the compiler hides without them: an option is never free.
        """
        speed, count = self.problem.speed, self.problem.device_count
        if modelled_s is None or speed is None:
            return None
        moved = 0 if count == 1 else collectives_of(module, count).moved_bytes
        return modelled_s + again / speed.flops + moved / speed.link + lost_s

    def _lost_overlap(self, policy: StepPolicy, module: Module) -> float:
        """Seconds that the step waits for collectives longer than without the compiler options that are tried on it."""
        problem = self.problem
        if not problem.weighs_overlap or problem.speed is None or problem.device_count == 1:
            return 0.0
        waits = self._waits[policy] = waiting_seconds(module, problem.device_count, problem.speed)
        without = replace(policy, compiler_options=problem.base.compiler_options)
        return max(waits - self._waits.get(without, waits), 0.0)

    def _need(self, step_bytes: int | None) -> tuple[int | None, str]:
        """Resident bytes and the largest program; the name of that one where it is not the step."""
        own = None if step_bytes is None else step_bytes + self.problem.resident_bytes
        needs = [(program.need_bytes, program.name) for program in self.problem.beside]
        known = [(need, name) for need, name in [(own, ""), *needs] if need is not None]
        return max(known, key=lambda pair: pair[0], default=(None, ""))

    def _fits(self, need: int | None, answer: TargetCompilation | None) -> bool | None:
        if (answer is not None and answer.fits is False) or self.problem.beside_alone_is_too_much:
            return False
        limit = self.problem.budget.bytes
        return None if limit is None or need is None else need <= limit


def _used(traced: Traced) -> list[Argument]:
    """What the arguments that the program takes hold, in the order of its parameters."""
    known = described(traced.leaves, traced.undonated)
    taken = taken_inputs(traced.jaxpr)
    return [each for each, is_taken in zip(known, taken, strict=True) if is_taken]


# Of remat alone, for one placement of the state; and of everything else that may be searched, such as three shardings with both
# their ends.
MOST_OF_REMAT, MOST = 8, 16
_AT_ONCE = 2
_SHOWN = 4  # policies that share a failure and are named
_POLL_S = 0.25
_MOST_S = 1.0  # that the end of a command waits for a compile that nothing can end: a scheduler's SIGKILL comes next
Progress = Callable[[str, int, int], None]
Asked: TypeAlias = tuple[Compiler, StepPolicy]
_Compile = concurrent.futures.Future[Candidate]


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate and what compiled it."""

    compiler: Compiler
    candidate: Candidate

    @property
    def has_options(self) -> bool:
        """Whether it was compiled with other compiler options than the step's own."""
        return self.candidate.policy.options != self.compiler.problem.base.options


@final
class CompileBudget:
    """How many compiles a plan may make. Searches get parts of it: what a part uses, the whole has used.

    Args:
        limit: Compiles at most.
        whole: The budget that this is a part of; None for a plan's own.

    Attributes:
        used: Compiles so far, those that the disk cache answered included.
        skipped: What was to be compiled when no compile remained.
    """

    def __init__(self, limit: int, whole: CompileBudget | None = None) -> None:
        self.limit, self.used, self._whole = limit, 0, whole
        self.skipped: dict[Asked, None] = {} if whole is None else whole.skipped

    @property
    def whole(self) -> CompileBudget:
        """The plan's own budget."""
        return self if self._whole is None else self._whole.whole

    @property
    def remaining(self) -> int:
        """Compiles that may still come."""
        own = max(self.limit - self.used, 0)
        return own if self._whole is None else min(own, self._whole.remaining)

    def part(self, compiles: int) -> CompileBudget:
        """A part of what remains, of one compile at least."""
        return CompileBudget(max(compiles, 1), self)

    def use(self, compiles: int) -> None:
        """Count compiles; a negative number gives some back."""
        self.used += compiles
        if self._whole is not None:
            self._whole.use(compiles)


@final
class CompileResults:
    """What the compiles of one plan gave.

    Attributes:
        entries: The candidates, in the order of their compiles.
        failed: Why others are none.
        refused: What a policy or a loss refused, so that no compiler was asked.
        obstacles: Those of the notes that explain why nothing can be saved.
        uncached: Compiles of the step that the disk cache did not know.
        coresident: Compiles of programs beside the step.
        coresident_uncached: Those of them, and of the step with other donation, that the disk cache did not know.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.failed: list[Exception] = []
        self.refused: set[Asked] = set()
        self.obstacles: list[str] = []
        self.uncached = self.coresident = self.coresident_uncached = 0
        self.known: dict[Asked, Candidate | None] = {}
        self._timeouts = 0
        self._notes: dict[str, list[str]] = {}

    @property
    def hangs(self) -> bool:
        """Whether the compiler had no answer in its time to the first policies: others would have none either."""
        return not self.entries and self._timeouts >= _AT_ONCE

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, each once, in their order; a failure that several policies share is one."""
        return tuple(
            f"{_titles(titles)} not compiled: {text}" if titles else text for text, titles in self._notes.items()
        )

    def note(self, text: str) -> None:
        """Add a remark."""
        self._notes[text] = []

    def note_obstacle(self, text: str) -> None:
        """Add a remark that explains why nothing can be saved."""
        self.obstacles.append(text)
        self.note(text)

    def add(self, compiler: Compiler, policy: StepPolicy, candidate: Candidate) -> None:
        """Add what a compiler answered."""
        self.entries.append(Entry(compiler, candidate))
        self.known[compiler, policy] = candidate
        self.uncached += not candidate.cached

    def add_failure(self, compiler: Compiler, policy: StepPolicy, error: Exception) -> None:
        """Add a policy that failed, and why."""
        self.known[compiler, policy] = None
        self.failed.append(error)
        if isinstance(error, CompileError):
            self.uncached += 1
            self._timeouts += isinstance(error, CompileTimeoutError)
        else:
            self.refused.add((compiler, policy))
        self._notes.setdefault(str(error), []).append(compiler.title(policy))

    def replace(self, entry: Entry, candidate: Candidate) -> Entry:
        """Replace a candidate by one of which more is known."""
        known = Entry(entry.compiler, candidate)
        self.entries[self.entries.index(entry)] = known
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileQueue:
    """Compiles candidates within a budget.

    Attributes:
        budget: What these compiles are counted in: the plan's own, or the part of one search.
        results: Where candidates, failures and notes are added.
        progress: Called with what is being compiled, how many are done and how many may come.
        check: Raises what would end the plan.
    """

    budget: CompileBudget
    results: CompileResults = field(default_factory=CompileResults)
    progress: Progress | None = None
    check: Callable[[], None] = lambda: None

    @property
    def remaining(self) -> int:
        """Compiles that may still come."""
        return 0 if self.results.hangs else self.budget.remaining

    def at_most(self, compiles: int) -> CompileQueue:
        """The queue for a search that may use no more than so many of the compiles that remain."""
        return replace(self, budget=self.budget.part(compiles))

    def note_skipped(self) -> None:
        """Note what was not compiled because none remained, where none remains to make up for it."""
        left = [one for one in self.budget.skipped if one not in self.results.known]
        if left and not self.remaining:
            skipped = "; ".join(compiler.title(policy) for compiler, policy in left)
            most = self.budget.whole.limit
            self.results.note(f"Not compiled, since {most} compiles are the most that one plan takes: {skipped}.")

    def report(self, what: str) -> None:
        """Report what is being compiled, or was last."""
        self.check()
        if self.progress is not None:
            self.progress(what, len(self.results.entries), self.budget.whole.limit)

    def compile(self, asked: Sequence[Asked]) -> list[Candidate | None]:
        """Compile policies, no more of them than remain; what was compiled before is not compiled again.

        Returns:
            A candidate for each that was asked, None where its compiler failed or no compile remained.
        """
        results = self.results
        unknown = [one for one in dict.fromkeys(asked) if one not in results.known]
        new = unknown[: self.remaining]
        self.budget.use(len(new))
        self.budget.skipped.update(dict.fromkeys(unknown[len(new) :]))
        pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
        waiting: dict[_Compile, Asked] = {}
        try:
            if new:
                self.report(" and ".join(compiler.title(policy) for compiler, policy in new))
            for (
                compiler,
                policy,
            ) in new:  # lowered in this thread, whose settings JAX obeys; only compilers run in others
                with self._failures_recorded(compiler, policy):
                    waiting[pool.submit(compiler.lowered(policy))] = compiler, policy
            for done in self._completed(waiting):
                compiler, policy = waiting[done]
                with self._failures_recorded(compiler, policy):
                    results.add(compiler, policy, done.result())
                if results.hangs:
                    break
                running = [compiler.title(policy) for each, (compiler, policy) in waiting.items() if each.running()]
                self.report(" and ".join(running) or compiler.title(policy))
        finally:  # also at Ctrl-C, and where one of them failed: no compiler goes on for an answer that nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
            try:
                end = time.monotonic() + (math.inf if interruption_here() is None else _MOST_S)
                while not all(each.done() for each in waiting) and time.monotonic() < end:
                    end_workers()
                    concurrent.futures.wait(waiting, _POLL_S)
                # On an interrupt, keep the compiles that have ended meanwhile.
                for done, one in waiting.items():
                    is_answer = done.done() and not done.cancelled() and done.exception() is None
                    if one not in results.known and is_answer:
                        results.add(*one, done.result())
            finally:
                self.budget.use(-sum(one not in results.known for one in new))  # interrupted
        return [results.known.get(one) for one in asked]

    def _completed(self, waiting: Collection[_Compile]) -> Iterator[_Compile]:
        """Compiles as they end. A signal may have come to another thread than this, which wakes nobody."""
        left = set(waiting)
        while left:
            done, left = concurrent.futures.wait(left, _POLL_S, concurrent.futures.FIRST_COMPLETED)
            self.check()
            yield from done

    @contextmanager
    def _failures_recorded(self, compiler: Compiler, policy: StepPolicy) -> Generator[None]:
        """Record a policy that fails, and go on with the others."""
        try:
            yield
        except (CompileError, PolicyError, LossRefusedError) as error:
            self.check()  # a compile that a signal ended has not failed
            self.results.add_failure(compiler, policy, error)
            if not isinstance(error, CompileError):
                self.budget.use(-1)


def _titles(titles: Sequence[str]) -> str:
    """The policies that share a failure, and the verb."""
    several = dict.fromkeys(titles)
    shown = "; ".join(list(several)[:_SHOWN])
    more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
    return f"{shown}{more} {'were' if len(several) > 1 else 'was'}"
