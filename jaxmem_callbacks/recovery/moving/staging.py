"""One array to the host and back, or copied on its device: an array enters, the same array at another place leaves.

Shape, dtype, sharding, layout, memory kind and whether it is committed stay, and every bit of the values: a signalling NaN, -0.0,
four-bit integers, 64-bit values while JAX makes none, and keys of random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from jaxmem_callbacks._compat.array_parts import parts_of
from jaxmem_callbacks.transforms.leaves import is_weak, typed

Copier = Callable[[jax.Array], jax.Array]
STAYS_WEAK = "it is weakly typed, which only a copy on the device keeps"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """An array that stands on the host.

    Attributes:
        shape: Of the whole array.
        sharding: Where it lay.
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
    if _is_key(array):
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
    impl = jax.random.key_impl(array) if _is_key(array) else None
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
    """Make the array again where it lay."""
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


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
