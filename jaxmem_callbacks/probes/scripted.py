"""ScriptedProbe: a shipped double that replays given readings, so that detectors and writers are tried without hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from jaxmem_callbacks.probes.protocol import Seen
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.readings import Reading, Unavailable


@final
class ScriptedProbe:
    """Replays readings: the first group at the first read, and so on; nothing after the last.

    Args:
        script: One entry a read, each a reading, a census or a sequence of these.

    Example:
        >>> from jaxmem_callbacks.records.readings import Reading
        >>> reading = Reading(source="host", device="host", step=0, time_s=0.0, resident_bytes=1024)
        >>> probe = ScriptedProbe([reading])
        >>> probe.read(0)[0].resident_bytes, probe.read(1)
        (1024, ())
    """

    def __init__(self, script: Iterable[Seen | Sequence[Seen]]) -> None:
        self._script = iter(
            [(entry,) if isinstance(entry, (Reading, Unavailable, ArrayCensus)) else tuple(entry) for entry in script]
        )

    def read(self, step: int) -> Sequence[Seen]:  # noqa: ARG002 - the script says the steps itself
        """The next group of the script, as it was given."""
        return next(self._script, ())
