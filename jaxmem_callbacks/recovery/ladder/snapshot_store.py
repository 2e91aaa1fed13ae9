"""The snapshot of a state that a run can go back to, and the inputs of the steps since."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np

from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.records.presets import SnapshotCost
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.recovery.snapshots import HostSnapshot, refuse_objects, shape_of
from jaxmem_callbacks.recovery.verdicts.judging import ran_out
from jaxmem_callbacks.transforms.frameworks import Checkpoints

Inputs = tuple[Any, ...]


@final
class Batches:
    """What each step took besides the state.

    Args:
        batch_at: Gives the batch of a step again, the same every time; None for a buffer.
        buffer_bytes: What the buffer may take; the oldest go first.
        say: Told, in one line, when a failure could no longer be repeated.
    """

    def __init__(self, batch_at: Callable[[int], Any] | None, buffer_bytes: int, say: Callable[[str], None]) -> None:
        self._batch_at = batch_at
        self._most = buffer_bytes
        self._say = say
        self._kept: dict[int, HostSnapshot] = {}
        self._let_go: set[int] = set()
        self._latest: list[weakref.ref[Any]] = []  # the arrays that the last copy is of, where it is of arrays alone
        self._largest = 0
        self._first: int | None = None  # the step of the snapshot
        self._told = False

    @property
    def bytes(self) -> int:
        """Host memory that the buffer takes."""
        return sum(each.bytes for each in {id(each): each for each in self._kept.values()}.values())

    def given(self, step: int, inputs: Inputs) -> Inputs:
        """The inputs of a call: the user's own, or what ``batch_at`` has for the step.

        Raises:
            RecoveryError: neither.
        """
        if inputs:
            return inputs
        if self._batch_at is None:
            msg = (
                f"recovery.step({step}, state) got no batch, and Recovery has no batch_at. Expected one of the two: "
                "the batch behind the state, or batch_at, which gives it by the step's number."
            )
            raise RecoveryError(msg)
        return (self._batch_at(step),)

    def begin(self, step: int) -> None:
        """A snapshot was taken before this step: what came before is not needed any longer."""
        self._kept.clear()
        self._let_go.clear()
        self._first, self._told = step, False

    def keep(self, step: int, inputs: Inputs) -> None:
        """Copy the inputs of a step that nobody can give again: with ``batch_at`` those besides the batch."""
        inputs = inputs if self._batch_at is None else inputs[1:]
        if not inputs:
            return
        copied = self._copy(step, inputs)
        self._kept[step] = copied
        self._largest = max(self._largest, copied.bytes)
        while self._kept and self.bytes > self._most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._let_go.add(oldest)
            if not self._told:
                self._told = True
                self._say(f"a failure from step {step} on could not be repeated: {self._need(step)}")

    def _copy(self, step: int, inputs: Inputs) -> HostSnapshot:
        """On the host: NumPy's arrays too, whose owner may write into them; JAX's, such as frozen weights, once."""
        latest = next(reversed(self._kept.values()), None)
        leaves = jax.tree.leaves(inputs)
        are_the_same = len(leaves) == len(self._latest) and all(map(_is, self._latest, leaves))
        if latest is not None and are_the_same and jax.tree.structure(inputs) == latest.structure:
            return latest
        arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
        self._latest = [weakref.ref(leaf) for leaf in leaves] if arrays else []
        return HostSnapshot(step, inputs)

    def of(self, step: int) -> Inputs:
        """The inputs of a step again.

        Raises:
            RecoveryError: the buffer has let go of it; names what would hold it.
        """
        kept = self._kept.get(step)
        if kept is None and (self._batch_at is None or step in self._let_go):
            msg = f"step {step} cannot be repeated: {self._need(step)}"
            raise RecoveryError(msg)
        besides = () if kept is None else kept.restore()
        return besides if self._batch_at is None else (self._batch_at(step), *besides)

    def _need(self, step: int) -> str:
        what, instead = (
            ("batches", "Give jm.Recovery a batch_at")
            if self._batch_at is None
            else ("inputs besides the batch", "Let batch_at give these too")
        )
        return (
            f"the snapshot is of step {self._first}, and {what} of up to {format_bytes(self._largest)} fill the buffer "
            f"of {format_bytes(self._most)} before step {step + 1}. {instead}, or a larger "
            "`recovery: {buffer: ...}`, or snapshots more often: `recovery: {every_steps: ...}`."
        )


def _is(known: weakref.ref[Any], leaf: Any) -> bool:
    return known() is leaf


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
