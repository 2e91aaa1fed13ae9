"""Arrays moved on their device or through the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from jaxmem_callbacks._compat.arrays import parts_of
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.defragment import MovedArray, MoveKind, MoveStep
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.transforms.tracing import is_key, is_weak, typed

_MOST = 256 * 2**20
_TIMES = 3


def device_copy_rate(device: Any, size: int) -> float | None:
    """Bytes a second of copies on a device, of one array of at most 256 MiB.

    Args:
        device: Where.
        size: Bytes of the largest array that was moved so.
    """

    def once(array: jax.Array) -> None:
        jax.device_put(array, may_alias=False).block_until_ready()

    return _rate(device, size, once)


def host_link_rate(device: Any, size: int) -> float | None:
    """Bytes a second of copies from a device to the host and back, of one array of at most 256 MiB.

    Args:
        device: Where.
        size: Bytes of the largest array that was moved so.
    """

    def once(array: jax.Array) -> None:
        # A copy keeps what it brought to the host, so each time brings another.
        other = jax.device_put(array, may_alias=False)
        jax.device_put(np.array(other), device).block_until_ready()

    return _rate(device, size, once)


def _rate(device: Any, size: int, once: Callable[[jax.Array], None]) -> float | None:
    count = max(1, min(size, _MOST))
    try:
        array = jax.device_put(np.zeros(count, np.uint8), device).block_until_ready()
        times: list[float] = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            once(array)
            times.append(time.perf_counter() - began)
    except (jax.errors.JaxRuntimeError, MemoryError):
        return None
    return count / min(times)


Copier = Callable[[jax.Array], jax.Array]
STAYS_WEAK = "it is weakly typed, which only a copy on the device keeps"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """An array that stands on the host.

    Attributes:
        shape: Of the whole array.
        sharding: Where it was.
        layout: How each part was laid out.
        committed: Whether the user chose its devices.
        impl: Of a key array, the generator; else None.
        parts: Each part's device and values, as they were.
    """

    shape: tuple[int, ...]
    sharding: Any
    layout: Any
    committed: bool
    impl: Any
    parts: tuple[tuple[Any, np.ndarray[Any, Any]], ...]

    @property
    def values(self) -> Any:
        """What can be held where the array cannot be put back: the values in one piece where all are here, else the parts."""
        if len(self.parts) == 1:
            return self.parts[0][1]
        return [values for _, values in self.parts]


def copied_by_runtime(array: jax.Array) -> jax.Array:
    """A copy that the runtime makes. It keeps everything, and compiles nothing."""
    return jax.device_put(array, may_alias=False)


def copied_by_program(array: jax.Array) -> jax.Array:
    """A copy that a program makes, for clients whose runtime copies to other devices only."""
    return jnp.copy(array)


def copied_by_parts(array: jax.Array) -> jax.Array:
    """A copy of the parts that are here, of an array that other processes have parts of too: they need not take part."""
    if is_key(array):
        return jax.random.wrap_key_data(copied_by_parts(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    parts = [copied_by_runtime(part) for part in parts_of(array)]
    copy = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return typed(copy, array.dtype, weak=is_weak(array))


def copied(array: jax.Array) -> jax.Array:
    """A copy on the device, by the runtime, or by a program where the runtime refuses for another reason than memory."""
    if not array.is_fully_addressable:
        return copied_by_parts(array)
    try:
        return copied_by_runtime(array)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        return copied_by_program(array)


def why_not_staged(array: Any) -> str:
    """Why an array cannot go through the host, or nothing."""
    return STAYS_WEAK if getattr(array, "weak_type", False) else ""


def staged(array: jax.Array) -> Staged:
    """Copy an array to the host. The array is still there."""
    impl = jax.random.key_impl(array) if is_key(array) else None
    data = array if impl is None else jax.random.key_data(array)
    return Staged(
        shape=data.shape,
        sharding=data.sharding,
        layout=_layout(data),
        committed=data.committed,
        impl=impl,
        parts=tuple((next(iter(part.devices())), _on_host(part)) for part in parts_of(data)),
    )


def put_back(held: Staged) -> jax.Array:
    """Make the array again where it was."""
    with jax.enable_x64(True):  # otherwise 64-bit values lose half their bits
        # JAX takes a layout with a place only, so that an array with a layout of its own has a place afterwards.
        if held.committed or not _is_plain(held.layout):
            parts = [_put(held, device, values) for device, values in held.parts]
            array = jax.make_array_from_single_device_arrays(held.shape, held.sharding, parts)
        else:
            ((device, values),) = held.parts
            with jax.default_device(device):
                array = jax.device_put(values)
        array.block_until_ready()
        return array if held.impl is None else jax.random.wrap_key_data(array, impl=held.impl)


def _put(held: Staged, device: Any, values: np.ndarray[Any, Any]) -> jax.Array:
    place = SingleDeviceSharding(device, memory_kind=held.sharding.memory_kind)
    if _is_plain(held.layout):
        return jax.device_put(values, place)
    return jax.device_put(values, Format(held.layout, place))


def _on_host(part: jax.Array) -> np.ndarray[Any, Any]:
    values = np.asarray(part)
    # A CPU lends its own memory out, which goes with the array.
    return values.copy() if next(iter(part.devices())).platform == "cpu" else values


def _layout(array: Any) -> Any:
    return array.format.layout


def _is_plain(layout: Any) -> bool:
    order = getattr(layout, "major_to_minor", None)
    return order is None or tuple(order) == tuple(range(len(order)))


# By its key: what stands on the host, its bytes, and where it was.
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
        leaves, self._shape = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves: list[Any] = [leaf for _, leaf in leaves]
        self.paths: dict[int, str] = {}
        self._places: dict[int, list[int]] = {}
        self.moved: list[MovedArray] = []
        self.seconds: dict[MoveKind, float] = {"device": 0.0, "host": 0.0}
        keys: dict[int, int] = {}
        for place, (path, leaf) in enumerate(leaves):
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
        """Carry out a plan's steps in order.

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
        self._record(key, "device", size, before)
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
            self._record(key, "host", size, before)
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

    def _record(self, key: int, kind: MoveKind, size: int, before: tuple[int, ...]) -> None:
        after = addresses(self.array(key))
        self.moved.append(MovedArray(path=self.paths[key], kind=kind, bytes=size, before=before, after=after))


def addresses(array: jax.Array) -> tuple[int, ...]:
    """Where each part that is here is, in the order of the devices; none where that is unknown."""
    return tuple(part.unsafe_buffer_pointer() for part in parts_of(array)) if array.size else ()


def address_on(array: jax.Array, device: Any) -> int | None:
    """Where its part on a device is; None where it has none there, or is empty."""
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
