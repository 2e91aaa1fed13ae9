"""The inputs of the steps since the last snapshot: the user's ``batch_at`` or a buffer of host copies, bounded by bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import jax

from jaxmem_callbacks.records.errors import RecoveryError
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.recovery.snapshots import HostSnapshot

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
