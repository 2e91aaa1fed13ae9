"""A fallback: from a failure to a step that runs, or to the end of the run with its state saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax

from jaxmem_callbacks.planning.choice import pareto
from jaxmem_callbacks.programs.memory import step_memory
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.errors import CompileError, DefragmentError, LossRefusedError, PolicyError, RecoveryError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.presets import RecoveryMove, RecoverySettings, Rung
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.defragment import defragment
from jaxmem_callbacks.recovery.failure import first_line, oom_facts
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.ladder.checkpoints import CheckpointFolder
from jaxmem_callbacks.recovery.ladder.runner import StepAttempt, StepBuilder, StepRunner, rows_of
from jaxmem_callbacks.recovery.snapshots import HostSnapshot, InputBuffer, Inputs, SnapshotStore
from jaxmem_callbacks.transforms.tracing import is_weak

# From what keeps most to what keeps least. Everything between `none` and `full` differs by model: a plan knows better.
_REMATS = (("none", 1), ("dots_saveable", 1), ("full", 1), ("full", 2))
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackOption:
    """One change of the step's policy, or of its memory, that may make the step fit.

    Attributes:
        rung: The rung of the ladder that it belongs to.
        microbatches: The number of microbatches to change to.
        remat: A policy whose remat to change to.
        why: Why this rung has nothing to try, or an empty text.
    """

    rung: Rung
    microbatches: int | None = None
    remat: StepPolicy | None = None
    why: str = ""

    def on(self, policy: StepPolicy) -> StepPolicy:
        """The policy in force with this change: microbatches keep the remat chosen before, and the other way round."""
        if self.microbatches is not None:
            return replace(policy, microbatches=self.microbatches)
        if self.remat is None:
            return policy
        other = self.remat
        return replace(
            policy,
            remat=other.remat,
            segments=other.segments,
            levels=other.levels,
            keep=other.keep,
            save=other.save,
            offload=other.offload,
        )


def fallback_options(
    settings: RecoverySettings, policy: StepPolicy, *, rows: int | None, frontier: Sequence[StepPolicy] = ()
) -> Iterator[FallbackOption]:
    """The options in the order of the ladder.

    Args:
        settings: Has the ladder.
        policy: The one that failed.
        rows: Of the batch, or None where it has no common leading dimension.
        frontier: Policies of a plan from most bytes to least, below the one in force; they take the place of the usual ones.
    """
    for rung in settings.ladder:
        if rung == "microbatches":
            counts = microbatch_counts(policy.microbatches, settings.max_microbatches, rows)
            yield from (FallbackOption(rung=rung, microbatches=count) for count in counts)
            if not counts:
                yield FallbackOption(rung=rung, why=_no_count(policy.microbatches, settings.max_microbatches, rows))
        elif rung == "remat":
            yield from (FallbackOption(rung=rung, remat=stronger) for stronger in frontier or stronger_remats(policy))
        else:
            yield FallbackOption(rung=rung)


def microbatch_counts(now: int, most: int, rows: int | None) -> list[int]:
    """Numbers of microbatches above ``now``, each at least twice the one before, that divide the rows."""
    counts: list[int] = []
    for _ in range(_MOST_DOUBLINGS):
        needed = 2 * now
        if rows is not None:
            needed = next((count for count in range(needed, rows + 1) if rows % count == 0), most + 1)
        if needed > most:
            break
        counts.append(needed)
        now = needed
    return counts


def _no_count(now: int, most: int, rows: int | None) -> str:
    if 2 * now > most:
        return f"twice the {now} in force are more than max_microbatches={most}"
    return f"no number from {2 * now} to max_microbatches={most} divides the batch's {rows} rows"


def stronger_remats(policy: StepPolicy) -> list[StepPolicy]:
    """The usual policies that keep less than this one, from most to least."""
    at = next((i for i, pair in enumerate(_REMATS) if pair == (policy.remat, policy.levels)), 1)
    if policy.remat == "full" and (policy.keep or policy.save or policy.segments is not None):
        at -= 1  # the same policy without what it keeps in addition to its cuts
    return [StepPolicy(remat=remat, levels=levels) for remat, levels in _REMATS[at + 1 :]]


@dataclass(frozen=True, slots=True)
class CompiledOption:
    """An option that was compiled.

    Attributes:
        step: What to go on with; None where it does not help.
        why: Why not, or what it needs.
        need: Bytes on one device by its compiler; None where it was not compiled.
    """

    step: JitStep | None
    why: str
    need: int | None = None


def compile_option(builder: StepBuilder, policy: StepPolicy, args: Sequence[Any], *, had: int | None) -> CompiledOption:
    """Compile the step under another policy, for arguments of the same shapes, and compare what it needs.

    Args:
        builder: Builds the step.
        policy: The other policy.
        args: The arguments that failed, donated or not; they are read for their shapes only.
        had: What the policy that failed needs; None where its very compile ran out of memory.
    """
    candidate, words = builder.build(policy), policy_words(policy)
    try:
        need = need_of(candidate, args)
    except (PolicyError, LossRefusedError, CompileError) as error:
        return CompiledOption(None, f"{words} is refused: {error}")
    if need is None:
        return CompiledOption(None, f"{words} ran out of memory in the compiler")
    if had is not None and need >= had:
        return CompiledOption(
            None, f"{words} needs {format_bytes(need)}, no less than the {format_bytes(had)} before", need
        )
    return CompiledOption(candidate, f"{format_bytes(need)}, {_before(had)} before", need)


def need_of(step: JitStep, args: Sequence[Any]) -> int | None:
    """Bytes on one device that a step needs for arguments like these; None where the compile itself runs out of memory."""
    try:
        return step_memory(step, *(jax.tree.map(shape_of, each) for each in args)).step_bytes
    except Exception as error:
        if oom_facts(error) is None:
            raise
        return None


def _before(had: int | None) -> str:
    return "too much to compile" if had is None else format_bytes(had)


def shape_of(leaf: Any) -> Any:
    """An array as its shape, type and place, also where it was donated; what is no array of JAX as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    placed = leaf.sharding if getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=is_weak(leaf))


def defragmented(state: Any) -> tuple[Any, str]:
    """The state moved together, and why that did not help, or an empty text where it did.

    Consumes its argument, which comes back with the same values in every case.
    """
    try:
        state, report = defragment(state)
    except DefragmentError as error:
        return state if error.tree is None else error.tree, str(error).partition("\n")[0]
    if report.moved:
        return state, ""
    return state, report.reason or "there was nothing to move"


def why_not_defragmented() -> str:
    """Why there is no use in moving arrays on this platform; empty on GPUs."""
    platform = jax.default_backend()
    if platform == "gpu":
        return ""
    return {
        "cpu": "the CPU's memory is no pool that could be split",
        "tpu": "a TPU moves its arrays together by itself",
    }.get(platform, f"unknown, because {platform} reports nothing of its memory")


def frontier_below(plan: PlanRecord | None, policy: StepPolicy) -> list[StepPolicy]:
    """Policies of the plan's frontier that need less than this one's remat does, from most bytes to least."""
    if plan is None:
        return []
    chosen = plan.candidates[plan.chosen]
    like = [each for each in plan.candidates if (each.batch_rows, each.mesh) == (chosen.batch_rows, chosen.mesh)]
    like = [each for each in like if each.policy.sharding == chosen.policy.sharding and each.step_bytes is not None]
    now = next((each for each in like if _remat(each.policy) == _remat(policy)), chosen)
    return [each.policy for each in pareto(like) if (each.step_bytes or 0) < (now.step_bytes or 0)]


def _remat(policy: StepPolicy) -> tuple[Any, ...]:
    return policy.remat, policy.segments, policy.levels, policy.keep, policy.save, policy.offload


def save_before_exit(
    checkpoints: CheckpointFolder,
    snapshots: SnapshotStore,
    agreement: Agreement,
    *,
    policy: StepPolicy,
    stuck: tuple[int, ...],
) -> tuple[Path | None, str]:
    """Save the snapshot with the policy to go on with; where it is, or why not.

    Args:
        checkpoints: Where to.
        snapshots: Holds the snapshot.
        agreement: With the other processes; each sends its outcome.
        policy: What the next run should run under.
        stuck: Processes that wait in a collective for one that failed: their devices answer nobody.
    """
    snapshot = snapshots.snapshot
    where, why = None, ""
    try:
        if checkpoints.folder is None:
            why = "no folder was given, as checkpoints='runs/a/checkpoints' of jm.Recovery would"
        elif snapshot is None:
            why = "no snapshot was taken"
        elif not stuck and agreement.count > 1:
            where = checkpoints.save(snapshot.step, snapshot.restore(), policy)
        elif not isinstance(snapshot, HostSnapshot):
            where = checkpoints.save(snapshot.step, snapshot.restore(), policy) if not stuck else None
            why = "" if where else f"the snapshot of step {snapshot.step} on disk stays as it is"
        elif agreement.own == 0:  # the one whose NumPy arrays Orbax writes; its devices are asked for nothing
            if snapshot.is_whole:
                where = checkpoints.save_alone(snapshot, policy)
            else:
                why = "process 0 has not the whole state; snapshots on disk (`recovery: {snapshots: orbax}`) would be complete"
    except Exception as error:  # noqa: BLE001 - the failure that ends the run must not be hidden by another one
        why = f"it could not be written: {first_line(error)}"
    answers = agreement.exchange({"where": None if where is None else str(where), "why": why})
    place = next((answer["where"] for answer in answers if answer["where"]), None)
    return (Path(place), "") if place else (None, next((answer["why"] for answer in answers if answer["why"]), ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedStep:
    """A step that ran out of memory. It holds the call's arrays, donated or not: do not keep it.

    Attributes:
        step: Its number.
        state: The state that it was given.
        inputs: Its other inputs.
        attempt: The outcome on every process.
    """

    step: int
    state: Any
    inputs: Inputs
    attempt: StepAttempt

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the call."""
        return (self.state, *self.inputs)


@final
class Fallback:
    """Tries the options of the ladder until the failed step runs.

    Args:
        settings: Has the ladder.
        runner: Runs the step under the policy in force, and then under another.
        snapshots: Holds the state to go back to.
        batches: Holds the inputs since then.
        frontier: Policies of a plan below the one in force.
        failure: The step that failed.
    """

    def __init__(  # noqa: PLR0913 - each part of a recovery once
        self,
        settings: RecoverySettings,
        runner: StepRunner,
        snapshots: SnapshotStore,
        batches: InputBuffer,
        *,
        frontier: Sequence[StepPolicy],
        failure: FailedStep,
    ) -> None:
        self._settings, self._runner, self._snapshots, self._batches = settings, runner, snapshots, batches
        self._failure, self._began = failure, time.monotonic()
        runner.take_step(runner.step_for(failure.inputs), failure.inputs)  # what really failed
        self._passed: list[str] = []
        self._stuck: tuple[int, ...] = failure.attempt.on("stuck")
        self._need: int | None = None
        self._options = fallback_options(settings, runner.step.policy, rows=rows_of(failure.inputs), frontier=frontier)
        self.move: RecoveryMove | None = None
        self.action = ""

    def run(self) -> StepAttempt | None:
        """Apply option after option. The attempt that succeeded, or None where nothing helped."""
        if self._stuck:
            self._skip_the_rest()
            return None
        self._need = need_of(self._runner.step, self._failure.arguments)
        refused: set[Rung] = set()
        for option in self._options:
            if option.rung == "save_and_exit":
                break
            if option.rung in refused:
                continue
            if option.why:
                self._passed.append(f"{option.rung}: {option.why}")
                continue
            candidate, why, need, is_alive = self._acceptable(option)
            if candidate is None:
                self._passed.append(f"{option.rung}: {why}")
                continue
            before, self._runner.step = self._runner.step, candidate
            begun, attempt, refusal = self._again(option, [self._failure.state] if is_alive else [])
            if attempt is None:
                self._runner.step = before
                refused.add(option.rung)
                self._passed.append(f"{option.rung}: {refusal}")
            elif attempt.failed:
                self._need, self._stuck = need, attempt.on("stuck")
                self._passed.append(f"{option.rung}: {policy_words(candidate.policy)} ran out too")
                if self._stuck:
                    self._skip_the_rest()
                    return None
            else:
                self._done(option.rung, begun, f"Compiled need: {why}." if why else "")
                return attempt
        return None

    def _skip_the_rest(self) -> None:
        """No option is taken from here on, so that the first of them is what a run elsewhere begins with."""
        who = ", ".join(map(str, self._stuck))
        self._passed.append(f"all others: process {who} waits in a collective for one that failed and cannot be freed")

    def end(self, checkpoints: CheckpointFolder, agreement: Agreement) -> BaseException:
        """Save where the ladder ends in ``save_and_exit``, and return the error that this process ends with.

        The process on which memory ran out ends with that failure, as it was raised; the others with one that names it.
        """
        where, attempt = None, self._failure.attempt
        if "save_and_exit" in self._settings.ladder:
            policy = self._first_that_needs_less() if self._stuck else self._runner.step.policy
            where, why = save_before_exit(checkpoints, self._snapshots, agreement, policy=policy, stuck=self._stuck)
            if where is None:
                self._passed.append(f"save_and_exit: {why}")
        saved = "" if where is None else f"Go on from {where}: recovery.restore(state)."
        self._done(None if where is None else "save_and_exit", self._failure.step, saved)
        if attempt.error is not None:
            return attempt.error
        who = attempt.on("oom_facts")
        msg = (
            f"memory ran out in step {self._failure.step} on process {', '.join(map(str, who))} of {agreement.count}: "
            f"{attempt.reports[who[0]]['text']}. Nothing on the ladder helped all processes, so this one ends too. {saved}"
        )
        return RecoveryError(msg)

    def _acceptable(self, option: FallbackOption) -> tuple[JitStep | None, str, int | None, bool]:
        """Whether an option helps, on all processes.

        Returns:
            The step to go on with, or None; what it needs in words, or why it does not help; in bytes; whether the state lives.
        """
        candidate, why, need = self._runner.step, why_not_defragmented(), self._need
        helps = not why
        if option.rung != "defragment":
            policy = option.on(self._runner.step.policy)
            compiled = compile_option(self._runner.builder, policy, self._failure.arguments, had=self._need)
            candidate, why, need, helps = compiled.step, compiled.why, compiled.need, compiled.step is not None
        alive = _is_alive(self._failure.state)
        answers = self._runner.agreement.exchange({"helps": helps, "why": why, "alive": alive})
        refusal = next((answer["why"] for answer in answers if not answer["helps"]), None)
        if refusal is not None:
            return None, refusal, None, False
        return candidate, why, need, all(answer["alive"] for answer in answers)

    def _again(self, option: FallbackOption, holder: list[Any]) -> tuple[int, StepAttempt | None, str]:
        """Do the step, from its own state where ``holder`` has it, else from the snapshot on.

        Returns:
            The first step that was done, how the last one went, and why nothing came of it where that is None.
        """
        step, why = self._failure.step, ""
        begun, attempt = step, None
        try:
            if not holder:
                snapshot = self._snapshots.snapshot
                assert snapshot is not None  # every step begins with one
                begun, self._runner.verify = snapshot.step, True
                holder.append(snapshot.restore())
            if option.rung == "defragment":
                holder[0], why = defragmented(holder[0])
        except Exception as error:
            if oom_facts(error) is None:
                raise
            why = first_line(error)
        answers = self._runner.agreement.exchange({"why": why})
        if any(answer["why"] for answer in answers):
            return begun, None, next(answer["why"] for answer in answers if answer["why"])
        for number in range(begun, step + 1):
            attempt = self._runner.run(holder, self._inputs(number), on_trial=True)
            if attempt.refusal:
                return begun, None, attempt.refusal
            if attempt.failed or number == step:
                break
            done, metrics = self._runner.pair(attempt.result)
            self._snapshots.require_same(number, metrics)
            holder = [done]
        return begun, attempt, ""

    def _inputs(self, number: int) -> Inputs:
        """What a step took in addition: those of the failed call, unless they were donated to it or to a rung before."""
        given = self._failure.inputs
        return given if number == self._failure.step and _is_alive(given) else self._batches.of(number)

    def _first_that_needs_less(self) -> StepPolicy:
        """The first policy of the ladder that needs less, for a run that goes on elsewhere; compiled here, not agreed on."""
        now = self._runner.step.policy
        need = need_of(self._runner.step, self._failure.arguments)
        for option in self._options:
            if option.rung in ("microbatches", "remat") and not option.why:
                compiled = compile_option(self._runner.builder, option.on(now), self._failure.arguments, had=need)
                if compiled.step is not None:
                    return compiled.step.policy
        return now

    def _done(self, rung: Rung | None, begun: int, action: str) -> None:
        self.action = action
        self.move = RecoveryMove(
            step=self._failure.step,
            rung=rung,
            policy=policy_words(self._runner.step.policy),
            from_step=begun,
            failed_on=self._failure.attempt.on("oom_facts"),
            passed_over=tuple(self._passed),
            seconds=time.monotonic() - self._began,
        )


def _is_alive(tree: Any) -> bool:
    """Whether no array of a tree is deleted or donated."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
