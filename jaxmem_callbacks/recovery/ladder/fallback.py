"""A fallback: from a failure to a step that runs, or to the end of the run with its state saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax

from jaxmem_callbacks.planning.search import pareto
from jaxmem_callbacks.programs.memory import step_memory
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.errors import CompileError, DefragmentError, LossRefusedError, PolicyError, RecoveryError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.presets import RecoveryMove, RecoverySettings, Rung
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.defragment import defragment
from jaxmem_callbacks.recovery.failure import ran_out
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.ladder.checkpoints import Saving
from jaxmem_callbacks.recovery.ladder.runner import Maker, Running, Turn, first_line, rows_of
from jaxmem_callbacks.recovery.snapshots import Batches, HostSnapshot, Inputs, Keeper
from jaxmem_callbacks.transforms.leaves import is_weak

# From what keeps most to what keeps least. Everything between `none` and `full` differs by model: a plan knows better.
_REMATS = (("none", 1), ("dots_saveable", 1), ("full", 1), ("full", 2))
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One thing to try.

    Attributes:
        rung: What it is.
        microbatches: How many there are to be.
        remat: A policy whose remat is to be taken.
        why: Why there is nothing to try on this rung, or an empty text.
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


def offers(
    settings: RecoverySettings, policy: StepPolicy, *, rows: int | None, frontier: Sequence[StepPolicy] = ()
) -> Iterator[Offer]:
    """What to try one after the other.

    Args:
        settings: Has the ladder.
        policy: The one that failed.
        rows: Of the batch, or None where it has no common leading dimension.
        frontier: Policies of a plan from most bytes to least, below the one in force; they take the place of the usual ones.
    """
    for rung in settings.ladder:
        if rung == "microbatches":
            counts = microbatch_counts(policy.microbatches, settings.max_microbatches, rows)
            yield from (Offer(rung=rung, microbatches=count) for count in counts)
            if not counts:
                yield Offer(rung=rung, why=_no_count(policy.microbatches, settings.max_microbatches, rows))
        elif rung == "remat":
            yield from (Offer(rung=rung, remat=stronger) for stronger in frontier or stronger_remats(policy))
        else:
            yield Offer(rung=rung)


def microbatch_counts(now: int, most: int, rows: int | None) -> list[int]:
    """Numbers of microbatches above ``now``, each at least twice the one before, that divide the rows."""
    counts: list[int] = []
    for _ in range(_MOST_DOUBLINGS):
        wanted = 2 * now
        if rows is not None:
            wanted = next((count for count in range(wanted, rows + 1) if rows % count == 0), most + 1)
        if wanted > most:
            break
        counts.append(wanted)
        now = wanted
    return counts


def _no_count(now: int, most: int, rows: int | None) -> str:
    if 2 * now > most:
        return f"twice the {now} in force are more than max_microbatches={most}"
    return f"no number from {2 * now} to max_microbatches={most} divides the batch's {rows} rows"


def stronger_remats(policy: StepPolicy) -> list[StepPolicy]:
    """The usual policies that keep less than this one, from most to least."""
    at = next((i for i, pair in enumerate(_REMATS) if pair == (policy.remat, policy.levels)), 1)
    if policy.remat == "full" and (policy.keep or policy.save or policy.segments is not None):
        at -= 1  # the same policy without what it keeps besides
    return [StepPolicy(remat=remat, levels=levels) for remat, levels in _REMATS[at + 1 :]]


@dataclass(frozen=True, slots=True)
class Tried:
    """An offer that was compiled.

    Attributes:
        step: What to go on with; None where it does not help.
        why: Why not, or what it needs.
        need: Bytes on one device by its compiler; None where it was not compiled.
    """

    step: JitStep | None
    why: str
    need: int | None = None


def try_policy(maker: Maker, policy: StepPolicy, args: Sequence[Any], *, had: int | None) -> Tried:
    """Compile the step under another policy, for arguments of the same shapes, and compare what it needs.

    Args:
        maker: Makes the step.
        policy: The other policy.
        args: The arguments that failed, donated or not; they are read for their shapes only.
        had: What the policy that failed needs; None where its very compile ran out of memory.
    """
    candidate, words = maker.make(policy), policy_words(policy)
    try:
        need = need_of(candidate, args)
    except (PolicyError, LossRefusedError, CompileError) as error:
        return Tried(None, f"{words} is refused: {error}")
    if need is None:
        return Tried(None, f"{words} ran out of memory in the compiler")
    if had is not None and need >= had:
        return Tried(None, f"{words} needs {format_bytes(need)}, no less than the {format_bytes(had)} before", need)
    return Tried(candidate, f"{format_bytes(need)}, {_before(had)} before", need)


def need_of(step: JitStep, args: Sequence[Any]) -> int | None:
    """Bytes on one device that a step needs for arguments like these; None where the compile itself runs out of memory."""
    try:
        return step_memory(step, *(jax.tree.map(shape_of, each) for each in args)).step_bytes
    except Exception as error:
        if ran_out(error) is None:
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


def why_not_moved() -> str:
    """Why there is no use in moving arrays on this platform; empty on GPUs."""
    platform = jax.default_backend()
    if platform == "gpu":
        return ""
    return {
        "cpu": "the CPU's memory is no pool that could be split",
        "tpu": "a TPU moves its arrays together by itself",
    }.get(platform, f"unknown, because {platform} tells nothing of its memory")


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


def saved_last(
    saving: Saving, keeper: Keeper, agreement: Agreement, *, policy: StepPolicy, stuck: tuple[int, ...]
) -> tuple[Path | None, str]:
    """Save the snapshot with the policy to go on with; where it is, or why not.

    Args:
        saving: Where to.
        keeper: Has the snapshot.
        agreement: With the other processes; all of them say how it went.
        policy: What the next run should run under.
        stuck: Processes that wait in a collective for one that failed: their devices answer nobody.
    """
    snapshot = keeper.snapshot
    where, why = None, ""
    try:
        if saving.folder is None:
            why = "no folder was given, as checkpoints='runs/a/checkpoints' of jm.Recovery would"
        elif snapshot is None:
            why = "no snapshot was taken"
        elif not stuck and agreement.count > 1:
            where = saving.save(snapshot.step, snapshot.restore(), policy)
        elif not isinstance(snapshot, HostSnapshot):
            where = saving.save(snapshot.step, snapshot.restore(), policy) if not stuck else None
            why = "" if where else f"the snapshot of step {snapshot.step} on disk stays as it is"
        elif agreement.own == 0:  # the one whose NumPy arrays Orbax writes; its devices are asked for nothing
            if snapshot.is_whole:
                where = saving.save_alone(snapshot, policy)
            else:
                why = "process 0 has not the whole state; snapshots on disk (`recovery: {snapshots: orbax}`) would be complete"
    except Exception as error:  # noqa: BLE001 - the failure that ends the run must not be hidden by another one
        why = f"it could not be written: {first_line(error)}"
    heard = agreement.exchange({"where": None if where is None else str(where), "why": why})
    place = next((words["where"] for words in heard if words["where"]), None)
    return (Path(place), "") if place else (None, next((words["why"] for words in heard if words["why"]), ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A step that ran out of memory. Holds the call's arrays, donated or not: not to be kept.

    Attributes:
        step: Its number.
        state: The state that it was given.
        inputs: What it took besides.
        turn: How it went on every process.
    """

    step: int
    state: Any
    inputs: Inputs
    turn: Turn

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the call."""
        return (self.state, *self.inputs)


@final
class Walk:
    """Tries rung after rung.

    Args:
        settings: Has the ladder.
        running: The step in force; goes on with another one.
        keeper: Has the state to go back to.
        batches: Has the inputs since then.
        frontier: Policies of a plan below the one in force.
        failure: What happened.
    """

    def __init__(  # noqa: PLR0913 - each part of a recovery once
        self,
        settings: RecoverySettings,
        running: Running,
        keeper: Keeper,
        batches: Batches,
        *,
        frontier: Sequence[StepPolicy],
        failure: Failure,
    ) -> None:
        self._settings, self._running, self._keeper, self._batches = settings, running, keeper, batches
        self._failure, self._began = failure, time.monotonic()
        running.take_step(running.step_for(failure.inputs), failure.inputs)  # what really failed
        self._passed: list[str] = []
        self._stuck: tuple[int, ...] = failure.turn.on("stuck")
        self._need: int | None = None
        self._offers = offers(settings, running.step.policy, rows=rows_of(failure.inputs), frontier=frontier)
        self.move: RecoveryMove | None = None
        self.action = ""

    def down(self) -> Turn | None:
        """How the failed step went at last; None where nothing helped."""
        if self._stuck:
            self._pass_over_the_others()
            return None
        self._need = need_of(self._running.step, self._failure.arguments)
        refused: set[Rung] = set()
        for offer in self._offers:
            if offer.rung == "save_and_exit":
                break
            if offer.rung in refused:
                continue
            if offer.why:
                self._passed.append(f"{offer.rung}: {offer.why}")
                continue
            candidate, why, need, is_alive = self._acceptable(offer)
            if candidate is None:
                self._passed.append(f"{offer.rung}: {why}")
                continue
            before, self._running.step = self._running.step, candidate
            begun, turn, refusal = self._again(offer, [self._failure.state] if is_alive else [])
            if turn is None:
                self._running.step = before
                refused.add(offer.rung)
                self._passed.append(f"{offer.rung}: {refusal}")
            elif turn.failed:
                self._need, self._stuck = need, turn.on("stuck")
                self._passed.append(f"{offer.rung}: {policy_words(candidate.policy)} ran out too")
                if self._stuck:
                    self._pass_over_the_others()
                    return None
            else:
                self._done(offer.rung, begun, f"Compiled need: {why}." if why else "")
                return turn
        return None

    def _pass_over_the_others(self) -> None:
        """No offer is taken from here on, so that the first of them is what a run elsewhere begins with."""
        who = ", ".join(map(str, self._stuck))
        self._passed.append(f"all others: process {who} waits in a collective for one that failed and cannot be freed")

    def end(self, saving: Saving, agreement: Agreement) -> BaseException:
        """Save where the ladder says so, and give the error that this process ends with.

        The process on which memory ran out ends with that failure, as it was raised; the others with one that names it.
        """
        where, turn = None, self._failure.turn
        if "save_and_exit" in self._settings.ladder:
            policy = self._first_that_needs_less() if self._stuck else self._running.step.policy
            where, why = saved_last(saving, self._keeper, agreement, policy=policy, stuck=self._stuck)
            if where is None:
                self._passed.append(f"save_and_exit: {why}")
        saved = "" if where is None else f"Go on from {where}: recovery.restore(state)."
        self._done(None if where is None else "save_and_exit", self._failure.step, saved)
        if turn.error is not None:
            return turn.error
        who = turn.on("ran_out")
        msg = (
            f"memory ran out in step {self._failure.step} on process {', '.join(map(str, who))} of {agreement.count}: "
            f"{turn.words[who[0]]['text']}. Nothing on the ladder helped all processes, so this one ends too. {saved}"
        )
        return RecoveryError(msg)

    def _acceptable(self, offer: Offer) -> tuple[JitStep | None, str, int | None, bool]:
        """What an offer is worth on all processes.

        Returns:
            The step to go on with, or None; what it needs in words, or why it does not help; in bytes; whether the state lives.
        """
        candidate, why, need = self._running.step, why_not_moved(), self._need
        helps = not why
        if offer.rung != "defragment":
            policy = offer.on(self._running.step.policy)
            tried = try_policy(self._running.maker, policy, self._failure.arguments, had=self._need)
            candidate, why, need, helps = tried.step, tried.why, tried.need, tried.step is not None
        alive = _is_alive(self._failure.state)
        heard = self._running.agreement.exchange({"helps": helps, "why": why, "alive": alive})
        refusal = next((words["why"] for words in heard if not words["helps"]), None)
        if refusal is not None:
            return None, refusal, None, False
        return candidate, why, need, all(words["alive"] for words in heard)

    def _again(self, offer: Offer, holder: list[Any]) -> tuple[int, Turn | None, str]:
        """Do the step, from its own state where ``holder`` has it, else from the snapshot on.

        Returns:
            The first step that was done, how the last one went, and why nothing came of it where that is None.
        """
        step, why = self._failure.step, ""
        begun, turn = step, None
        try:
            if not holder:
                snapshot = self._keeper.snapshot
                assert snapshot is not None  # every step begins with one
                begun, self._running.verify = snapshot.step, True
                holder.append(snapshot.restore())
            if offer.rung == "defragment":
                holder[0], why = defragmented(holder[0])
        except Exception as error:
            if ran_out(error) is None:
                raise
            why = first_line(error)
        heard = self._running.agreement.exchange({"why": why})
        if any(words["why"] for words in heard):
            return begun, None, next(words["why"] for words in heard if words["why"])
        for number in range(begun, step + 1):
            turn = self._running.turn(holder, self._inputs(number), on_trial=True)
            if turn.refusal:
                return begun, None, turn.refusal
            if turn.failed or number == step:
                break
            done, metrics = self._running.pair(turn.result)
            self._keeper.require_same(number, metrics)
            holder = [done]
        return begun, turn, ""

    def _inputs(self, number: int) -> Inputs:
        """What a step took besides: those of the failed call, unless they were donated to it or to a rung before."""
        given = self._failure.inputs
        return given if number == self._failure.step and _is_alive(given) else self._batches.of(number)

    def _first_that_needs_less(self) -> StepPolicy:
        """The first policy of the ladder that needs less, for a run that goes on elsewhere; compiled here, not agreed on."""
        now = self._running.step.policy
        need = need_of(self._running.step, self._failure.arguments)
        for offer in self._offers:
            if offer.rung in ("microbatches", "remat") and not offer.why:
                tried = try_policy(self._running.maker, offer.on(now), self._failure.arguments, had=need)
                if tried.step is not None:
                    return tried.step.policy
        return now

    def _done(self, rung: Rung | None, begun: int, action: str) -> None:
        self.action = action
        self.move = RecoveryMove(
            step=self._failure.step,
            rung=rung,
            policy=policy_words(self._running.step.policy),
            from_step=begun,
            failed_on=self._failure.turn.on("ran_out"),
            passed_over=tuple(self._passed),
            seconds=time.monotonic() - self._began,
        )


def _is_alive(tree: Any) -> bool:
    """Whether no array of a tree is deleted or donated."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
