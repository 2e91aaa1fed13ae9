"""Moving arrays together: where buffers are, which are to move and how, and what came of it. Addresses and bytes are ints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MoveKind = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBuffer:
    """A buffer of one device and where it is.

    Attributes:
        key: What it is known by.
        address: Where it begins.
        bytes: Its length.
        room: What the pool gave it, where that is more than its length; else 0.
        movable: Whether it may be moved.
        stageable: Whether it may go through the host too.
    """

    key: int
    address: int
    bytes: int
    room: int = 0
    movable: bool = True
    stageable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveStep:
    """One step of a plan.

    Attributes:
        kind: ``device``: copied on the device, then let go of. ``host``: all of them copied to the host, let go of, and put back.
        keys: The buffers, in the order that they are put in.
        bytes: Of all of them together.
        to: Where they are expected to be afterwards, in the same order.
    """

    kind: MoveKind
    keys: tuple[int, ...]
    bytes: int
    to: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovePlan:
    """The moves of one device, in their order.

    Attributes:
        steps: What to do.
        stays: Key of a buffer that stays, to why.
        largest_before: The largest free block between and behind the buffers now.
        largest_after: And after the steps, as expected.
        extra_bytes: The most memory that a step takes in addition, on the device or on the host.
    """

    steps: tuple[MoveStep, ...]
    stays: Mapping[int, str]
    largest_before: int
    largest_after: int
    extra_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MovedArray:
    """An array that was moved.

    Attributes:
        path: Where in the tree it is, the first place of an array that is at several.
        kind: How it was moved.
        bytes: Of this process's parts together.
        before: The address of each part that is here, in the order of the devices; empty where none is known.
        after: And afterwards.
    """

    path: str
    kind: MoveKind
    bytes: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeBlocks:
    """An allocator's report of its free memory.

    Attributes:
        free_bytes: In all, or None.
        largest_free_bytes: In one piece, or None.
        fragmentation: The share of it outside the largest piece, or None.
        reason: Why a figure is None; empty where all are known.
    """

    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    fragmentation: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DefragmentReport:
    """What `jm.defragment` did.

    Attributes:
        done: Whether anything was to be done on this platform; False leaves the tree untouched, the same objects.
        reason: Why not; empty where it was done.
        before: Device to its free memory before.
        after: And after.
        moved: The arrays that were moved, in their order.
        stayed: Path of an array that stayed, to why.
        extra_bytes: The most memory that a step took in addition, on the device or on the host.
        seconds: Of all of it, planning included.
        device_seconds: Of the copies on the device.
        host_seconds: Of the copies to the host and back.
        device_copy_bytes_per_s: What one large copy on the device reaches here; None where nothing was moved so.
        host_link_bytes_per_s: What one large copy to the host and back reaches here; None where nothing was moved so.
    """

    done: bool
    reason: str = ""
    before: Mapping[str, FreeBlocks]
    after: Mapping[str, FreeBlocks]
    moved: tuple[MovedArray, ...] = ()
    stayed: Mapping[str, str]
    extra_bytes: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    device_copy_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes that were moved on the device."""
        return sum(each.bytes for each in self.moved if each.kind == "device")

    @property
    def host_bytes(self) -> int:
        """Bytes that went to the host and back."""
        return sum(each.bytes for each in self.moved if each.kind == "host")

    @property
    def device_share(self) -> float | None:
        """The moves' speed on the device as a share of one large copy's, or None."""
        return _share(self.device_bytes, self.device_seconds, self.device_copy_bytes_per_s)

    @property
    def host_share(self) -> float | None:
        """The staged moves' speed as a share of one large copy's to the host and back, or None."""
        return _share(self.host_bytes, self.host_seconds, self.host_link_bytes_per_s)


def _share(count: int, seconds: float, rate: float | None) -> float | None:
    return count / seconds / rate if count and seconds and rate else None
