"""`jm.Recovery`: steps of the user's own loop, done also where memory ran out on the way.

One page: a snapshot where one is due, the step, and where that fails the ladder: a rung, the state again, the steps since.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, final

from jaxmem_callbacks.config.named import Name, policy_of, resolve_policy
from jaxmem_callbacks.environment.apply import require_applied
from jaxmem_callbacks.records.arguments import (
    require_callable,
    require_function,
    require_names,
    require_path,
    require_whole,
)
from jaxmem_callbacks.records.errors import JaxmemError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy, policy_words
from jaxmem_callbacks.records.presets import Preset, RecoveryMove, RecoveryReport, RecoverySettings
from jaxmem_callbacks.recovery.failure import first_line
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.ladder.checkpoints import CheckpointFolder
from jaxmem_callbacks.recovery.ladder.fallback import FailedStep, Fallback, frontier_below
from jaxmem_callbacks.recovery.ladder.runner import EventSink, Notifier, StepAttempt, StepBuilder, StepRunner
from jaxmem_callbacks.recovery.snapshots import InputBuffer, Inputs, SnapshotStore
from jaxmem_callbacks.transforms.policy import Gradients
from jaxmem_callbacks.transforms.sharding.infer import require_shardings

_State = TypeVar("_State")
_serial = itertools.count()


@final
class Recovery:
    """A train step that continues when memory runs out: from a copy of the state, in less memory, with the same mathematics.

        recovery = jm.Recovery(train_step, "recover", batch_at=batch_at)
        for i in range(steps):
            state, metrics = recovery.step(i, state)

    It takes the place of `jm.jit_step`. Every call waits for its step's result, since only then a failure belongs to a step.
    Each step's metrics come back once: those of steps that are repeated after a failure are dropped.

    Args:
        train_step: ``train_step(state, batch, ...) -> (state, metrics)``, plain or jitted by the user. All that changes from
            step to step is in the state and the inputs.
        policy: What to apply at first, by itself or by name as in `jm.jit_step`, and with a preset its ``recovery`` section;
            the plan's policy where there is a plan and no policy is given.
        batch_at: Gives the batch of a step, the same each time; without it copies of the batches since the last snapshot are
            kept in host memory. What else a step takes is always kept so.
        monitor: A `jm.MemoryMonitor` that records every recovery.
        checkpoints: Folder for `save`, ``save_and_exit`` and snapshots on disk.
        plan: What `jm.plan` gave: stronger remat is then the next point of its frontier.
        donate_argnames: As for `jm.jit_step`.
        state_shardings: Likewise.
        gradients: Likewise.

    Raises:
        RecoveryError: snapshots on disk without a folder.
        TypeError: a step that is no function, a preset or a plan that is none.
    """

    def __init__(  # noqa: PLR0913 - what the run has, each by name
        self,
        train_step: Callable[..., Any],
        policy: StepPolicy | Preset | Name | None = None,
        *,
        batch_at: Callable[[int], Any] | None = None,
        monitor: EventSink | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        plan: Any = None,
        donate_argnames: str | tuple[str, ...] | None = None,
        state_shardings: Any = None,
        gradients: Gradients = "own",
    ) -> None:
        require_function(train_step, "jm.Recovery")
        if batch_at is not None:
            require_callable(
                "jm.Recovery", "batch_at", batch_at, "a function from a step's number to its batch, or None"
            )
        if monitor is not None:
            require_callable("jm.Recovery", "monitor", getattr(monitor, "tell", monitor), "a jm.MemoryMonitor, or None")
        place = (
            None
            if checkpoints is None
            else require_path("jm.Recovery", "checkpoints", checkpoints, "runs/a/checkpoints")
        )
        require_shardings("jm.Recovery", "state_shardings", state_shardings)
        given = None if policy is None else resolve_policy(policy)
        require_applied(given)
        self.settings = recovery_settings(given)
        self._plan = plan_record(plan)
        requested = initial_policy(given, plan)
        builder = StepBuilder(
            train_step=train_step,
            donate_argnames=require_names("jm.Recovery", "donate_argnames", donate_argnames),
            state_shardings=state_shardings,
            gradients=gradients,
        )
        self._notifier = Notifier(monitor)
        self._agreement = Agreement(f"recovery/{next(_serial)}", self.settings.agree_s)
        self._runner = StepRunner(builder, requested, self._agreement, self._notifier, self._plan)
        self._checkpoints = CheckpointFolder(place, requested, self._plan)
        on_disk = self._checkpoints.on_disk(lambda: self.policy) if self.settings.snapshots == "orbax" else None
        self._snapshots = SnapshotStore(self.settings.every_steps, on_disk, self._agreement, self._notifier.line)
        self._batches = InputBuffer(batch_at, self.settings.buffer_bytes, self._notifier.line)
        self._moves: tuple[RecoveryMove, ...] = ()
        self._near_seen = 0
        self._unsaved = False

    def step(self, step: int, state: _State, *inputs: Any) -> tuple[_State, Any]:
        """Do one step.

        Args:
            step: Its number, a Python int.
            state: What the last call returned, or the state to begin with.
            *inputs: The batch and whatever else the step takes; may be left out where there is a ``batch_at``.

        Returns:
            The new state and the step's metrics, complete.

        Raises:
            TypeError, ValueError: a step that is no whole number from 0 on; the state is untouched.
            RecoveryError: there is nothing to go back to, a repeated step gave other metrics, or another process ended.
            Exception: the failure itself where the ladder is exhausted, as it was raised; and every other error of the step.
        """
        try:
            if type(step) is not int or step < 0:
                step = require_whole("recovery.step", "step", step, least=0)
            inputs = self._batches.given(step, inputs)
            if self._snapshots.before(step, state):
                self._batches.begin(step)
            self._batches.keep(step, inputs)
            attempt = self._runner.run([state], inputs)
            if attempt.failed:
                attempt = self._recovered(step, state, inputs, attempt)
            new_state, metrics = self._runner.pair(attempt.result)
        except BaseException as error:
            self._agreement.leave(first_line(error))
            raise
        self._snapshots.after(step, new_state, metrics)
        return new_state, metrics

    @property
    def policy(self) -> StepPolicy:
        """The policy in force."""
        return self._runner.step.policy

    @property
    def report(self) -> RecoveryReport:
        """What was recovered so far, and what the snapshots have cost."""
        return RecoveryReport(
            policy=policy_words(self.policy), moves=self._moves, snapshots=self._snapshots.cost(self._batches.bytes)
        )

    @property
    def latest(self) -> int | None:
        """The step of what was saved last in ``checkpoints``, or None; after a return to an earlier step not the highest one."""
        return self._checkpoints.latest

    def should_save(self, monitor: Any) -> bool:
        """Whether a near-OOM event is new since the last time it was asked; the same answer on every process.

        Call it after each step, on every process; of several processes the answer comes one step late.
        """
        seen = sum(event.kind == "near_oom" for event in monitor.events)
        is_new = seen > self._near_seen
        if self._agreement.count > 1:
            is_new = self._runner.near_anywhere(here=is_new)
        if is_new:
            self._near_seen = seen
        return is_new

    def save_before_oom(self, step: int, state: Any) -> Path | None:
        """Write a checkpoint while there is memory: state, policy and plan, to go on with at ``step``.

        Returns:
            Its folder, complete; None where it could not be written, which is reported once: the run goes on.

        Raises:
            RecoveryError: no ``checkpoints`` folder, or objects that are updated in place.
        """
        step = require_whole("recovery.save_before_oom", "step", step, least=0)
        try:
            where = self._checkpoints.save(step, state, self.policy)
        except JaxmemError:
            raise
        except Exception as error:  # noqa: BLE001 - a full disk ends no run that still has its memory
            if not self._unsaved:
                self._notifier.line(
                    f"the state before step {step} could not be saved: {first_line(error)}. The run goes on."
                )
            self._unsaved = True
            return None
        self._unsaved = False
        self._notifier.line(f"the state before step {step} is saved in {where}.")
        return where

    def restore(self, state: Any, step: int | None = None) -> tuple[int, Any]:
        """The checkpoint that was saved last, or that of a step, in place of a state that was just made.

        Policy, plan, mesh, devices and versions are compared with those of the checkpoint. The first step after it is watched:
        it must reuse the state's memory as the program was compiled to.

        Args:
            state: A state of the same tree, shapes and dtypes, or `jax.ShapeDtypeStruct` of it; its shardings are used.
            step: Which checkpoint; None for the one that was saved last.

        Returns:
            The step to go on with, and the state.

        Raises:
            RecoveryError: there is none, or it is another state's.
        """
        step = None if step is None else require_whole("recovery.restore", "step", step, least=0)
        number, restored, policy = self._checkpoints.restore(state, step)
        if policy is not None and policy != self.policy:
            self._notifier.line(f"goes on at step {number} with {policy_words(policy)}, as the run that saved it.")
            self._runner.take_policy(policy)
        self._runner.verify = True
        return number, restored

    def _recovered(self, step: int, state: Any, inputs: Inputs, failed: StepAttempt) -> StepAttempt:
        """Apply the ladder until the step succeeds; raises the first failure where none helps."""
        fallback = Fallback(
            self.settings,
            self._runner,
            self._snapshots,
            self._batches,
            frontier=frontier_below(self._plan, self.policy),
            failure=FailedStep(step=step, state=state, inputs=inputs, attempt=failed),
        )
        ended: BaseException | None = None
        try:
            attempt = fallback.run()
            if attempt is None:
                ended = fallback.end(self._checkpoints, self._agreement)
        except Exception as error:
            if error.__cause__ is None:
                error.__cause__ = failed.error  # what it all began with is shown too
            raise
        finally:
            if fallback.move is not None:
                self._moves += (fallback.move,)
                cause = next(report["text"] for report in failed.reports if report["how"] == "oom_facts")
                self._notifier.move(fallback.move, cause=cause, action=fallback.action)
        if ended is not None:
            raise ended
        assert attempt is not None  # one of the two
        return attempt


def recovery_settings(policy: Any) -> RecoverySettings:
    """The ``recovery`` section of a preset; the defaults for everything else."""
    return policy.recovery if isinstance(policy, Preset) else RecoverySettings()


def initial_policy(policy: Any, plan: Any) -> StepPolicy:
    """The policy to begin with: the given one, else the plan's, else none.

    Raises:
        TypeError: something that is no policy and no preset.
        PlanError: the policy of a plan in which nothing fits.
    """
    has_policy = not isinstance(policy, Preset) or any(key.startswith("policy.") for key in policy.said)
    if policy is not None and (has_policy or plan is None):
        return policy_of(policy)
    return StepPolicy() if plan is None else policy_of(plan.policy)


def plan_record(plan: Any) -> PlanRecord | None:
    """The record of a plan.

    Raises:
        TypeError: something else.
    """
    record = getattr(plan, "record", None)
    if plan is None or isinstance(record, PlanRecord):
        return record
    msg = f"Recovery got {type(plan).__name__} as plan. Expected a plan of jm.plan or jm.load_plan."
    raise TypeError(msg)
