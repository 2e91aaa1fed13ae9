"""What recovery may do (RecoverySettings), what it did (RecoveryMove), what snapshots cost (SnapshotCost); a report of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxmem_callbacks.records.units import GIB

Rung = Literal["defragment", "microbatches", "remat", "save_and_exit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySettings:
    """What ``jm.Recovery`` does when memory runs out, and how it is prepared.

    Attributes:
        ladder: The rungs from top to bottom: ``defragment``, ``microbatches`` (twice as many each time), ``remat`` (the next
            stronger policy, or the next point of a plan), ``save_and_exit``. One that does not lower the compiled need is passed
            over, and said so.
        snapshots: Where copies of the state wait: in ``host`` memory, or on disk by ``orbax``.
        every_steps: Steps from one snapshot to the next; a failure repeats so many at most.
        buffer_bytes: Host memory for the batches since the snapshot, where no ``batch_at`` is given.
        max_microbatches: No more microbatches than this.
        agree_s: Seconds in which every process must have said how a step went.
    """

    ladder: tuple[Rung, ...] = ("defragment", "microbatches", "remat", "save_and_exit")
    snapshots: Literal["host", "orbax"] = "host"
    every_steps: int = 100
    buffer_bytes: int = GIB
    max_microbatches: int = 64
    agree_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCost:
    """What the snapshots of a run have cost so far.

    Attributes:
        kind: ``host`` or ``orbax``.
        taken: Their number.
        bytes: Of the last one, in this process: host memory, or what its devices hold of it on disk.
        seconds: Of the last one, in which the step waited.
        total_seconds: Of all.
        buffered_bytes: Host memory that batches since the last one take now.
    """

    kind: str
    taken: int
    bytes: int
    seconds: float
    total_seconds: float
    buffered_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryMove:
    """One time that memory ran out, and what was done.

    Attributes:
        step: The step that failed.
        rung: What the run goes on with; None where the ladder was exhausted.
        policy: The policy in words, from here on.
        from_step: The step that was repeated first; the failed one where the state was still alive.
        failed_on: Processes on which memory ran out.
        passed_over: Rungs that did not help, each with why.
        seconds: From the failure to the failed step's result.
    """

    step: int
    rung: Rung | None
    policy: str
    from_step: int
    failed_on: tuple[int, ...]
    passed_over: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryReport:
    """What ``jm.Recovery`` has done so far.

    Attributes:
        policy: The policy in force, in words.
        moves: Each time that memory ran out, oldest first.
        snapshots: What the copies of the state have cost.
    """

    policy: str
    moves: tuple[RecoveryMove, ...]
    snapshots: SnapshotCost
