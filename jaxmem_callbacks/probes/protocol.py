"""Probe: what the monitor asks for readings. Enters: the step just completed; leaves: Readings, or why there are none."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.readings import Reading, Unavailable

Seen = Reading | Unavailable | ArrayCensus


class Device(Hashable, Protocol):
    """What a probe needs of a ``jax.Device``."""

    @property
    def platform(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``."""
        ...

    @property
    def id(self) -> int:
        """Unique over all processes of a run."""
        ...

    def memory_stats(self) -> Mapping[str, int] | None:
        """What the allocator says, or None."""
        ...

    def default_memory(self) -> Any:
        """The memory that arrays live in unless said otherwise; its ``kind`` is a text."""
        ...


class Probe(Protocol):
    """Reads memory of a live process.

    A probe never waits for the device, never raises where a platform lacks support (it returns ``Unavailable``), and
    changes no state.
    """

    def read(self, step: int) -> Sequence[Seen]:
        """What is seen now, labelled with the step that had just completed."""
        ...


def device_label(device: Device) -> str:
    """Platform and global id, such as ``gpu:0``: the same in every process of a run."""
    return f"{device.platform}:{device.id}"
