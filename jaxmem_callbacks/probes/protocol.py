"""`Probe`: what the monitor asks for readings; and a scripted one for tests."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from jaxmem_callbacks.records.arguments import refuse, require
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.runs import Reading, Unavailable

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
        """The allocator's statistics, or None."""
        ...

    def default_memory(self) -> Any:
        """The memory that arrays live in by default; its ``kind`` is a text."""
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


_SEEN = (Reading, Unavailable, ArrayCensus)
_EXPECTED = "one entry a read, each a reading, a census or a list of these"


@final
class ScriptedProbe:
    """Replays readings: the first group at the first read, and so on; nothing after the last.

    Args:
        script: One entry a read, each a reading, a census or a sequence of these.

    Example:
        >>> from jaxmem_callbacks.records.runs import Reading
        >>> reading = Reading(source="host", device="host", step=0, time_s=0.0, resident_bytes=1024)
        >>> probe = ScriptedProbe([reading])
        >>> probe.read(0)[0].resident_bytes, probe.read(1)
        (1024, ())
    """

    def __init__(self, script: Iterable[Seen | Sequence[Seen]]) -> None:
        require("ScriptedProbe", "script", script, Iterable, _EXPECTED)
        groups = [(entry,) if isinstance(entry, _SEEN) else entry for entry in script]
        for group in groups:
            if not isinstance(group, list | tuple) or not all(isinstance(each, _SEEN) for each in group):
                refuse("ScriptedProbe", "script", group, _EXPECTED)
        self._script = iter([tuple(group) for group in groups])

    def read(self, step: int) -> Sequence[Seen]:  # noqa: ARG002 - the script has steps of its own
        """The next group of the script, as it was given."""
        return next(self._script, ())
