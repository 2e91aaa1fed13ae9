"""The step in force, and one run of it; what a recovery reports of it: a line on stderr and an event for the monitor."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, final

import jax

from jaxmem_callbacks._compat.arrays import parts_of
from jaxmem_callbacks.programs.steps.program import Program
from jaxmem_callbacks.programs.steps.step import JitStep, jit_step
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import (
    DonationWarning,
    PolicyError,
    RecoveryError,
)
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.presets import RecoveryMove
from jaxmem_callbacks.records.runs import EventKind, MemoryEvent
from jaxmem_callbacks.records.terminal import print_line
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.failure import first_line, oom_facts
from jaxmem_callbacks.recovery.ladder.agreement import Agreement, Message
from jaxmem_callbacks.recovery.snapshots import Inputs
from jaxmem_callbacks.transforms.policy import Gradients
from jaxmem_callbacks.transforms.tracing import is_key

How = Literal["ok", "oom_facts", "stuck", "refused"]
_LISTEN_S = 0.25
_SHORTEST_S, _LONGEST_S = 0.0001, 0.002


@dataclass(slots=True)
class StepAttempt:
    """The outcome of one run of a step.

    Attributes:
        result: What the step returned, complete; None where it failed here or was not complete.
        error: The failure for want of memory on this process.
        reports: The report of each process.
    """

    result: Any
    error: Exception | None
    reports: Sequence[Message]

    def on(self, how: How) -> tuple[int, ...]:
        """The processes with this outcome."""
        return tuple(number for number, report in enumerate(self.reports) if report["how"] == how)

    @property
    def failed(self) -> bool:
        """Whether memory ran out anywhere."""
        return bool(self.on("oom_facts"))

    @property
    def refusal(self) -> str:
        """Why the library refused the policy, on the first process that reports it; empty where none does."""
        return next((report["text"] for report in self.reports if report["how"] == "refused"), "")

    @property
    def near(self) -> bool:
        """Whether any process has seen a near-OOM event since the last run."""
        return any(report.get("near") for report in self.reports)


def run_step(  # noqa: PLR0913 - a run, and what is known of it
    run: Callable[..., Any],
    call: Callable[[], tuple[Any, ...]],
    agreement: Agreement,
    *,
    grace_s: float,
    near: bool = False,
    on_trial: bool = False,
) -> StepAttempt:
    """Run a step and collect its outcome from every process.

    Args:
        run: The jitted step.
        call: Gives its arguments, which nobody here keeps.
        agreement: With the other processes.
        grace_s: How long a run may go on after another process has reported a failure.
        near: Whether this process has seen a near-OOM event.
        on_trial: Whether the policy is a new one, which the library may refuse for this loss and batch.

    Raises:
        RecoveryError: another process ended, or did not report in time.
        Exception: what the step raised, where that was no want of memory.
    """
    result: Any = None
    error: Exception | None = None
    how, text = cast("How", "ok"), ""
    try:
        result = run(*call())
        if not _is_complete(result, agreement, grace_s):
            how, result = "stuck", None
    except Exception as raised:
        if on_trial and isinstance(raised, PolicyError):
            how, text = "refused", first_line(raised)
        elif oom_facts(raised) is None:
            raise
        else:
            error, how, text, result = raised, "oom_facts", first_line(raised), None
        traceback.clear_frames(
            raised.__traceback__
        )  # they hold the arrays of the call; the lines of the traceback stay
    return StepAttempt(result, error, agreement.exchange({"how": how, "text": text, "near": near}))


def _is_complete(result: Any, agreement: Agreement, grace_s: float) -> bool:
    """Wait for the results; False where another process failed and they do not come."""
    if agreement.can_poll:
        # typed random keys cannot be asked; they come from the same program as the others
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(result) if hasattr(leaf, "is_ready")]
        pause, look_at, ends = _SHORTEST_S, time.monotonic() + _LISTEN_S, None
        while not all(array.is_ready() for array in arrays):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LISTEN_S
                if ends is None and any(answer.get("how") != "ok" for answer in agreement.early_answers()):
                    ends = now + grace_s
            if ends is not None and now >= ends:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
    jax.block_until_ready(result)
    return True


Addresses = list[tuple[int, frozenset[tuple[int, int]]]]
ENOUGH = 0.95  # of what the program reuses


def addresses(state: Any) -> Addresses:
    """For each array its bytes on one device, and its address on each; none where the platform reports none."""
    found: Addresses = []
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array) or is_key(leaf):
            continue
        try:
            parts = parts_of(leaf)
            places = frozenset((part.device.id, part.unsafe_buffer_pointer()) for part in parts)
            found.append((parts[0].nbytes if parts else 0, places))
        except (AttributeError, RuntimeError, NotImplementedError, ValueError):
            found.append((0, frozenset()))
    return found


def reused_bytes(before: Addresses, after: Addresses) -> int | None:
    """Bytes on one device of the old state whose memory holds the new one; None where no address is known."""
    if not any(places for _, places in before):
        return None
    taken = frozenset[tuple[int, int]]().union(*(places for _, places in after))
    return sum(size for size, places in before if places and places <= taken)


def promised_bytes(program: Program | None) -> int:
    """Bytes on one device of the first argument that the compiled program reuses; 0 where nothing was compiled."""
    if program is None or not program.uses:
        return 0
    state = program.uses[0].argument
    return sum(use.bytes for use in program.uses if use.argument == state and use.requested and use.aliased)


_GRACE_S, _GRACE_STEPS = 5.0, 3


def promised_by_plan(plan: PlanRecord | None, policy: StepPolicy) -> int | None:
    """Bytes on one device that the plan's program reuses under this policy; None where the plan does not know."""
    if plan is None or plan.target != "attached":
        return None
    chosen = plan.candidates[plan.chosen]
    return chosen.alias_bytes if chosen.policy == policy else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBuilder:
    """Builds the jitted step under any policy.

    Attributes:
        train_step: The user's.
        donate_argnames: As for `jm.jit_step`.
        state_shardings: Likewise.
        gradients: Likewise.
    """

    train_step: Callable[..., Any]
    donate_argnames: str | tuple[str, ...] | None = None
    state_shardings: Any = None
    gradients: Gradients = "own"

    def build(self, policy: Any) -> JitStep:
        """The step under a policy or preset."""
        return jit_step(
            self.train_step,
            policy,
            donate_argnames=self.donate_argnames,
            state_shardings=self.state_shardings,
            gradients=self.gradients,
        )


def fitting_count(rows: int, count: int, chosen_for: int | None) -> int:
    """The fewest microbatches that divide a batch of other rows, none of them larger than those that were chosen.

    Args:
        rows: Of this batch, 1 at least.
        count: How many microbatches were chosen.
        chosen_for: For how many rows; None where that is not known, and there are to be as many at least.
    """
    least = min(count, rows) if chosen_for is None else -(-rows * count // chosen_for)
    return next(number for number in range(max(least, 1), rows + 1) if rows % number == 0)


def rows_of(inputs: Sequence[Any]) -> int | None:
    """Rows of the batch: the leading dimension that the first input's arrays share; None where they do not."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(inputs[:1]) if getattr(leaf, "ndim", 0)}
    return sizes.pop() if len(sizes) == 1 else None


@final
class StepRunner:
    """Runs the step under the policy in force.

    Args:
        builder: Builds the jitted step.
        policy: The policy to begin with.
        agreement: With the other processes.
        notifier: Reports a donation that is lost after a restore.
        plan: The plan of the step, or None.
    """

    def __init__(
        self,
        builder: StepBuilder,
        policy: StepPolicy,
        agreement: Agreement,
        notifier: Notifier,
        plan: PlanRecord | None,
    ) -> None:
        self.builder, self.agreement = builder, agreement
        self._notifier, self._plan = notifier, plan
        self.step: JitStep = builder.build(policy)
        self._requested = policy.microbatches
        self._chosen_for: int | None = None  # rows of the batch for which recovery chose how many microbatches
        self._others: dict[StepPolicy, JitStep] = {}
        self.verify = False  # whether the next run is the first one after a restore
        self._longest_s = 0.0
        self._near = self._near_reported = False
        self._runs = 0

    def take_policy(self, policy: StepPolicy) -> None:
        """Go on under another policy."""
        self.step, self._chosen_for = self.builder.build(policy), None

    def take_step(self, step: JitStep, inputs: Inputs) -> None:
        """Go on with a step that was made for a batch like this one."""
        self.step, self._chosen_for = step, rows_of(inputs)

    def step_for(self, inputs: Inputs) -> JitStep:
        """The step in force, for a batch that its microbatches divide; else the same with as many as divide this one.

        Only where recovery chose how many there are: under the user's own policy such a batch is an error.
        """
        policy = self.step.policy
        rows = None if policy.microbatches == self._requested else rows_of(inputs)
        if not rows or rows % policy.microbatches == 0:
            return self.step
        other = replace(policy, microbatches=fitting_count(rows, policy.microbatches, self._chosen_for))
        if other not in self._others:
            self._others[other] = self.builder.build(other)
        return self._others[other]

    def near_anywhere(self, *, here: bool) -> bool:
        """Whether any process had seen a near-OOM event at the last run; what is seen here is reported at the next one."""
        self._near, answers, self._near_reported = here, self._near_reported, False
        return answers

    def run(self, holder: list[Any], inputs: Inputs, *, on_trial: bool = False) -> StepAttempt:
        """Run the step on the state in ``holder``, which is empty then.

        Args:
            holder: Has the state.
            inputs: What the step takes in addition.
            on_trial: Whether the policy is new, and may be refused.
        """
        began, grace_s = time.monotonic(), max(_GRACE_S, _GRACE_STEPS * self._longest_s)
        watched = addresses(holder[0]) if self.verify else None
        step = self.step_for(inputs)
        attempt = run_step(
            step,
            lambda: (holder.pop(), *inputs),
            self.agreement,
            grace_s=grace_s,
            near=self._near,
            on_trial=on_trial,
        )
        self._runs += 1
        self._near_reported = attempt.near
        if watched is not None and attempt.result is not None:
            self.verify = False
            self._require_reuse(step, reused_bytes(watched, addresses(self.pair(attempt.result)[0])))
        if not attempt.failed:
            self._longest_s = max(self._longest_s, time.monotonic() - began)
        return attempt

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
        """After a restore: the old state's memory must hold the new state, as compiled, and as a plan predicted."""
        promised, predicted = promised_bytes(step.latest), promised_by_plan(self._plan, step.policy) or 0
        expected = max(promised, predicted)
        if reused is None or reused >= ENOUGH * expected:
            return
        by = "the plan predicted" if predicted > promised else "the program reuses"
        message = (
            f"the first step after a restore reused {format_bytes(reused)} of the old state's memory, where {by} "
            f"{format_bytes(expected)}: old and new state are held at once."
        )
        action = f"Copy the restored state once: {advise('donation.copy', state='state')}, before the first step."
        self._notifier.event("donation_lost", self._runs, message, action, lost_bytes=expected - reused)
        warnings.warn(f"{message} {action}", DonationWarning, stacklevel=5)


class EventSink(Protocol):
    """A writer of events, such as a monitor."""

    def tell(self, event: MemoryEvent) -> None:
        """Record one event."""
        ...


@final
class Notifier:
    """Reports recoveries to the user and the monitor.

    Args:
        monitor: Writes events into the run's files, or None.
    """

    def __init__(self, monitor: EventSink | None) -> None:
        self._monitor = monitor

    def line(self, line: str) -> None:
        """Print one line on stderr."""
        print_line(f"recovery: {line}")

    def move(self, move: RecoveryMove, *, cause: str, action: str) -> None:
        """Report one recovery, or that nothing helped.

        Args:
            move: What was done.
            cause: The failure's own text.
            action: What to do about it; empty where nothing is left to do.
        """
        who = _processes(move.failed_on)
        passed = f" Passed over: {'; '.join(move.passed_over)}." if move.passed_over else ""
        if move.rung is None or move.rung == "save_and_exit":
            what = "the ladder is exhausted" if move.rung is None else "the state is saved"
            message = f"memory ran out in step {move.step}{who} ({cause}); {what}, and the run ends.{passed}"
        else:
            again = f", step {move.from_step} and those after it repeated" if move.from_step < move.step else ""
            message = (
                f"memory ran out in step {move.step}{who} ({cause}); the run goes on with {move.rung}: {move.policy}{again}, "
                f"after {move.seconds:.1f} s.{passed}"
            )
        self.event("recovery", move.step, message, action, rung=move.rung or "none", from_step=move.from_step)

    def event(self, kind: EventKind, step: int, message: str, action: str, **figures: float | str) -> None:
        """Record an event, which the monitor logs; without a monitor print a line on stderr."""
        if self._monitor is None:
            self.line(f"{message} {action}".rstrip())
            return
        first = jax.local_devices()[0]
        label = f"{first.platform}:{first.id}"
        event = MemoryEvent(
            kind=kind, step=step, time_s=time.time(), device=label, message=message, action=action, figures=figures
        )
        self._monitor.tell(event)


def _processes(failed_on: tuple[int, ...]) -> str:
    if jax.process_count() == 1:
        return ""
    return f" on process {', '.join(map(str, failed_on))} of {jax.process_count()}"
