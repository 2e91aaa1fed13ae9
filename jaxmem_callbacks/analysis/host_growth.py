"""Growth of the host's memory: what the process holds there besides arrays.

Resident memory is judged as live arrays are, over ten times as long, because the system's figure has everything in it: caches of
data, compiled programs, an allocator's own. A cache that fills and levels off is no growth: over the latest steps memory must
still rise, at half the speed of all of them or faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.trend import Rise, Trend
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import MIB, format_bytes

_LONGER = 10  # times the steps that a growth of arrays must last
_LEAST = 256 * MIB  # less is noise of allocators and libraries
_AS_FAST = 0.5  # of the rate over all steps, over the latest ones
_WORTH = 0.1  # of the growth: a container of less explains little of it
_QUIET = 10  # looks


@final
class HostGrowthDetector:
    """Follows the process's resident memory less the arrays that are in it; one event while it grows.

    Args:
        settings: Its thresholds.
        largest: Names the largest Python containers of so many bytes and more; called once an event. Default: names none.
    """

    def __init__(self, settings: MonitorSettings, largest: Callable[[int], Sequence[str]] = lambda _: ()) -> None:
        self._largest = largest
        self._least = max(_LEAST, settings.growth_min_bytes)
        self._long = Trend(_LONGER * settings.growth_steps)
        self._latest = Trend(settings.growth_steps)
        self._episode = Episode(begin=0.0, release=0.0, quiet=_QUIET)
        self._arrays = 0

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event."""
        if observation.arrays is not None:
            self._arrays = _on_host(observation.arrays)
        resident = [each for each in observation.readings if each.source == "host" and each.resident_bytes is not None]
        for reading in resident:
            if reading.step >= 0 and reading.resident_bytes is not None:
                beside = max(reading.resident_bytes - self._arrays, 0)
                self._long.add(reading.step, beside)
                self._latest.add(reading.step, beside)
        if not resident:
            return ()
        rise, now = self._rise(), resident[-1]
        if not self._episode.begins(0.0 if rise is None else rise.gain) or rise is None:
            return ()
        largest = self._largest(int(_WORTH * rise.gain))
        held = f" Largest Python containers: {'; '.join(largest)}." if largest else ""
        return [
            MemoryEvent(
                kind="growth",
                step=now.step,
                time_s=now.time_s,
                device="host",
                message=(
                    f"The host's memory has grown since step {rise.since_step}: {format_bytes(int(rise.gain))} more by step "
                    f"{now.step}, {format_bytes(int(rise.per_step))} a step, besides JAX's arrays; the process holds "
                    f"{format_bytes(now.resident_bytes)}.{held}"
                ),
                action=(
                    "Is something of the host kept at each step, such as NumPy batches, metrics or futures in a list, or a cache "
                    "without a bound? Python's tracemalloc names the lines that allocate."
                ),
                figures={
                    "since_step": rise.since_step,
                    "bytes_more": int(rise.gain),
                    "bytes_per_step": int(rise.per_step),
                    "resident_bytes": now.resident_bytes or 0,
                },
            )
        ]

    def _rise(self) -> Rise | None:
        """What grew for long enough, by enough, and still grows."""
        rise, latest = self._long.rise(), self._latest.rise()
        if rise is None or latest is None or rise.gain < max(self._least, rise.let_go):
            return None
        return rise if latest.per_step >= _AS_FAST * rise.per_step else None


def _on_host(census: ArrayCensus) -> int:
    """Bytes of the live arrays that are part of the process's resident memory: those of CPU devices."""
    here = [group for group in census.groups if group.devices[0].startswith("cpu")]
    # Those in groups that are too small to be listed are where the listed ones are, if these are all in one place.
    left_out = census.left_out_bytes if len(here) == len(census.groups) else 0
    return left_out + sum(group.bytes * len(group.devices) for group in here)
