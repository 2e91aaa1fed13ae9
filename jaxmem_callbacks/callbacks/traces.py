"""A trace of allocations on its way: read on the thread that calls the hook, handed to the monitor's own thread.

Only the thread that dispatches the steps knows which step an array is of; every other one would look at some moment within one.
"""

from __future__ import annotations

from collections import deque
from typing import final

import jax

from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.probes.allocations import AllocationsProbe
from jaxmem_callbacks.records.traces import TraceEvent

MOST_ARRAYS = 5000  # looking at so many takes some milliseconds of every step
MOST_EVENTS = 500_000  # some 40 MB of lines


@final
class Traces:
    """Takes the trace of a run's first calls.

    Args:
        steps: How many calls; 0 for none.
        faults: Told of a probe that raises and of a trace that ends early.
        has_folder: Whether there is a folder to write it to.
    """

    def __init__(self, steps: int, faults: Faults, *, has_folder: bool) -> None:
        self._left = steps if has_folder else 0
        self._faults = faults
        self._probe: AllocationsProbe | None = None
        self._events = 0
        self._taken: deque[TraceEvent] = deque()
        if steps and not has_folder:
            faults.note("trace", "trace_steps is set, and without a logdir there is no file to write a trace to.")

    @property
    def wanted(self) -> bool:
        """Whether the next call is still to be looked at."""
        return self._left > 0

    def take(self, step: int) -> None:
        """Look at what changed since the last call, on the caller's thread."""
        self._left = self._faults.attempt("the trace of allocations", self._take, step, default=0)

    def collect(self) -> tuple[TraceEvent, ...]:
        """What was taken since the last time."""
        return tuple(self._taken.popleft() for _ in range(len(self._taken)))

    def _take(self, step: int) -> int:
        """Calls that are left to look at."""
        if self._probe is None:
            if jax.process_index() != 0:  # nobody else writes
                return 0
            self._probe = AllocationsProbe()
        events, alive = self._probe.read(step)
        self._taken.extend(events)
        self._events += len(events)
        if alive <= MOST_ARRAYS and self._events <= MOST_EVENTS:
            return self._left - 1
        why = f"{alive} arrays are alive" if alive > MOST_ARRAYS else f"it has {self._events} events"
        self._faults.note(
            "trace", f"the trace of allocations ends at step {step}: {why}, and more would hold the run up."
        )
        return 0
