"""The step in force: the user's step and a policy enter; runs of it leave, waited for and agreed on by all processes."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any, final

from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import DonationWarning, RecoveryError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.ladder.offers import fitting_count
from jaxmem_callbacks.recovery.ladder.replay import Inputs
from jaxmem_callbacks.recovery.ladder.reuse import ENOUGH, addresses, promised_bytes, reused_bytes
from jaxmem_callbacks.recovery.ladder.rungs import Maker, rows_of
from jaxmem_callbacks.recovery.ladder.telling import Telling
from jaxmem_callbacks.recovery.ladder.turns import Turn, take_turn
from jaxmem_callbacks.recovery.ladder.wanted import promised_by

_GRACE_S, _GRACE_STEPS = 5.0, 3


@final
class Running:
    """Runs the step under the policy in force.

    Args:
        maker: Makes the jitted step.
        policy: The policy to begin with.
        agreement: With the other processes.
        telling: Told of a donation that is lost after a restore.
        plan: What was foretold of the step, or None.
    """

    def __init__(
        self, maker: Maker, policy: StepPolicy, agreement: Agreement, telling: Telling, plan: PlanRecord | None
    ) -> None:
        self.maker, self.agreement = maker, agreement
        self._telling, self._plan = telling, plan
        self.step: JitStep = maker.make(policy)
        self._asked = policy.microbatches
        self._chosen_for: int | None = None  # rows of the batch for which recovery chose how many microbatches
        self._others: dict[StepPolicy, JitStep] = {}
        self.verify = False  # whether the next run is the first one after a restore
        self._longest_s = 0.0
        self._near = self._near_heard = False
        self._runs = 0

    def take_policy(self, policy: StepPolicy) -> None:
        """Go on under another policy."""
        self.step, self._chosen_for = self.maker.make(policy), None

    def take_step(self, step: JitStep, inputs: Inputs) -> None:
        """Go on with a step that was made for a batch like this one."""
        self.step, self._chosen_for = step, rows_of(inputs)

    def step_for(self, inputs: Inputs) -> JitStep:
        """The step in force, for a batch that its microbatches divide; else the same with as many as divide this one.

        Only where recovery chose how many there are: under the user's own policy such a batch is an error.
        """
        policy = self.step.policy
        rows = None if policy.microbatches == self._asked else rows_of(inputs)
        if not rows or rows % policy.microbatches == 0:
            return self.step
        other = replace(policy, microbatches=fitting_count(rows, policy.microbatches, self._chosen_for))
        if other not in self._others:
            self._others[other] = self.maker.make(other)
        return self._others[other]

    def near_anywhere(self, *, here: bool) -> bool:
        """Whether any process had seen a near-OOM event at the last run; what is seen here is said at the next one."""
        self._near, heard, self._near_heard = here, self._near_heard, False
        return heard

    def turn(self, holder: list[Any], inputs: Inputs, *, on_trial: bool = False) -> Turn:
        """Run the step on the state in ``holder``, which is empty then.

        Args:
            holder: Has the state.
            inputs: What the step takes besides.
            on_trial: Whether the policy is new, and may be refused.
        """
        began, grace_s = time.monotonic(), max(_GRACE_S, _GRACE_STEPS * self._longest_s)
        watched = addresses(holder[0]) if self.verify else None
        step = self.step_for(inputs)
        turn = take_turn(
            step,
            lambda: (holder.pop(), *inputs),
            self.agreement,
            grace_s=grace_s,
            near=self._near,
            on_trial=on_trial,
        )
        self._runs += 1
        self._near_heard = turn.near
        if watched is not None and turn.result is not None:
            self.verify = False
            self._require_reuse(step, reused_bytes(watched, addresses(self.pair(turn.result)[0])))
        if not turn.failed:
            self._longest_s = max(self._longest_s, time.monotonic() - began)
        return turn

    def pair(self, result: Any) -> tuple[Any, Any]:
        """State and metrics of what the step returned.

        Raises:
            RecoveryError: it returned something else.
        """
        if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004 - a pair
            return result
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        msg = (
            f"{self.step.name} returned {kind}. Expected (state, metrics), where the state is all that the next step takes over: "
            "return (params, opt_state), {'loss': loss}, and take them apart at the step's beginning."
        )
        raise RecoveryError(msg)

    def _require_reuse(self, step: JitStep, reused: int | None) -> None:
        """After a restore: the old state's memory must hold the new state, as compiled, and as a plan foretold."""
        promised, foretold = promised_bytes(step.latest), promised_by(self._plan, step.policy) or 0
        expected = max(promised, foretold)
        if reused is None or reused >= ENOUGH * expected:
            return
        by = "the plan foretold" if foretold > promised else "the program reuses"
        message = (
            f"the first step after a restore reused {format_bytes(reused)} of the old state's memory, where {by} "
            f"{format_bytes(expected)}: old and new state are held at once."
        )
        action = f"Copy the restored state once: {advise('donation.copy', state='state')}, before the first step."
        self._telling.event("donation_lost", self._runs, message, action, lost_bytes=expected - reused)
        warnings.warn(f"{message} {action}", DonationWarning, stacklevel=5)
