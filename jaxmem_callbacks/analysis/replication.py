"""Replication: large arrays that every device of a mesh holds whole, while their like are split over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from jaxmem_callbacks.analysis.lasting import Lasting
from jaxmem_callbacks.analysis.observation import Observation
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.units import format_bytes

_FSDP = advise("preset.load", names="'fsdp'")
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
        return [_event(census, named, why[named[0].key], self._lasting.since(begun))] if named else ()

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


def _event(census: ArrayCensus, groups: Sequence[ArrayGroup], why: str, since: int) -> MemoryEvent:
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
