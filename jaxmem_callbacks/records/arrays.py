"""Live arrays in groups, and heap maps: which buffers of them have which addresses on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayGroup:
    """Live arrays that are alike.

    Attributes:
        shape: Of each of them.
        dtype: Such as ``float32``.
        placement: The partition spec such as ``P('fsdp', None)``; empty on a single device.
        devices: This process's devices that hold them, such as ``("gpu:0", "gpu:1")``.
        spread: Number of devices that one array is on, those of other processes included.
        replicated: Whether each of several devices holds the whole array.
        count: How many there are.
        bytes: Of all of them together, on one device.
        site: Where most of them were made, such as ``train.py:41 (train)``, or "unknown, because ...".
    """

    shape: tuple[int, ...]
    dtype: str
    placement: str
    devices: tuple[str, ...]
    spread: int
    replicated: bool
    count: int
    bytes: int
    site: str

    @property
    def key(self) -> tuple[tuple[int, ...], str, str, tuple[str, ...]]:
        """What they have in common."""
        return self.shape, self.dtype, self.placement, self.devices

    @property
    def type_text(self) -> str:
        """Shape and dtype as in signatures: ``float32[8,128]``."""
        return f"{self.dtype}[{','.join(str(size) for size in self.shape)}]"

    @property
    def elements(self) -> int:
        """Elements of one array, over all devices."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayCensus:
    """The live arrays of this process at one moment.

    Attributes:
        step: The step that had just completed, or -1 before the first.
        time_s: Seconds since the epoch.
        groups: The largest and the most numerous ones, largest first.
        left_out_count: Arrays in smaller groups that are not listed.
        left_out_bytes: Their bytes on one device.
        partial: Whether ``groups`` are only those that differ from the census written before; one with a count of 0 is gone.
    """

    step: int
    time_s: float
    groups: tuple[ArrayGroup, ...]
    left_out_count: int = 0
    left_out_bytes: int = 0
    partial: bool = False

    @property
    def count(self) -> int:
        """All arrays."""
        return self.left_out_count + sum(group.count for group in self.groups)

    @property
    def bytes(self) -> int:
        """All bytes, on one device of each group."""
        return self.left_out_bytes + sum(group.bytes for group in self.groups)


def changed_groups(before: ArrayCensus | None, now: ArrayCensus) -> ArrayCensus | None:
    """What differs from the census before, to write or to send; None where nothing does."""
    if before is None:
        return now
    known = {group.key: group for group in before.groups}
    present = {group.key for group in now.groups}
    changed = [group for group in now.groups if known.get(group.key) != group]
    changed += [_gone(group) for group in before.groups if group.key not in present]
    if not changed and (before.left_out_count, before.left_out_bytes) == (now.left_out_count, now.left_out_bytes):
        return None
    return ArrayCensus(
        step=now.step,
        time_s=now.time_s,
        groups=tuple(changed),
        left_out_count=now.left_out_count,
        left_out_bytes=now.left_out_bytes,
        partial=True,
    )


def with_changes(before: ArrayCensus | None, written: ArrayCensus) -> ArrayCensus:
    """The whole census again, from the one before and what was written."""
    groups = {group.key: group for group in before.groups} if before is not None and written.partial else {}
    groups |= {group.key: group for group in written.groups}
    return ArrayCensus(
        step=written.step,
        time_s=written.time_s,
        groups=tuple(sorted((g for g in groups.values() if g.count), key=lambda group: -group.bytes)),
        left_out_count=written.left_out_count,
        left_out_bytes=written.left_out_bytes,
    )


def _gone(group: ArrayGroup) -> ArrayGroup:
    return ArrayGroup(
        shape=group.shape,
        dtype=group.dtype,
        placement=group.placement,
        devices=group.devices,
        spread=group.spread,
        replicated=group.replicated,
        count=0,
        bytes=0,
        site=group.site,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBuffer:
    """The memory of one array on one device.

    Attributes:
        address: Where it begins, as the runtime reports it.
        bytes: Its length, padding included.
        label: Dtype and shape of the part on this device, such as ``float32[8,128]``.
    """

    address: int
    bytes: int
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeapMap:
    """The live buffers of one device.

    Attributes:
        device: Stable label such as ``gpu:0``.
        step: The step that had just been dispatched.
        time_s: Seconds since the epoch.
        buffers: In no order; arrays that share memory stand here each.
        left_out_count: Arrays whose address was not asked for, because they were still being computed.
        left_out_bytes: Their bytes on this device.
    """

    device: str
    step: int
    time_s: float
    buffers: Sequence[LiveBuffer]
    left_out_count: int = 0
    left_out_bytes: int = 0
