"""The copy of the state that a run can go back to: states enter before each step, the last copy leaves when it is asked for.

A new copy is taken when it is due, and where the state is not the one that the last step returned: what happened to it outside
of the step would be lost in a replay. The old one goes when the new one is complete on every process.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np

from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.records.presets import SnapshotCost
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.snapshots import HostSnapshot, refuse_objects, shape_of
from jaxmem_callbacks.recovery.verdicts.shortage import ran_out
from jaxmem_callbacks.transforms.frameworks import Checkpoints

_CLOSE, _CLOSE_SHORT = 1e-3, 2e-2  # of a metric, in 32 bits and more, and in fewer


@final
class DiskSnapshot:
    """A state as it was before a step, in a checkpoint.

    Args:
        step: That step.
        state: The state; it is read and stays as it is.
        store: Where it is written.
        note: What stands beside it.
    """

    def __init__(self, step: int, state: Any, store: Checkpoints, note: Mapping[str, Any]) -> None:
        refuse_objects(state)
        self.step = step
        self._store = store
        self._like = jax.tree.map(shape_of, state)
        self.bytes = sum(_bytes_here(leaf) for leaf in jax.tree.leaves(state))
        store.save(step, state, note)

    def restore(self) -> Any:
        """The state on the devices, placed as it was."""
        return self._store.restore(self.step, self._like)


@final
class Keeper:
    """Takes and holds the snapshots.

    Args:
        every_steps: When a new one is due.
        on_disk: Takes a snapshot on disk; None for host memory.
        agreement: With the other processes.
        say: Told, in one line, of what the user should know.
    """

    def __init__(
        self,
        every_steps: int,
        on_disk: Callable[[int, Any], DiskSnapshot] | None,
        agreement: Agreement,
        say: Callable[[str], None],
    ) -> None:
        self._every, self._on_disk, self._agreement, self._say = every_steps, on_disk, agreement, say
        self.snapshot: HostSnapshot | DiskSnapshot | None = None
        self._returned: list[Any] = []
        self._next: int | None = None
        self._metrics: dict[str, tuple[float, float]] = {}
        self._taken, self._last_s, self._total_s = 0, 0.0, 0.0
        self._told: set[str] = set()

    def before(self, step: int, state: Any) -> bool:
        """Take a snapshot where one is due; whether it was taken.

        Raises:
            RecoveryError: a state that cannot be copied.
            Exception: there is no memory for the first one.
        """
        known = self.snapshot
        changed = step != self._next or not self._is_returned(state)
        if known is not None and not changed and step - known.step < self._every:
            return False
        if known is not None and changed and step == self._next:
            self._say_once(
                "changed",
                f"the state given to step {step} is not the one that step {step - 1} returned, so it is copied now: what is done "
                "to it between steps would be lost in a replay. Where that is at every step, do it inside the step.",
            )
        began = time.monotonic()
        taken, why = self._copied(step, state)
        heard = self._agreement.exchange({"why": why})
        missing = next((words["why"] for words in heard if words["why"]), "")
        if missing or taken is None:
            if changed:
                msg = f"step {step} has no snapshot to go back to, and there was no memory for one: {missing}."
                raise RecoveryError(msg)
            self._say_once("missing", f"no snapshot at step {step}, the one of an earlier step stays: {missing}.")
            return False
        self.snapshot, self._metrics = taken, {}
        self._taken, self._last_s = self._taken + 1, time.monotonic() - began
        self._total_s += self._last_s
        return True

    def after(self, step: int, state: Any, metrics: Any) -> None:
        """A step was done: remember what it returned, by its identity, and the metrics of the first step after a snapshot."""
        self._next, self._returned = step + 1, [_handle(leaf) for leaf in jax.tree.leaves(state)]
        if self.snapshot is not None and step == self.snapshot.step:
            self._metrics = _scalars(metrics)

    def require_same(self, step: int, metrics: Any) -> None:
        """Hold the metrics of the first repeated step against those that it gave before.

        Raises:
            RecoveryError: they are others, so the run would go on with other numbers.
        """
        if self.snapshot is None or step != self.snapshot.step:
            return
        for name, (value, close) in _scalars(metrics).items():
            before = self._metrics.get(name, (value, close))[0]
            if not np.isclose(value, before, rtol=close, atol=close * 1e-3, equal_nan=True):
                msg = (
                    f"step {step} was repeated from its snapshot and gave {name} {value:.6g} instead of {before:.6g}. Expected "
                    f"the same: batch_at({step}) gave another batch, or the step draws on something outside of its arguments. "
                    "The run does not go on with other numbers."
                )
                raise RecoveryError(msg)

    @property
    def next_step(self) -> int:
        """The step after the last one that was done, or -1 before the first."""
        return -1 if self._next is None else self._next

    def cost(self, buffered_bytes: int) -> SnapshotCost:
        """What snapshots have cost so far."""
        return SnapshotCost(
            kind="host" if self._on_disk is None else "orbax",
            taken=self._taken,
            bytes=0 if self.snapshot is None else self.snapshot.bytes,
            seconds=self._last_s,
            total_seconds=self._total_s,
            buffered_bytes=buffered_bytes,
        )

    def _copied(self, step: int, state: Any) -> tuple[HostSnapshot | DiskSnapshot | None, str]:
        try:
            return (self._on_disk or HostSnapshot)(step, state), ""
        except Exception as error:
            if ran_out(error) is None:
                raise
            return None, f"{type(error).__name__}: {error}"

    def _is_returned(self, state: Any) -> bool:
        leaves = jax.tree.leaves(state)
        return len(leaves) == len(self._returned) and all(
            handle() is leaf for handle, leaf in zip(self._returned, leaves, strict=True)
        )

    def _say_once(self, key: str, line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._say(line)


def _handle(leaf: Any) -> Callable[[], Any]:
    """What tells a leaf again without keeping it."""
    return weakref.ref(leaf) if isinstance(leaf, jax.Array) else lambda: leaf


def _scalars(metrics: Any) -> dict[str, tuple[float, float]]:
    """The floating numbers of a step's metrics, and how near they come again."""
    found: dict[str, tuple[float, float]] = {}
    for path, leaf in jax.tree.leaves_with_path(metrics):
        if isinstance(leaf, jax.Array) and leaf.size == 1 and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            close = _CLOSE if leaf.dtype.itemsize >= 4 else _CLOSE_SHORT  # noqa: PLR2004 - bytes of float32
            if leaf.is_fully_addressable or leaf.is_fully_replicated:
                found[jax.tree_util.keystr(path).strip("[]'") or "metrics"] = (float(leaf), close)
    return found


def _bytes_here(leaf: Any) -> int:
    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    parts = {str(index) for index in places}
    shard = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shard, dtype=np.int64)) * leaf.dtype.itemsize * len(parts)
