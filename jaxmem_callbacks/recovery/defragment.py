"""``jm.defragment``: a tree's arrays moved together, and a report.

Moves are planned over the addresses of live arrays (``moving/compaction.py``) and carried out (``moving/mover.py``). Where
an array goes is the allocator's choice, and is read back. The runtime's own ``defragment()`` is never called: it aborts
on today's GPU wheels.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, final

import jax

from jaxmem_callbacks._compat.arrays import parts_of
from jaxmem_callbacks.probes.device_memory import AllocatorProbe
from jaxmem_callbacks.probes.live_arrays import HeapProbe
from jaxmem_callbacks.probes.protocol import Device, device_label
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.defragment import DefragmentReport, FreeBlocks, MoveStep, PlacedBuffer
from jaxmem_callbacks.records.errors import DefragmentError
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.records.units import parse_bytes
from jaxmem_callbacks.recovery.moving.compaction import compact, keep_copy
from jaxmem_callbacks.recovery.moving.mover import (
    Mover,
    address_on,
    device_copy_rate,
    host_link_rate,
    local_bytes,
    why_not_staged,
)
from jaxmem_callbacks.simulator.allocators import rounded

_Tree = TypeVar("_Tree")
_LEAST_EXTRA = 2**30
_DOES_ITSELF = {
    "cpu": "a CPU has no pool: each array is an allocation of its own, which the system places",
    "tpu": "the TPU's runtime moves buffers by itself, when an allocation finds no room",
}
_NO_POOL = "this allocator keeps no pool, or reports none; the default one (BFC) does"


def defragment(tree: _Tree, *, max_extra_bytes: int | str | None = None) -> tuple[_Tree, DefragmentReport]:
    """Move a GPU's arrays together, so that its free memory is in larger pieces. The tree that is given is consumed.

        state, report = jm.defragment(state)

    Values stay bit for bit, and so do shardings, layouts, memory kinds and what is one array at two places. Call it between
    steps, with the arrays that live long; no other name may hold them, since they are deleted. Each process moves its own parts;
    there is no collective, so that processes need not call it together.

    Args:
        tree: The state, and whatever else lives long: a tree of arrays and other leaves.
        max_extra_bytes: The most that one step takes in addition, on the device for a copy or on the host; None for the largest
            array, and at least 1 GiB.

    Returns:
        The tree, and what was done. On a TPU, which moves buffers by itself, and on a CPU it is the tree that was given, its
        arrays untouched, and ``report.reason`` holds the reason.

    Raises:
        DefragmentError: inside ``jax.jit``, an array that was deleted before, a bound that is no size, or whatever failed once
            moves had begun; then ``error.tree`` holds every array. Ctrl-C stays a `KeyboardInterrupt`, with a ``tree`` too.
    """
    began = time.perf_counter()
    mover = Mover(tree)
    probe = AllocatorProbe(_devices(mover))
    before = _free_blocks(probe)
    why = _nothing_to_do(probe, before)
    if why:
        return tree, DefragmentReport(done=False, reason=why, before=before, after=before, stayed={})
    jax.block_until_ready([mover.array(key) for key in mover.paths])
    extra = _bound(max_extra_bytes, mover)
    try:
        return _moved(mover, probe, before, extra, began)
    except DefragmentError:
        raise
    except Exception as error:
        msg = (
            f"{type(error).__name__} between two moves, after {len(mover.moved)} of them: {' '.join(str(error).split())}. "
            "The error's tree holds every array, moved or not: state = error.tree"
        )
        raise DefragmentError(msg, mover.tree) from error
    except BaseException as error:
        vars(error)["tree"] = mover.tree
        error.add_note("jm.defragment was interrupted. The exception's `tree` holds every array, moved or not.")
        raise


def _moved(
    mover: Mover, probe: AllocatorProbe, before: Mapping[str, FreeBlocks], extra: int, began: float
) -> tuple[Any, DefragmentReport]:
    stays: dict[int, str] = {}
    most = 0
    for device in _worst_first(probe, before):
        left, taken = compact(DeviceMover(mover, device), extra_bytes=extra)
        stays, most = stays | dict(left), max(most, taken)
    after = _free_blocks(probe)
    return mover.tree, _report(mover, stays, most, before, after, began)


@final
class DeviceMover:
    """Moves a tree's arrays on one device.

    Args:
        mover: The tree.
        device: The device.
    """

    def __init__(self, mover: Mover, device: Device) -> None:
        self._mover, self._device = mover, device
        self._moved_before = {each.path for each in mover.moved}
        self._probe = AllocatorProbe([device])

    def buffers(self) -> list[PlacedBuffer]:
        """The arrays that are here, movable unless they were moved for another device, and what else is here."""
        return placed_buffers(self._mover, self._device, self._moved_before)

    def free_bytes(self) -> int | None:
        """What is free in the pool."""
        return self._now().free_bytes

    def largest_free_bytes(self) -> int | None:
        """The largest free block."""
        return self._now().largest_free_bytes

    def copy_to(self, key: int, address: int) -> bool:
        """Copy an array, and keep the copy or the old one."""
        before, old = self.largest_free_bytes(), address_on(self._mover.array(key), self._device)

        def keep(new: jax.Array) -> bool:
            place = address_on(new, self._device)
            return keep_copy(new=place, old=old, expected=address, before=before, now=self.largest_free_bytes())

        return self._mover.copy_if(key, keep)

    def stage(self, step: MoveStep) -> None:
        """Arrays to the host and back."""
        self._mover.carry_out([step])

    def _now(self) -> FreeBlocks:
        return _free_blocks(self._probe)[device_label(self._device)]


def _devices(mover: Mover) -> Sequence[Device]:
    here = {device for key in mover.paths for device in mover.array(key).sharding.addressable_devices}
    return sorted(here, key=lambda device: device.id) or jax.local_devices()


def _nothing_to_do(probe: AllocatorProbe, before: Mapping[str, FreeBlocks]) -> str:
    platform = probe.devices[0].platform
    if platform in _DOES_ITSELF:
        return _DOES_ITSELF[platform]
    return _NO_POOL if all(each.free_bytes is None for each in before.values()) else ""


def _free_blocks(probe: AllocatorProbe) -> dict[str, FreeBlocks]:
    """The free memory of each allocator."""
    probe.reports = True
    found = probe.readings(0, time.time(), probe.snapshot())
    return {
        each.device: free_blocks(each) if isinstance(each, Reading) else FreeBlocks(reason=each.reason)
        for each in found
    }


def free_blocks(reading: Reading) -> FreeBlocks:
    """Free memory, its largest piece and fragmentation, by an allocator's reading; each unknown with its reason."""
    if reading.pool_bytes is None or reading.in_use_bytes is None:
        return FreeBlocks(reason=_NO_POOL)
    free, largest = reading.pool_bytes - reading.in_use_bytes, reading.largest_free_bytes
    if largest is None:
        return FreeBlocks(free_bytes=free, reason="jaxlib before 0.11 does not report the largest free block")
    share = (free - largest) / free if free else None
    return FreeBlocks(
        free_bytes=free,
        largest_free_bytes=largest,
        fragmentation=share,
        reason="" if free else "nothing is free in the pool",
    )


def _worst_first(probe: AllocatorProbe, before: Mapping[str, FreeBlocks]) -> list[Device]:
    return sorted(probe.devices, key=lambda device: -(before[device_label(device)].fragmentation or 0.0))


def _bound(given: int | str | None, mover: Mover) -> int:
    if given is None:
        largest = max((local_bytes(mover.array(key)) for key in mover.paths), default=0)
        return max(_LEAST_EXTRA, rounded(largest))
    try:
        return parse_bytes(given)
    except ValueError as error:
        msg = f"max_extra_bytes={given!r} is no size. {error}"
        raise DefragmentError(msg) from error


def placed_buffers(mover: Mover, device: Device, settled: Collection[str] = ()) -> list[PlacedBuffer]:
    """What is on a device: the tree's arrays, movable, and all others, fixed. None overlaps another.

    Args:
        mover: The tree.
        device: The device.
        settled: Paths of arrays that are not to be moved again.
    """
    found: list[PlacedBuffer] = []
    for key, path in mover.paths.items():
        array: Any = mover.array(key)
        part = next((each for each in parts_of(array) if array.size and device in each.devices()), None)
        if part is None or array.sharding.memory_kind not in (None, device.default_memory().kind):
            continue
        size = array.on_device_size_in_bytes() // len(array.sharding.device_set)
        found.append(
            PlacedBuffer(
                key=key,
                address=part.unsafe_buffer_pointer(),
                bytes=size,
                movable=path not in settled,
                stageable=not why_not_staged(array),
            )
        )
    own = {each.address for each in found}
    maps = [each for each in HeapProbe().read(0) if isinstance(each, HeapMap) and each.device == device_label(device)]
    others = (buffer for each in maps for buffer in each.buffers if buffer.address not in own)
    found += [
        PlacedBuffer(key=-1 - index, address=buffer.address, bytes=buffer.bytes, movable=False)
        for index, buffer in enumerate(others)
    ]
    return _apart(found)


def _apart(buffers: list[PlacedBuffer]) -> list[PlacedBuffer]:
    """Those that overlap none before them; arrays that share memory are one buffer, which stays."""
    found: list[PlacedBuffer] = []
    for each in sorted(buffers, key=lambda buffer: (buffer.address, -buffer.bytes)):
        if found and each.address < found[-1].address + rounded(found[-1].bytes):
            last = found.pop()
            found.append(PlacedBuffer(key=last.key, address=last.address, bytes=last.bytes, movable=False))
        else:
            found.append(each)
    return found


def _report(  # noqa: PLR0913, PLR0917 - the parts of the report
    mover: Mover,
    reasons: Mapping[int, str],
    extra: int,
    before: Mapping[str, FreeBlocks],
    after: Mapping[str, FreeBlocks],
    began: float,
) -> DefragmentReport:
    moved = {each.path for each in mover.moved}
    stayed = {path: _why_stays(mover, key, reasons) for key, path in mover.paths.items() if path not in moved}
    sizes = {
        kind: max((each.bytes for each in mover.moved if each.kind == kind), default=0) for kind in ("device", "host")
    }
    there = _devices(mover)[0]
    return DefragmentReport(
        done=True,
        before=before,
        after=after,
        moved=tuple(mover.moved),
        stayed=stayed,
        extra_bytes=extra,
        seconds=time.perf_counter() - began,
        device_seconds=mover.seconds["device"],
        host_seconds=mover.seconds["host"],
        device_copy_bytes_per_s=device_copy_rate(there, sizes["device"]) if sizes["device"] else None,
        host_link_bytes_per_s=host_link_rate(there, sizes["host"]) if sizes["host"] else None,
    )


def _why_stays(mover: Mover, key: int, reasons: Mapping[int, str]) -> str:
    array = mover.array(key)
    if not array.size:
        return "it is empty"
    return reasons.get(key, "it is not in the device's own memory")
