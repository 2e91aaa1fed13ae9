"""One run of a step: a jitted step and its arguments enter, how it went on every process leaves.

Each run is waited for, since only then a failure belongs to a step. A process that waits for a device listens meanwhile, so
that it learns of one that failed and will never take part in a collective.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax

from jaxmem_callbacks.records.errors import PolicyError
from jaxmem_callbacks.recovery.ladder.agreement import Agreement, Words
from jaxmem_callbacks.recovery.verdicts.shortage import ran_out

How = Literal["ok", "ran_out", "stuck", "refused"]
_LISTEN_S = 0.25
_SHORTEST_S, _LONGEST_S = 0.0001, 0.002
_WORDS = 300


@dataclass(slots=True)
class Turn:
    """How a run went.

    Attributes:
        result: What the step returned, complete; None where it failed here or was not complete.
        error: The failure for want of memory on this process.
        words: What each process said of it.
    """

    result: Any
    error: Exception | None
    words: Sequence[Words]

    def on(self, how: How) -> tuple[int, ...]:
        """The processes on which it went so."""
        return tuple(number for number, said in enumerate(self.words) if said["how"] == how)

    @property
    def failed(self) -> bool:
        """Whether memory ran out anywhere."""
        return bool(self.on("ran_out"))

    @property
    def refusal(self) -> str:
        """Why the library refused the policy, on the first process that says so; empty where none does."""
        return next((said["text"] for said in self.words if said["how"] == "refused"), "")

    @property
    def near(self) -> bool:
        """Whether any process has seen a near-OOM event since the last run."""
        return any(said.get("near") for said in self.words)


def take_turn(  # noqa: PLR0913 - a run, and what is known of it
    run: Callable[..., Any],
    call: Callable[[], tuple[Any, ...]],
    agreement: Agreement,
    *,
    grace_s: float,
    near: bool = False,
    on_trial: bool = False,
) -> Turn:
    """Run a step and hear how it went everywhere.

    Args:
        run: The jitted step.
        call: Gives its arguments, which nobody here keeps.
        agreement: With the other processes.
        grace_s: How long a run may go on after another process has said that it failed.
        near: What this process says of a near-OOM event.
        on_trial: Whether the policy is a new one, which the library may refuse for this loss and batch.

    Raises:
        RecoveryError: another process ended, or did not say anything in time.
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
        elif ran_out(raised) is None:
            raise
        else:
            error, how, text, result = raised, "ran_out", first_line(raised), None
        traceback.clear_frames(
            raised.__traceback__
        )  # they hold the arrays of the call; the lines of the traceback stay
    return Turn(result, error, agreement.exchange({"how": how, "text": text, "near": near}))


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_WORDS]


def _is_complete(result: Any, agreement: Agreement, grace_s: float) -> bool:
    """Wait for the results; False where another process failed and they do not come."""
    if agreement.can_look:
        # typed random keys cannot be asked; they come from the same program as the others
        arrays: list[Any] = [leaf for leaf in jax.tree.leaves(result) if hasattr(leaf, "is_ready")]
        pause, look_at, ends = _SHORTEST_S, time.monotonic() + _LISTEN_S, None
        while not all(array.is_ready() for array in arrays):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LISTEN_S
                if ends is None and any(said.get("how") != "ok" for said in agreement.heard()):
                    ends = now + grace_s
            if ends is not None and now >= ends:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
    jax.block_until_ready(result)
    return True
