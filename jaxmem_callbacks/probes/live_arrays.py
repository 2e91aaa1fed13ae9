"""Live arrays: bytes and number of the `jax.Array`s that Python still holds, groups of like ones, and maps of their addresses.

Counts. Measured: device memory of arrays in the device's default memory. Arrays in host memory are left out. Parts of a sharded
array are not counted beside it, but an array of one device that was asked for its shards counts twice from then on, as JAX lists
it. Arrays alike in shape, dtype and sharding count as large as the first of them, also where their layouts differ. Backends: all;
it sees no temporaries of programs. Cost: 0.1 to 8 milliseconds, so it runs on the monitor's own thread, never in a hook.

Heap maps. Measured: where the buffers of ready arrays are. Backends: CPU and GPU. Cost: about 10 microseconds an array.
Two facts of the runtime decide how it is used. Asking an array for its address may wait until its memory is there, so only
arrays that are ready are asked. And while an address is asked for, the runtime lends the buffer out: a step that donates it at
that moment fails on a GPU, and copies it on a CPU. So this runs on the thread that calls the hook, and on no other.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import jax

from jaxmem_callbacks._compat.arrays import creation_call, creation_site, live_arrays, parts_of
from jaxmem_callbacks.probes.protocol import Device, Seen, device_label
from jaxmem_callbacks.records.arrays import ArrayCensus, ArrayGroup, HeapMap, LiveBuffer
from jaxmem_callbacks.records.runs import Reading, Unavailable

_LARGEST, _NUMEROUS = 32, 16  # groups in one census
_NEWEST, _EVERY = 8, 64  # of a group, the newest and every so many-th of the others are asked where they were made
_RECENT = 10  # looks, of which the highest is the usual level
_FALLEN = 0.875  # of it: less is looked at again
_PAUSES_S = (0.004, 0.008, 0.016)


@final
class LiveArraysProbe:
    """Counts live arrays. It survives arrays that are deleted meanwhile and keeps none alive.

    While a step that takes its state over is dispatched, the old state is deleted and the new one is not there yet, so that JAX
    lists neither. A sudden fall is therefore looked at again before it is believed.

    Args:
        pauses_s: Seconds before each of these looks.
    """

    def __init__(self, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        self._pauses_s = pauses_s
        self._sites: dict[Any, tuple[int, str]] = {}  # by group: its number when it was asked, the answer
        self._grown: set[Any] = set()  # groups that have doubled since: it may be others that they grow by
        self._recent: deque[int] = deque(maxlen=_RECENT)  # bytes of the last looks

    def read(self, step: int) -> Sequence[Seen]:
        """One reading a local device, also where it holds nothing, and one census of the groups."""
        devices = jax.local_devices()
        kinds = {device: device.default_memory().kind for device in devices}
        groups = self._counted(kinds)
        for pause_s in self._pauses_s:
            if _bytes(groups) >= _FALLEN * max(self._recent, default=0):
                break
            time.sleep(pause_s)
            groups = max(groups, self._counted(kinds), key=_bytes)
        self._recent.append(_bytes(groups))
        now = time.time()
        totals = {device: [0, 0] for device in devices}
        for group in groups.values():
            for device in group.devices:
                totals[device][0] += group.bytes
                totals[device][1] += group.count
        readings = [
            Reading(
                source="live_arrays",
                device=device_label(device),
                step=step,
                time_s=now,
                live_array_bytes=totals[device][0],
                live_array_count=totals[device][1],
            )
            for device in devices
        ]
        return [*readings, self._census(step, now, groups)]

    def beside(self, own: Iterable[Any]) -> ArrayCensus:
        """What is alive besides some arrays, such as the arguments of a step: every group, for one of them may be looked for."""
        kinds = {device: device.default_memory().kind for device in jax.local_devices()}
        groups = self._counted(kinds, {id(array) for array in own})
        return self._census(-1, time.time(), groups, largest=len(groups))

    def _counted(self, kinds: dict[Device, str], without: Collection[int] = ()) -> dict[Any, _Group]:
        """The live arrays in groups, without those of some ids. Nothing of them is held afterwards."""
        alike: dict[Any, list[jax.Array]] = {}
        for array in live_arrays():
            alike.setdefault((array.shape, array.dtype, array.sharding), []).append(array)
        spread = {key for key in alike if len(key[2].device_set) > 1}
        if spread:
            _drop_parts(alike, spread)
        if without:
            alike = {key: [array for array in arrays if id(array) not in without] for key, arrays in alike.items()}
        counted = ((key, self._group(key, arrays, kinds)) for key, arrays in alike.items() if arrays)
        return {key: group for key, group in counted if group.count}

    def _census(self, step: int, time_s: float, groups: dict[Any, _Group], largest: int = _LARGEST) -> ArrayCensus:
        here = [key for key, group in groups.items() if group.devices]
        by_bytes = sorted(here, key=lambda key: -groups[key].bytes)
        rest = sorted(by_bytes[largest:], key=lambda key: -groups[key].count)
        kept, left_out = by_bytes[:largest] + rest[:_NUMEROUS], rest[_NUMEROUS:]
        self._sites = {key: self._site(key, group) for key, group in groups.items()}
        self._grown = {key for key, group in groups.items() if group.count >= 2 * self._sites[key][0]}
        return ArrayCensus(
            step=step,
            time_s=time_s,
            groups=tuple(_record(key, groups[key], self._sites[key][1]) for key in kept),
            left_out_count=sum(groups[key].count for key in left_out),
            left_out_bytes=sum(groups[key].bytes for key in left_out),
        )

    def _site(self, key: Any, group: _Group) -> tuple[int, str]:
        """Where most of a group were made, as it was asked last."""
        return (group.count, group.sites.most_common(1)[0][0]) if group.sites else self._sites[key]

    def _group(self, key: Any, arrays: Sequence[jax.Array], kinds: dict[Device, str]) -> _Group:
        """Arrays that are alike, counted. A look holds the interpreter's lock, so of all but one as little is asked as can be."""
        sharding = key[2]
        held = [device for device in sharding.addressable_devices if device in kinds]
        group = _Group([device for device in held if sharding.memory_kind in (None, kinds[device])])
        asks = key not in self._sites or key in self._grown
        for array in arrays:
            if array.is_deleted():  # or donated since the list was made
                continue
            if asks and (group.count < _NEWEST or group.count % _EVERY == 0):
                group.sites[creation_site(array)] += 1
            group.count += 1
        group.bytes = group.count * _bytes_of_one(arrays) // len(sharding.device_set)
        return group


def _bytes_of_one(arrays: Sequence[jax.Array]) -> int:
    """Bytes on all devices of the first of some like arrays that is not deleted meanwhile."""
    for array in arrays:
        with contextlib.suppress(RuntimeError):
            return array.on_device_size_in_bytes()
    return 0


def _bytes(groups: Mapping[Any, _Group]) -> int:
    return sum(group.bytes for group in groups.values() if group.devices)


def _drop_parts(alike: dict[Any, list[jax.Array]], spread: Collection[Any]) -> None:
    """Leave out the arrays of one device that are parts of a spread one.

    Asking a sharded array for its shards (``addressable_shards``, ``np.asarray`` on jax 0.10) makes an array of each, which lives
    as long as the whole one, and is listed beside it. It is in the same memory and comes from the same call. Addresses
    would show it too, but not on this thread (the module's docstring has the reason).

    Args:
        alike: Live arrays by shape, dtype and sharding.
        spread: Those keys that are of several devices.
    """
    shapes = {key: (key[2].shard_shape(key[0]), key[1]) for key in spread}
    parts = set(shapes.values())
    suspects = [key for key in alike if key not in spread and key[:2] in parts]
    if not suspects:
        return
    wanted = {key[:2] for key in suspects}
    # Calls of one line are equal, so only the very same record counts; it is held here, so that no other takes its place.
    calls = [creation_call(array) for key in spread if shapes[key] in wanted for array in alike[key]]
    known = {id(call) for call in calls if call is not None}
    for key in suspects:
        alike[key] = [array for array in alike[key] if id(creation_call(array)) not in known]


class _Group:
    """Like arrays while they are counted; holds none of them."""

    __slots__ = ("bytes", "count", "devices", "sites")

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.count = self.bytes = 0
        self.sites: Counter[str] = Counter()


def _record(key: Any, group: _Group, site: str) -> ArrayGroup:
    shape, dtype, sharding = key
    spread = len(sharding.device_set)
    spec = str(getattr(sharding, "spec", type(sharding).__name__)).replace("PartitionSpec", "P").replace(",)", ")")
    return ArrayGroup(
        shape=tuple(shape),
        dtype=str(dtype),
        placement=spec if spread > 1 else "",
        devices=tuple(sorted(device_label(device) for device in group.devices)),
        spread=spread,
        replicated=spread > 1 and bool(sharding.is_fully_replicated),
        count=group.count,
        bytes=group.bytes,
        site=site,
    )


MOST_ARRAYS = 5000  # asking so many takes some 50 milliseconds of the training thread
_ADDRESSED = ("cpu", "gpu")


@final
class HeapProbe:
    """Maps what Python holds. It keeps no array alive and waits for none.

    Args:
        most_arrays: With more live arrays than these nothing is read.
    """

    def __init__(self, most_arrays: int = MOST_ARRAYS) -> None:
        self._most = most_arrays

    def read(self, step: int) -> Sequence[HeapMap | Unavailable]:
        """One map a device that has addresses; call it on the thread that dispatches the steps."""
        devices = jax.local_devices()
        addressed = [device for device in devices if device.platform in _ADDRESSED]
        found: list[HeapMap | Unavailable] = [
            Unavailable(figure="heap_map", device=device_label(device), reason=f"{device.platform} has no addresses")
            for device in devices
            if device.platform not in _ADDRESSED
        ]
        arrays = live_arrays() if addressed else []
        if len(arrays) > self._most:
            why = f"{len(arrays)} arrays are alive, and asking more than {self._most} would hold the training thread up"
            return [
                *found,
                *(Unavailable(figure="heap_map", device=device_label(each), reason=why) for each in addressed),
            ]
        parts: dict[Device, list[LiveBuffer]] = {device: [] for device in addressed}
        left_out: dict[Device, list[int]] = {device: [0, 0] for device in addressed}
        for array in arrays:
            _add_parts(array, parts, left_out)
        now = time.time()
        maps = [
            HeapMap(
                device=device_label(device),
                step=step,
                time_s=now,
                buffers=tuple(parts[device]),
                left_out_count=left_out[device][0],
                left_out_bytes=left_out[device][1],
            )
            for device in addressed
        ]
        return [*found, *maps]


def _add_parts(array: Any, parts: dict[Device, list[LiveBuffer]], left_out: dict[Device, list[int]]) -> None:
    """One array's parts on the devices, with their addresses if it is ready."""
    # A deleted array is never asked whether it is ready: jaxlib 0.10.2 crashes the process.
    if array.is_deleted():
        return
    devices = [device for device in array.sharding.addressable_devices if device in parts]
    if not devices or array.sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return
    size = array.on_device_size_in_bytes() // len(array.sharding.device_set)
    asked = parts_of(array) if size and array.is_ready() else ()
    for part in asked:
        # Parts can be handed on one by one, and one of them be donated.
        if part.is_deleted():
            continue
        (device,) = part.devices()
        label = _label(part.dtype, part.shape)
        parts[device].append(LiveBuffer(address=part.unsafe_buffer_pointer(), bytes=size, label=label))
    for device in devices if size and not asked else ():
        left_out[device][0] += 1
        left_out[device][1] += size


@functools.lru_cache(maxsize=4096)
def _label(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
