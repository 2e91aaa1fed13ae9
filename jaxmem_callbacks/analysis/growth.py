"""Growth of live arrays and of the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.timeseries import Episode, Rise, Trend
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import KIB, MIB, format_bytes

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


_LONGER = 10  # times the steps that a growth of arrays must last
_LEAST_OF_HOST = 256 * MIB  # less is noise of allocators and libraries
_AS_FAST = 0.5  # of the rate over all steps, over the latest ones
_WORTH = 0.1  # of the growth: a container of less explains little of it


@final
class HostGrowthDetector:
    """Follows the process's resident memory less the arrays that are in it; one event while it grows.

    Args:
        settings: Its thresholds.
        largest: Names the largest Python containers of so many bytes and more; called once an event. Default: names none.
    """

    def __init__(self, settings: MonitorSettings, largest: Callable[[int], Sequence[str]] = lambda _: ()) -> None:
        self._largest = largest
        self._least = max(_LEAST_OF_HOST, settings.growth_min_bytes)
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
