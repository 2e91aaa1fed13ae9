"""Imbalance: one device of a mesh holds much less than another, so that the fullest sets what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jaxmem_callbacks.analysis.hysteresis import Episode
from jaxmem_callbacks.analysis.lasting import Lasting
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus
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
        return [_event(census, widest, self._lasting.since({"gap"}), self._source())]

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


def _event(census: ArrayCensus, gap: _Gap, since: int, source: str) -> MemoryEvent:
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
