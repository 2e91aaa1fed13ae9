"""What a recovery reports: a line on stderr and an event for the monitor."""

from __future__ import annotations

import time
from typing import Protocol, final

import jax

from jaxmem_callbacks.records.presets import RecoveryMove
from jaxmem_callbacks.records.runs import EventKind, MemoryEvent
from jaxmem_callbacks.records.terminal import print_line


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
