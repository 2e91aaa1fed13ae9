"""Snapshots: a copy of a training state in host memory, which comes back as often as needed, placed as it was.

Sharding, memory kind, layout, weak type and whether it was committed come back with it. Memory that comes back belongs to XLA
alone: a CPU client would take NumPy's own memory for the array where that is aligned to 64 bytes, then copy it when it is
donated, and so hold it twice; the copies here are aligned to 16 only.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from jaxmem_callbacks._compat.arrays import clone_of
from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.records.presets import SnapshotCost
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.failure import oom_facts
from jaxmem_callbacks.recovery.ladder.agreement import Agreement
from jaxmem_callbacks.transforms.frameworks import Checkpoints, framework_of
from jaxmem_callbacks.transforms.tracing import is_key, is_weak, typed

_ALIGNMENT, _OFFSET = 64, 16
_Place = tuple[tuple[int, int], ...]


@final
class HostSnapshot:
    """A state as it was before a step.

    Args:
        step: That step.
        state: A tree of arrays; it is read and stays as it is.

    Raises:
        RecoveryError: objects that are updated in place, or an array that is gone.
    """

    def __init__(self, step: int, state: Any) -> None:
        refuse_objects(state)
        self.step = step
        leaves, self._tree = jax.tree.flatten(state)
        self._leaves = [HostLeaf.of(leaf) for leaf in leaves]
        self.shapes = jax.tree.map(shape_of, state)

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        return sum(leaf.bytes for leaf in self._leaves)

    @property
    def structure(self) -> Any:
        """Of its tree."""
        return self._tree

    @property
    def is_whole(self) -> bool:
        """Whether this process alone has every part of every array."""
        return all(leaf.is_whole for leaf in self._leaves)

    def restore(self) -> Any:
        """The state on the devices, in memory of its own."""
        return jax.tree.unflatten(self._tree, [leaf.restore() for leaf in self._leaves])

    def on_host(self) -> Any:
        """The state as NumPy arrays, for writing, random keys as their integers; only where it is whole."""
        return jax.tree.unflatten(self._tree, [leaf.on_host() for leaf in self._leaves])


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """One array: its parts, by their place in it, and its dtype, shape and sharding."""

    parts: dict[_Place, Any]
    like: Any  # shape, dtype and sharding; the value itself for what is no array of JAX
    remake: Callable[[Any], Any]
    committed: bool = True

    @classmethod
    def of(cls, leaf: Any) -> HostLeaf:
        """A copy of one leaf.

        Raises:
            RecoveryError: an array that was donated or deleted.
        """
        if not isinstance(leaf, jax.Array):
            return cls({}, copy.deepcopy(leaf), copy.deepcopy)
        if leaf.is_deleted():
            msg = (
                f"The state or batch given to Recovery holds an array that is deleted ({leaf.dtype}{list(leaf.shape)}), most "
                "likely donated to a step before. Expected the state that the last step returned: "
                "state, metrics = recovery.step(i, state)."
            )
            raise RecoveryError(msg)
        if is_key(leaf):
            return _key_leaf(leaf)
        handle = clone_of(leaf)
        parts: dict[_Place, Any] = {}
        for shard in handle.addressable_shards:
            place = _place(shard.index, leaf.shape)
            if place not in parts:
                parts[place] = apart(np.asarray(shard.data))
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return cls(parts, like, _as_it_was(leaf), bool(getattr(leaf, "committed", True)))

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        if isinstance(self.like, np.ndarray):
            return self.like.nbytes
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_whole(self) -> bool:
        """Whether the parts are all there is."""
        return not self.parts or sum(part.size for part in self.parts.values()) == math.prod(self.like.shape)

    def restore(self) -> Any:
        """The array, placed as it was."""
        if not self.parts:
            return self.remake(self.like)
        if not self.committed:
            (part,) = self.parts.values()
            return self.remake(jax.device_put(part))
        shape = self.like.shape
        return self.remake(
            jax.make_array_from_callback(shape, self.like.sharding, lambda index: self.parts[_place(index, shape)])
        )

    def on_host(self) -> Any:
        """The whole array in NumPy; what is no array as it is."""
        if not self.parts:
            return self.remake(self.like)
        shape: tuple[int, ...] = self.like.shape
        first = next(iter(self.parts.values()))
        whole = np.empty(shape, first.dtype)
        for place, part in self.parts.items():
            whole[tuple(slice(*ends) for ends in place)] = part
        return whole


def own_copy(leaf: Any, like: Any) -> Any:
    """An array that came from elsewhere, such as a checkpoint, in memory that is XLA's own and with the type of another one."""
    if not isinstance(leaf, jax.Array) or is_key(leaf):
        return leaf
    held = HostLeaf.of(leaf)
    committed = bool(getattr(like, "committed", True)) or len(leaf.sharding.device_set) > 1
    remake = _as_it_was(like) if isinstance(like, jax.Array) else held.remake
    return HostLeaf(held.parts, held.like, remake, committed).restore()


def apart(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy in memory that no client of XLA takes for its own."""
    room = np.empty(values.nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT + _OFFSET
    own = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    own[...] = values
    return own


def refuse_objects(state: Any) -> None:
    """Objects that are updated in place have no copy to go back to.

    Raises:
        RecoveryError: with the two lines that make a tree of them.
    """
    framework = framework_of(state)
    if framework is not None:
        msg = (
            f"Recovery got a state with objects of {framework.NAME}, which a step updates in place. Expected a tree of arrays "
            "that the step takes and returns: nnx.split of model and optimizer gives it before the loop; in the step nnx.merge "
            "makes them of it, and nnx.state is what it returns."
        )
        raise RecoveryError(msg)


def shape_of(leaf: Any) -> Any:
    """Shape, type and place of an array, also of a random key; what is no array as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak(leaf))


def _key_leaf(key: jax.Array) -> HostLeaf:
    """A random key's integers, which come back as a key of the same kind."""
    kind, held = jax.random.key_impl(key), HostLeaf.of(jax.random.key_data(key))
    committed = bool(getattr(key, "committed", True))
    return HostLeaf(held.parts, held.like, lambda data: jax.random.wrap_key_data(data, impl=kind), committed)


def _as_it_was(array: jax.Array) -> Callable[[Any], Any]:
    """Weak type and layout, which placing alone does not bring back."""
    weak, form = is_weak(array), getattr(array, "format", None)
    layout = getattr(form, "layout", None)

    def remake(fresh: jax.Array) -> jax.Array:
        if layout is not None and getattr(getattr(fresh, "format", None), "layout", None) != layout:
            fresh = jax.device_put(fresh, form)
        return typed(fresh, fresh.dtype, weak=True) if weak else fresh

    return remake


def _place(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Place:
    assert index is not None  # JAX's types allow None for callbacks
    return tuple(
        (start, stop) for start, stop, _ in (one.indices(size) for one, size in zip(index, shape, strict=True))
    )


Inputs = tuple[Any, ...]


@final
class InputBuffer:
    """What each step took besides the state.

    Args:
        batch_at: Gives the batch of a step again, the same every time; None for a buffer.
        buffer_bytes: What the buffer may take; the oldest go first.
        notify: Called with a line when a failure could no longer be repeated.
    """

    def __init__(self, batch_at: Callable[[int], Any] | None, buffer_bytes: int, notify: Callable[[str], None]) -> None:
        self._batch_at = batch_at
        self._most = buffer_bytes
        self._notify = notify
        self._kept: dict[int, HostSnapshot] = {}
        self._let_go: set[int] = set()
        self._latest: list[weakref.ref[Any]] = []  # the arrays that the last copy is of, where it is of arrays alone
        self._largest = 0
        self._first: int | None = None  # the step of the snapshot
        self._notified = False

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
        self._first, self._notified = step, False

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
            if not self._notified:
                self._notified = True
                self._notify(f"a failure from step {step} on could not be repeated: {self._need(step)}")

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
class SnapshotStore:
    """Takes and holds the snapshots.

    Args:
        every_steps: When a new one is due.
        on_disk: Takes a snapshot on disk; None for host memory.
        agreement: With the other processes.
        notify: Called with a line about a snapshot that was not taken, or was taken unexpectedly.
    """

    def __init__(
        self,
        every_steps: int,
        on_disk: Callable[[int, Any], DiskSnapshot] | None,
        agreement: Agreement,
        notify: Callable[[str], None],
    ) -> None:
        self._every, self._on_disk, self._agreement, self._notify = every_steps, on_disk, agreement, notify
        self.snapshot: HostSnapshot | DiskSnapshot | None = None
        self._returned: list[Any] = []
        self._next: int | None = None
        self._metrics: dict[str, tuple[float, float]] = {}
        self._taken, self._last_s, self._total_s = 0, 0.0, 0.0
        self._notified: set[str] = set()

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
            self._notify_once(
                "changed",
                f"the state given to step {step} is not the one that step {step - 1} returned, so it is copied now: what is done "
                "to it between steps would be lost in a replay. Where that is at every step, do it inside the step.",
            )
        began = time.monotonic()
        taken, why = self._copied(step, state)
        answers = self._agreement.exchange({"why": why})
        missing = next((answer["why"] for answer in answers if answer["why"]), "")
        if missing or taken is None:
            if changed:
                msg = f"step {step} has no snapshot to go back to, and there was no memory for one: {missing}."
                raise RecoveryError(msg)
            self._notify_once("missing", f"no snapshot at step {step}, the one of an earlier step stays: {missing}.")
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
            if oom_facts(error) is None:
                raise
            return None, f"{type(error).__name__}: {error}"

    def _is_returned(self, state: Any) -> bool:
        leaves = jax.tree.leaves(state)
        return len(leaves) == len(self._returned) and all(
            handle() is leaf for handle, leaf in zip(self._returned, leaves, strict=True)
        )

    def _notify_once(self, key: str, line: str) -> None:
        if key not in self._notified:
            self._notified.add(key)
            self._notify(line)


def _handle(leaf: Any) -> Callable[[], Any]:
    """A function that identifies a leaf later without keeping it alive."""
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
    if not isinstance(leaf, jax.Array) or is_key(leaf):
        return 0
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    parts = {str(index) for index in places}
    shard = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shard, dtype=np.int64)) * leaf.dtype.itemsize * len(parts)
