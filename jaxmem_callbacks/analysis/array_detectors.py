"""Detectors over live arrays: growth, also of the host's memory; unlike amounts on a mesh; large arrays held whole."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.timeseries import Debounce, HysteresisTrigger, Rise, Trend
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.records.units import KIB, MIB, format_bytes

_BEGIN, _RELEASE = 0.5, 0.0  # of a rise's order
_QUIET = 10  # looks
_SHOWN = 3  # groups named in one message
_ALL = "all"
_KEPT = 100  # looks at the groups
_LEAST = KIB  # what an array costs, however small: the host spends more on each (tests/test_array_cost.py)
# Times the steps that a growth must last. A list that is emptied within a shorter time hides a leak, which a longer one shows.
_SPANS = (1, 10, 100)
_STILL = 0.5  # of what a growth must gain to be reported, below which it is over
_GONE = 64  # kinds of arrays whose rise was let go of, and that are remembered for when they come again

_Counts = dict[Any, tuple[int, int]]  # of each group: arrays, bytes


@final
class GrowthDetector:
    """Every group of like arrays and all of them together; one event while any of these grows."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._episode = HysteresisTrigger(begin=_BEGIN, release=_RELEASE, quiet=_QUIET)
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
        """Rises that are large enough to report, of one kind of arrays or of all."""
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
        self._episode = HysteresisTrigger(begin=0.0, release=0.0, quiet=_QUIET)
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


_FSDP = advise("preset.load", names="'fsdp'")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """The fullest and the emptiest device of one mesh."""

    full: str
    full_bytes: int
    empty: str
    empty_bytes: int
    devices: int

    @property
    def share(self) -> float:
        return 1 - self.empty_bytes / self.full_bytes if self.full_bytes else 0.0


@final
class ImbalanceDetector:
    """Compares devices that share an array: what the allocator holds there, or the live arrays where it reports nothing.

    Devices that share none are not compared: a process may use one of eight, or give each stage of a pipeline its own.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        begin = settings.imbalance_share
        self._least = settings.imbalance_min_bytes
        self._episode = HysteresisTrigger(begin=begin, release=begin / 2)
        self._lasting = Debounce(settings.growth_steps)
        self._in_use: dict[str, int] = {}
        self._lowest: dict[str, int] = {}  # since the last look at the arrays
        self._live: dict[str, int] = {}

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event, for the mesh with the widest gap, once it has lasted."""
        for reading in observation.readings:
            self._learn(reading)
        census = observation.arrays
        if census is None:
            return ()
        gaps = [gap for mesh in _meshes(census) if (gap := self._gap(mesh))]
        self._lowest.clear()
        widest = max(gaps, key=lambda gap: gap.share, default=None)
        level = widest.share if widest else 0.0
        self._episode.begins(level)
        if not self._lasting.begun(census.step, {"gap"} if self._episode.running else set()) or widest is None:
            return ()
        return [_imbalance_event(census, widest, self._lasting.since({"gap"}), self._source())]

    def _learn(self, reading: Reading) -> None:
        if reading.source == "allocator" and reading.in_use_bytes is not None:
            # Devices are read one after the other while programs run: only the lowest since the last look can be compared.
            lowest = min(reading.in_use_bytes, self._lowest.get(reading.device, reading.in_use_bytes))
            self._lowest[reading.device] = self._in_use[reading.device] = lowest
        elif reading.source == "live_arrays" and reading.live_array_bytes is not None:
            self._live[reading.device] = reading.live_array_bytes

    def _source(self) -> str:
        return "allocator" if self._in_use else "live arrays"

    def _gap(self, mesh: tuple[str, ...]) -> _Gap | None:
        held: Mapping[str, int] = self._in_use or self._live
        known = [device for device in mesh if device in held]
        if not known:
            return None
        full, empty = max(known, key=lambda device: held[device]), min(known, key=lambda device: held[device])
        if held[full] - held[empty] < self._least:
            return None
        return _Gap(full=full, full_bytes=held[full], empty=empty, empty_bytes=held[empty], devices=len(known))


def _meshes(census: ArrayCensus) -> set[tuple[str, ...]]:
    return {group.devices for group in census.groups if group.count and len(group.devices) > 1}


def _imbalance_event(census: ArrayCensus, gap: _Gap, since: int, source: str) -> MemoryEvent:
    alone: dict[str, int] = {}
    for group in census.groups:
        if group.devices == (gap.full,):
            alone[f"{group.type_text} made at {group.site}"] = group.bytes
    largest = max(alone, key=lambda what: alone[what], default=None)
    only = f" On {gap.full} alone are {largest}, {format_bytes(alone[largest])}." if largest else ""
    return MemoryEvent(
        kind="imbalance",
        step=census.step,
        time_s=census.time_s,
        device=gap.full,
        message=(
            f"{gap.full} holds {format_bytes(gap.full_bytes)} and {gap.empty} {format_bytes(gap.empty_bytes)} ({source}), of "
            f"{gap.devices} devices of one mesh, since step {since}: the fullest sets what fits.{only}"
        ),
        action=(
            "Place what is on one device over the mesh: "
            f"{advise('sharding.move', names='tree', whole='tree', mesh='mesh', policy=_FSDP)}; keep batches, "
            "kept results and copies of the state off the default device."
        ),
        figures={
            "since_step": since,
            "imbalance_share": round(gap.share, 4),
            "fullest_bytes": gap.full_bytes,
            "emptiest_bytes": gap.empty_bytes,
            "emptiest": gap.empty,
            "only_there": largest or "none",
        },
    )


SPLIT = (
    f"Split them: {advise('sharding.move', names='tree', whole='tree', mesh='mesh', policy=_FSDP)}, and where a step "
    f"returns them, {advise('step.under', step='step', policy=_FSDP)}. "
    "Raise monitor.replication_min if they are meant to be whole."
)

_SHOWN_KINDS = 3
_TWINS = 5  # elements that are split for each that is whole, where others of the shape are split
_BY_NAME = "rules"  # a policy that splits what its rules name: a census knows no names
_SHAPES, _MOSTLY = 3, 2  # shapes that are split, and such elements for each that is whole, where none of the shape is


@final
class ReplicationDetector:
    """One event for each kind of array that stays whole for a while: gathering for a checkpoint or an evaluation passes.

    With ``split`` (a policy that splits the whole state) every large array is meant that its rule for shapes splits over these
    devices. Else, and where rules for axis names split, whole arrays must be the exception: a few where others of their shape
    are split (with ZeRO-1, where parameters are whole and moments are not, it is every one), or larger ones where arrays of
    several other shapes are split, more of them than a batch has.

    Args:
        settings: From which size on.
        split: The policy's sharding of the state, such as ``fsdp``, or None.
        would_split: Whether the policy's rule for shapes splits an array of this shape and so many bytes over so many devices.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        split: str | None = None,
        would_split: Callable[[tuple[int, ...], int, int], bool] = lambda *_: True,
    ) -> None:
        self._least = settings.replication_min_bytes
        self._split = None if split == _BY_NAME else split
        self._would_split = would_split
        self._lasting = Debounce(settings.growth_steps)

    def detect(self, observation: Observation) -> Sequence[MemoryEvent]:
        """At most one event for all kinds that are new."""
        census = observation.arrays
        if census is None:
            return ()
        why = {group.key: reason for group in census.groups if (reason := self._reason(group, census.groups))}
        begun = self._lasting.begun(census.step, set(why))
        named = [group for group in census.groups if group.key in begun]
        return [_replication_event(census, named, why[named[0].key], self._lasting.since(begun))] if named else ()

    def _reason(self, group: ArrayGroup, groups: Sequence[ArrayGroup]) -> str | None:
        """Why it should be split, or None."""
        if not group.replicated or not group.count or group.bytes // group.count < self._least or not group.shape:
            return None
        if self._split is not None:
            meant = self._would_split(group.shape, group.bytes // group.count, group.spread)
            return f"the policy has sharding={self._split}" if meant else None
        beside = [each for each in groups if each.devices == group.devices and len(each.shape) > 1]
        split = [each for each in beside if not each.replicated]
        whole_elements = sum(each.count * each.elements for each in beside if each.replicated)
        split_elements = sum(each.count * each.elements for each in split)
        twins = [each for each in split if each.shape == group.shape]
        if twins and split_elements >= _TWINS * whole_elements:
            return f"{twins[0].count} others of this shape are placed as {twins[0].placement}"
        smaller = [each for each in split if each.elements <= group.elements]
        shapes = {each.shape for each in smaller}
        if not twins and len(shapes) >= _SHAPES and split_elements >= _MOSTLY * whole_elements:
            return f"smaller ones such as {smaller[0].type_text} are placed as {smaller[0].placement}"
        return None


def _replication_event(census: ArrayCensus, groups: Sequence[ArrayGroup], why: str, since: int) -> MemoryEvent:
    first = groups[0]
    total = sum(group.bytes for group in groups)
    parts = "; ".join(f"{group.count} of {group.type_text}, made at {group.site}" for group in groups[:_SHOWN_KINDS])
    more = f"; and {len(groups) - _SHOWN_KINDS} more kinds" if len(groups) > _SHOWN_KINDS else ""
    figures: dict[str, Any] = {
        "since_step": since,
        "replicated_bytes": total,
        "devices": first.spread,
        "what": first.type_text,
        "count": first.count,
        "site": first.site,
    }
    return MemoryEvent(
        kind="replication",
        step=census.step,
        time_s=census.time_s,
        device=first.devices[0],
        message=(
            f"Each of {first.spread} devices holds {format_bytes(total)} of arrays whole since step {since}, though {why}: "
            f"{parts}{more}."
        ),
        action=SPLIT,
        figures=figures,
    )
