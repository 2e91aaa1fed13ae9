"""Meshes whose devices hold unlike amounts, and large arrays that each of them holds whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.analysis.timeseries import Episode, Lasting
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.readings import Reading
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

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
        self._episode = Episode(begin=begin, release=begin / 2)
        self._lasting = Lasting(settings.growth_steps)
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
    only = f" On {gap.full} alone lie {largest}, {format_bytes(alone[largest])}." if largest else ""
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
            "Place what lies on one device over the mesh: "
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

_SHOWN = 3
_TWINS = 5  # elements that are split for each that is whole, where others of the shape are split
_BY_NAME = "rules"  # a policy that splits what its rules name: a census knows no names
_SHAPES, _MOSTLY = 3, 2  # shapes that are split, and such elements for each that is whole, where none of the shape is


@final
class ReplicationDetector:
    """Tells once a kind of array, when it stayed for a while: gathering for a checkpoint or an evaluation passes.

    With ``split`` (a policy that splits the whole state) every large array is meant that its rule for shapes splits over these
    devices. Else, and where rules for axis names split, whole arrays must be the exception: a few where others of their shape
    are split (with ZeRO-1, where parameters are whole and moments are not, it is every one), or larger ones where arrays of
    several other shapes are split, more of them than a batch has.

    Args:
        settings: From which size on.
        split: What the policy says of the state, such as ``fsdp``, or None.
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
        self._lasting = Lasting(settings.growth_steps)

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
            return f"the policy says sharding={self._split}" if meant else None
        beside = [each for each in groups if each.devices == group.devices and len(each.shape) > 1]
        split = [each for each in beside if not each.replicated]
        whole_elements = sum(each.count * each.elements for each in beside if each.replicated)
        split_elements = sum(each.count * each.elements for each in split)
        twins = [each for each in split if each.shape == group.shape]
        if twins and split_elements >= _TWINS * whole_elements:
            return f"{twins[0].count} others of this shape lie as {twins[0].placement}"
        smaller = [each for each in split if each.elements <= group.elements]
        shapes = {each.shape for each in smaller}
        if not twins and len(shapes) >= _SHAPES and split_elements >= _MOSTLY * whole_elements:
            return f"smaller ones such as {smaller[0].type_text} lie as {smaller[0].placement}"
        return None


def _replication_event(census: ArrayCensus, groups: Sequence[ArrayGroup], why: str, since: int) -> MemoryEvent:
    first = groups[0]
    total = sum(group.bytes for group in groups)
    parts = "; ".join(f"{group.count} of {group.type_text}, made at {group.site}" for group in groups[:_SHOWN])
    more = f"; and {len(groups) - _SHOWN} more kinds" if len(groups) > _SHOWN else ""
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
