"""A tree and the steps of a plan enter; the same tree with its arrays moved leaves. The arrays that are moved are consumed.

At every moment the tree holds each array where it was, where it is to be, or on the host; only then the old one is let go of. So
a step that fails or is interrupted loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from jaxmem_callbacks._compat.array_parts import parts_of
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.defragment import MovedArray, MoveKind, MoveStep
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.recovery.moving.staging import Copier, Staged, copied, put_back, staged, why_not_staged

# By its key: what stands on the host, its bytes, and where it lay.
_Held = dict[int, tuple[Staged, int, tuple[int, ...]]]


class Mover:
    """The arrays of a tree, each once, by the number that a plan knows it by.

    Args:
        tree: Any tree. The same array at two places is one array; leaves that are no arrays stay what they are.

    Raises:
        DefragmentError: an array that was deleted, or a function that is being traced.
    """

    def __init__(self, tree: Any) -> None:
        _refuse_tracing()
        told, self._shape = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves: list[Any] = [leaf for _, leaf in told]
        self.paths: dict[int, str] = {}
        self._places: dict[int, list[int]] = {}
        self.moved: list[MovedArray] = []
        self.seconds: dict[MoveKind, float] = {"device": 0.0, "host": 0.0}
        keys: dict[int, int] = {}
        for place, (path, leaf) in enumerate(told):
            if not isinstance(leaf, jax.Array):
                continue
            text = jax.tree_util.keystr(path) or "the array"
            _refuse_deleted(leaf, text)
            key = keys.setdefault(id(leaf), place)
            self.paths.setdefault(key, text)
            self._places.setdefault(key, []).append(place)

    @property
    def tree(self) -> Any:
        """The tree as it is now."""
        return jax.tree_util.tree_unflatten(self._shape, self._leaves)

    def array(self, key: int) -> jax.Array:
        """The array that a number stands for, as it is now."""
        return self._leaves[key]

    def carry_out(self, steps: Sequence[MoveStep], *, copy: Copier = copied) -> None:
        """Do what a plan says, a step after the other.

        Args:
            steps: The steps.
            copy: How an array is copied on its device.

        Raises:
            DefragmentError: a step that failed; its cause is the failure, and its ``tree`` holds every array.
        """
        for step in steps:
            began = time.perf_counter()
            if step.kind == "device":
                for key in step.keys:
                    self._on_device(key, copy)
            else:
                self._through_host(step.keys)
            self.seconds[step.kind] += time.perf_counter() - began

    def copy_if(self, key: int, keep: Callable[[jax.Array], bool]) -> bool:
        """Copy an array on its device, look at the copy, and let go of the old one or of the copy.

        Args:
            key: The array.
            keep: Whether a copy is to stay.

        Returns:
            Whether it stayed.

        Raises:
            DefragmentError: the copy failed; its ``tree`` holds every array.
        """
        began = time.perf_counter()
        kept = self._on_device(key, copied, keep)
        self.seconds["device"] += time.perf_counter() - began
        return kept

    def _on_device(self, key: int, copy: Copier, keep: Callable[[jax.Array], bool] | None = None) -> bool:
        old = self.array(key)
        before = addresses(old)
        try:
            new = copy(old)
            new.block_until_ready()
        except Exception as error:
            raise self._failed(key, "be copied on its device") from error
        kept = False
        try:
            kept = keep is None or keep(new)
        finally:
            if not kept:
                new.delete()
        if not kept:
            return False
        size = local_bytes(old)
        self._replace(key, new)
        old.delete()
        self._tell(key, "device", size, before)
        return True

    def _through_host(self, keys: Sequence[int]) -> None:
        for key in keys:
            why = why_not_staged(self.array(key))
            if why:
                msg = f"{self.paths[key]} cannot go through the host: {why}. Leave it out of the steps."
                raise DefragmentError(msg, self.tree)
        held: _Held = {}
        for key in keys:
            try:
                self._to_host(key, held)
            except Exception as error:
                self._back(held)
                raise self._failed(key, "be copied to the host") from error
            except BaseException as interrupt:
                try:
                    self._back(held)
                except DefragmentError as failed:  # what stands on the host is in the tree; Ctrl-C stays what it is
                    raise interrupt from failed
                raise
        self._back(held)

    def _to_host(self, key: int, held: _Held) -> None:
        old = self.array(key)
        before, size = addresses(old), local_bytes(old)
        values = staged(old)
        held[key] = (values, size, before)
        self._replace(key, values.values)
        old.delete()

    def _back(self, held: _Held) -> None:
        """Put what stands on the host back, in its order; what cannot be put back stays there, and all others are put."""
        failed: list[tuple[int, BaseException]] = []
        moved: list[tuple[int, int, tuple[int, ...]]] = []
        for key, (values, size, before) in list(held.items()):
            try:
                self._replace(key, put_back(values))
            except BaseException as error:  # noqa: BLE001 - whatever it is, Ctrl-C too, the others are put back first
                failed.append((key, error))
            else:
                moved.append((key, size, before))
            finally:
                del held[key]
        for key, size, before in moved:
            self._tell(key, "host", size, before)
        interrupted = next((error for _, error in failed if not isinstance(error, Exception)), None)
        if interrupted is not None:
            raise interrupted
        if failed:
            names = ", ".join(self.paths[key] for key, _ in failed)
            msg = (
                f"{names} could not be put back on the device, and stands in the error's tree as NumPy arrays; every other array "
                "is there as it was. Free memory, then put the error's tree where it was by jax.device_put."
            )
            raise DefragmentError(msg, self.tree) from failed[0][1]

    def _failed(self, key: int, what: str) -> DefragmentError:
        return DefragmentError(
            f"{self.paths[key]} could not {what}; it is where it was. The error's tree holds every array, moved or not: "
            "state = error.tree",
            self.tree,
        )

    def _replace(self, key: int, new: Any) -> None:
        for place in self._places[key]:
            self._leaves[place] = new

    def _tell(self, key: int, kind: MoveKind, size: int, before: tuple[int, ...]) -> None:
        after = addresses(self.array(key))
        self.moved.append(MovedArray(path=self.paths[key], kind=kind, bytes=size, before=before, after=after))


def addresses(array: jax.Array) -> tuple[int, ...]:
    """Where each part that is here lies, in the order of the devices; none where that cannot be said."""
    return tuple(part.unsafe_buffer_pointer() for part in parts_of(array)) if array.size else ()


def address_on(array: jax.Array, device: Any) -> int | None:
    """Where its part on a device lies; None where it has none there, or is empty."""
    parts = parts_of(array) if array.size else ()
    return next((part.unsafe_buffer_pointer() for part in parts if device in part.devices()), None)


def local_bytes(array: Any) -> int:
    """Bytes of the parts that are here."""
    return array.on_device_size_in_bytes() // len(array.sharding.device_set) * len(array.sharding.addressable_devices)


def _refuse_tracing() -> None:
    # Inside jit whatever is made is traced, though the tree may be a real one that the function closes over.
    if isinstance(jax.device_put(0), jax.core.Tracer):
        msg = (
            "jm.defragment moves real arrays, between steps, and a function is being traced here. Call it outside of jax.jit, "
            f"grad and vmap: {advise('memory.defragment')}"
        )
        raise DefragmentError(msg)


def _refuse_deleted(leaf: jax.Array, path: str) -> None:
    if leaf.is_deleted():
        msg = f"{path} was deleted or donated before. Give what the last step returned: {advise('memory.defragment')}"
        raise DefragmentError(msg)
