"""Growth: live arrays that become more and more. The event names which: shape, dtype, number, and where they are made.

They are judged by bytes. A scalar has four, but costs the host and the allocator a kibibyte: so a list of losses is told when its
number matters, and epochs that keep some ten thousand of them are none.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, final

from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.trend import Rise, Trend
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import KIB, format_bytes

_BEGIN, _RELEASE = 0.5, 0.0  # of a rise's order
_QUIET = 10  # looks
_SHOWN = 3  # groups named in one message
_ALL = "all"
_KEPT = 100  # looks at the groups
_LEAST = KIB  # what an array costs, however small: the host spends more on each (tests/test_array_cost.py)
# Times the steps that a growth must last. A list that is emptied within a shorter time hides a leak, which a longer one shows.
_SPANS = (1, 10, 100)
_STILL = 0.5  # of what a growth must gain to be told, below which it is over
_GONE = 64  # kinds of arrays whose rise was let go of, and that are remembered for when they come again

_Counts = dict[Any, tuple[int, int]]  # of each group: arrays, bytes


@final
class GrowthDetector:
    """Follows every group of like arrays and all of them together; tells once while any of these grows."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._episode = Episode(begin=_BEGIN, release=_RELEASE, quiet=_QUIET)
        self._trends: dict[Any, _Trends] = {}  # the one that was seen last comes last
        self._seen: list[tuple[int, _Counts]] = []  # step and groups, thinned as it grows

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event."""
        census = observation.arrays
        if census is None or census.step < 0:
            return ()
        groups = {group.key: (group.count, group.bytes) for group in census.groups}
        self._remember(census.step, groups)
        costs: _Counts = {key: (count, max(size, _LEAST * count)) for key, (count, size) in groups.items()}
        rest = max(census.left_out_bytes, _LEAST * census.left_out_count)
        costs[_ALL] = census.count, rest + sum(cost for _, cost in costs.values())
        found = [
            (rise, key) for key, (count, cost) in costs.items() for rise in self._rises(census.step, key, count, cost)
        ]
        self._forget(census.step, costs)
        level = max((rise.order for rise, _ in found), default=0.0)
        if not self._episode.begins(level):
            return ()
        rise, _ = max(found, key=lambda pair: (pair[1] != _ALL, pair[0].order))
        return [self._event(census, rise, {key for _, key in found})]

    def _rises(self, step: int, key: Any, count: int, cost: int) -> list[Rise]:
        """What is large enough to be told, of one kind of arrays or of all."""
        trends = self._trends[key] = self._trends.pop(key, None) or _Trends(self._settings)
        trends.add(step, count, cost)
        return trends.large(_STILL if self._episode.running else 1.0)

    def _remember(self, step: int, groups: _Counts) -> None:
        if self._seen and step < self._seen[-1][0]:  # after a restore
            self._seen.clear()
        self._seen.append((step, groups))
        if len(self._seen) > _KEPT:
            del self._seen[1::2]

    def _forget(self, step: int, present: Container[Any]) -> None:
        """Groups that are gone or too small to be listed: their story is over, unless they may come again as they came before."""
        gone = [key for key in self._trends if key not in present]
        for key in [key for key in gone if not self._trends[key].have_risen] + gone[:-_GONE]:
            self._trends.pop(key, None)
        for key in gone[-_GONE:]:
            if key in self._trends:
                self._trends[key].add(step, 0, 0)

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
        small = size < self._settings.growth_min_bytes <= _LEAST * count
        host = f" and {format_bytes(_LEAST * count)} or more on the host, by their number" if small else ""
        return MemoryEvent(
            kind="growth",
            step=census.step,
            time_s=census.time_s,
            device=first.devices[0] if first else "all",
            message=(
                f"Live arrays grow since step {rise.since_step}: {count} more by step {census.step}, {format_bytes(size)} more "
                f"on a device{host}. What grows: {parts or 'unknown, because it is in groups too small to be listed'}{more}."
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


class _Trends:
    """What one kind of arrays costs, and their number where the settings judge it, over shorter and longer times."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._costs = [Trend(times * settings.growth_steps) for times in _SPANS]
        self._counts = [] if settings.growth_min_arrays is None else [Trend(settings.growth_steps)]
        self._least = settings.growth_min_bytes, settings.growth_min_arrays or 0

    def add(self, step: int, count: int, cost: int) -> None:
        for trend in self._costs:
            trend.add(step, cost)
        for trend in self._counts:
            trend.add(step, count)

    def large(self, share: float) -> list[Rise]:
        """Rises that gained such a share of what is enough; of what was let go of before, as much again."""
        return [
            rise
            for trends, least in zip((self._costs, self._counts), self._least, strict=True)
            for trend in trends
            for rise in (trend.rise(), trend.stays())
            if rise is not None and rise.gain >= share * max(least, rise.let_go)
        ]

    @property
    def have_risen(self) -> bool:
        return any(trend.has_risen for trend in (*self._costs, *self._counts))


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
