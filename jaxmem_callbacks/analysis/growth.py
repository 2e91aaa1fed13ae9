"""Growth: live arrays that become more and more. The event names which: shape, dtype, number, and where they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.trend import Rise, Trend
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.records.settings import MonitorSettings
from jaxmem_callbacks.records.units import format_bytes

_BEGIN, _RELEASE = 0.5, 0.0  # of a rise's order
_QUIET = 10  # looks
_SHOWN = 3  # groups named in one message
_ALL = "all"
_KEPT = 100  # looks at the groups

_Counts = dict[Any, tuple[int, int]]  # of each group: arrays, bytes


@final
class GrowthDetector:
    """Follows every group of like arrays and all of them together; tells once while any of these grows."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._episode = Episode(begin=_BEGIN, release=_RELEASE, quiet=_QUIET)
        self._counts: dict[Any, Trend] = {}
        self._bytes: dict[Any, Trend] = {}
        self._seen: list[tuple[int, _Counts]] = []  # step and groups, thinned as it grows

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event."""
        census = observation.arrays
        if census is None or census.step < 0:
            return ()
        groups = {group.key: (group.count, group.bytes) for group in census.groups}
        self._remember(census.step, groups)
        found: list[tuple[Rise, Any]] = []
        for key, (count, size) in {_ALL: (census.count, census.bytes), **groups}.items():
            for trends, value, least in (
                (self._counts, count, self._settings.growth_min_arrays),
                (self._bytes, size, self._settings.growth_min_bytes),
            ):
                trend = trends.setdefault(key, Trend(self._settings.growth_steps))
                trend.add(census.step, value)
                rise = trend.rise()
                if rise is not None and rise.gain >= least:
                    found.append((rise, key))
        self._forget(groups)
        level = max((rise.order for rise, _ in found), default=0.0)
        if not self._episode.begins(level):
            return ()
        rise, _ = max(found, key=lambda pair: (pair[1] != _ALL, pair[0].order))
        return [self._event(census, rise, {key for _, key in found})]

    def _remember(self, step: int, groups: _Counts) -> None:
        if self._seen and step < self._seen[-1][0]:  # after a restore
            self._seen.clear()
        self._seen.append((step, groups))
        if len(self._seen) > _KEPT:
            del self._seen[1::2]

    def _forget(self, groups: _Counts) -> None:
        """Groups that are gone or too small to be listed: their story is over."""
        for trends in (self._counts, self._bytes):
            for key in [key for key in trends if key != _ALL and key not in groups]:
                del trends[key]

    def _event(self, census: ArrayCensus, rise: Rise, grown: set[Any]) -> MemoryEvent:
        earlier = [counts for step, counts in self._seen if step <= rise.since_step]
        before = earlier[-1] if earlier else self._seen[0][1]
        gains = [(group, *_gain(group, before)) for group in census.groups]
        # Where only the whole grows, as by arrays of ever other shapes, all that came are its parts.
        named = [gain for gain in gains if gain[0].key in grown] or [gain for gain in gains if gain[1] > 0]
        named.sort(key=lambda gain: (-gain[2], -gain[1]))
        count, size = census.count - _sum(before, 0), census.bytes - _sum(before, 1)
        if named and grown != {_ALL}:
            count, size = sum(gain[1] for gain in named), sum(gain[2] for gain in named)
        parts = "; ".join(_part(*gain) for gain in named[:_SHOWN])
        more = f"; and {len(named) - _SHOWN} more kinds" if len(named) > _SHOWN else ""
        first = named[0][0] if named else None
        return MemoryEvent(
            kind="growth",
            step=census.step,
            time_s=census.time_s,
            device=first.devices[0] if first else "all",
            message=(
                f"Live arrays grow since step {rise.since_step}: {count} more by step {census.step}, {format_bytes(size)} more "
                f"on a device. What grows: {parts or 'unknown, because it is in groups too small to be listed'}{more}."
            ),
            action=(
                "Look at the line named: something there is kept, such as a list of losses or metrics. Convert what you keep "
                "with float() or jax.device_get and let the arrays go."
            ),
            figures={
                "since_step": rise.since_step,
                "arrays_more": count,
                "bytes_more": size,
                "live_array_count": census.count,
                "live_array_bytes": census.bytes,
                **({"what": first.type_text, "site": first.site, "count": first.count} if first else {}),
            },
        )


def _gain(group: ArrayGroup, before: _Counts) -> tuple[int, int]:
    count, size = before.get(group.key, (0, 0))
    return group.count - count, group.bytes - size


def _sum(counts: _Counts, at: int) -> int:
    return sum(pair[at] for pair in counts.values())


def _part(group: ArrayGroup, count: int, size: int) -> str:
    where = f" as {group.placement}" if group.placement else ""
    return (
        f"{group.type_text}{where}, {count} more ({group.count} now, {format_bytes(size)} more), made at {group.site}"
    )
