"""Device memory as allocators and NVIDIA's driver count it.

Allocator: `Device.memory_stats()` of the local devices, and what these devices are; microseconds a device.

Driver: bytes in use of a whole NVIDIA GPU, by this process and all others, through NVML. Beside JAX's pool it holds the CUDA
context, NCCL, cuDNN and other processes. Needs the package nvidia-ml-py; tens of microseconds a device, on the monitor's thread.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from jaxmem_callbacks.probes.protocol import Device, device_label
from jaxmem_callbacks.programs.targets.target import memory_of_kind
from jaxmem_callbacks.records.environment import DeviceFacts, Platform
from jaxmem_callbacks.records.runs import Reading, Unavailable

Stats = Mapping[str, int]
Snapshot = tuple[Stats | None, ...]

_NO_STATISTICS = {
    "cpu": "JAX's CPU client keeps no allocator statistics",
    "gpu": "this allocator reports no statistics; the default one (BFC) does",
}


@final
class AllocatorProbe:
    """Statistics of the allocators of this process's devices.

    Args:
        devices: The devices to read; by default ``jax.local_devices()``, asked at the first read, so that making a probe
            starts no backend.
    """

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        self._devices = None if devices is None else tuple(devices)
        self.reports = True  # until the first look shows otherwise

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that are read."""
        if self._devices is None:
            self._devices = tuple(jax.local_devices())
        return self._devices

    def snapshot(self) -> Snapshot:
        """The raw statistics, one entry a device; empty once it is known that no device here reports any."""
        if not self.reports:
            return ()
        taken = tuple(statistics_of(device) for device in self.devices)
        # An allocator that reports nothing at first never does; not asking again saves the hook those microseconds.
        self.reports = any(stats is not None for stats in taken)
        return taken if self.reports else ()

    def readings(self, step: int, time_s: float, snapshot: Snapshot) -> list[Reading | Unavailable]:
        """Turn a snapshot into readings; off the training thread, because building records costs more than reading."""
        if not snapshot:
            return [_unavailable(device) for device in self.devices]
        return [
            _unavailable(device) if stats is None else reading_of(device, stats, step, time_s)
            for device, stats in zip(self.devices, snapshot, strict=True)
        ]

    def read(self, step: int) -> Sequence[Reading | Unavailable]:
        """One reading a device, now."""
        return self.readings(step, time.time(), self.snapshot())


def reading_of(device: Device, stats: Stats, step: int, time_s: float) -> Reading:
    """One device's statistics as a Reading.

    The runtime writes -1, and for some keys 0, where it knows nothing: BFC never fills ``bytes_reserved``, cuda_async leaves
    ``bytes_limit`` 0 without preallocation, and jaxlib before 0.11 leaves ``largest_free_block_bytes`` 0 on GPU.
    """
    in_use = _at_least(stats, "bytes_in_use", 0)
    reserved = _at_least(stats, "bytes_reserved", 1 if device.platform == "gpu" else 0)
    limit = _at_least(stats, "bytes_limit", 1)
    pool = _at_least(stats, "pool_bytes", in_use or 0)
    return Reading(
        source="allocator",
        device=device_label(device),
        step=step,
        time_s=time_s,
        in_use_bytes=in_use,
        reserved_bytes=reserved,
        peak_bytes_since_start=_at_least(stats, "peak_bytes_in_use", in_use or 0),
        limit_bytes=limit,
        pool_bytes=pool,
        largest_free_bytes=_largest_free(stats, pool if pool is not None else limit, in_use, reserved),
    )


def _largest_free(stats: Stats, whole: int | None, in_use: int | None, reserved: int | None) -> int | None:
    """The largest free block; a 0 beside free memory is "not reported", never "100 % fragmented"."""
    block = _at_least(stats, "largest_free_block_bytes", 0)
    if block == 0 and (whole is None or in_use is None or whole - in_use - (reserved or 0) > 0):
        return None
    return block


def _at_least(stats: Stats, key: str, least: int) -> int | None:
    value = stats.get(key)
    return None if value is None or value < least else int(value)


def statistics_of(device: Device) -> Stats | None:
    """The runtime's statistics of a device's allocator, as they come; None where there are none."""
    try:
        return device.memory_stats()
    except jax.errors.JaxRuntimeError:  # an allocator that refuses to answer is one that reports nothing
        return None


def _unavailable(device: Device) -> Unavailable:
    reason = _NO_STATISTICS.get(device.platform, "Device.memory_stats() returns None on this platform")
    return Unavailable(figure="allocator", device=device_label(device), reason=reason)


def devices_here() -> tuple[DeviceFacts, ...]:
    """This process's devices. Starts the backend where nothing has yet."""
    return tuple(
        DeviceFacts(
            label=device_label(device),
            platform=_platform_of(device),
            kind=device.device_kind,
            statistics=statistics_of(device),
            total_bytes=memory_of_kind(device.device_kind),
        )
        for device in jax.local_devices()
    )


def _platform_of(device: Any) -> Platform:
    """What a device is; JAX calls the GPUs of both makers ``gpu``."""
    if device.platform == "gpu":
        return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
    return "tpu" if device.platform == "tpu" else "cpu"


_NO_LIBRARY = "the driver is asked through nvidia-ml-py, which is not installed"
_NOT_NVIDIA = {
    "cpu": "no driver counts the memory of JAX's CPU devices; the host's figure has the process's own",
    "tpu": "a TPU's driver reports no figures to processes",
    "rocm": "only NVIDIA's driver is asked (NVML)",
}


@final
class DriverProbe:
    """Reads NVML.

    Args:
        devices: By default ``jax.local_devices()``, asked at the first read.
        library: NVML's Python interface; by default ``pynvml``, loaded at the first read of a GPU.
        variables: Where ``CUDA_VISIBLE_DEVICES`` is looked up, by default the process's environment.
    """

    def __init__(
        self, devices: Sequence[Device] | None = None, *, library: Any = None, variables: Mapping[str, str] = os.environ
    ) -> None:
        self._devices = devices
        self._library = library
        self._variables = variables
        self._handles: dict[str, Any] | None = None
        self._why = ""

    def read(self, step: int) -> Sequence[Reading | Unavailable]:
        """One reading a GPU, or why there is none."""
        if self._devices is None:
            self._devices = jax.local_devices()
        if self._handles is None:
            self._handles = self._opened(self._devices)
        return [self._read_one(device, step) for device in self._devices]

    def processes(self) -> dict[str, tuple[tuple[int, int | None], ...]]:
        """Label -> processes with memory of the GPU: number and bytes, None where the driver hides them. Asked after `read`."""
        return {label: self._processes_of(handle) for label, handle in (self._handles or {}).items()}

    def _processes_of(self, handle: Any) -> tuple[tuple[int, int | None], ...]:
        try:
            listed = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
            return tuple((int(each.pid), each.usedGpuMemory and int(each.usedGpuMemory)) for each in listed)
        except Exception:  # noqa: BLE001 - NVML's own error types are known only with its library
            return ()

    def _read_one(self, device: Device, step: int) -> Reading | Unavailable:
        label = device_label(device)
        handle = (self._handles or {}).get(label)
        if handle is None:
            return Unavailable(
                figure="driver", device=label, reason=_NOT_NVIDIA.get(_driver_platform(device), self._why)
            )
        try:
            used = int(self._library.nvmlDeviceGetMemoryInfo(handle).used)
        except Exception as error:  # noqa: BLE001 - NVML's own error types are known only with its library
            return Unavailable(figure="driver", device=label, reason=f"NVML refuses: {error}")
        return Reading(source="driver", device=label, step=step, time_s=time.time(), device_used_bytes=used)

    def _opened(self, devices: Sequence[Device]) -> dict[str, Any]:
        """Label -> NVML's handle; nothing, with the reason kept, where NVML or the way to a device is not known."""
        gpus = [device for device in devices if _driver_platform(device) == "gpu"]
        if not gpus:
            return {}
        try:
            self._library = self._library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            return {device_label(gpu): self._handle(getattr(gpu, "local_hardware_id", None)) for gpu in gpus}
        except ModuleNotFoundError:
            self._why = _NO_LIBRARY
        except Exception as error:  # noqa: BLE001 - likewise: no driver, no permission, a device that is hidden
            self._why = f"NVML refuses: {error}"
        return {}

    def _handle(self, ordinal: int | None) -> Any:
        """NVML's handle of a CUDA device.

        Raises:
            LookupError: NVML counts the devices in another order than CUDA, and which is which is unknown.
        """
        visible = [part.strip() for part in self._variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        count = self._library.nvmlDeviceGetCount()
        if ordinal is None or (visible and ordinal >= len(visible)) or (not visible and ordinal >= count):
            msg = f"the device has the CUDA number {ordinal}, of {len(visible) or count}"
            raise LookupError(msg)
        if visible and not visible[ordinal].isdecimal():
            by_mark = self._library.nvmlDeviceGetHandleByUUID
            return by_mark(visible[ordinal])
        handles = [self._library.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        kinds = {str(self._library.nvmlDeviceGetName(handle)) for handle in handles}
        if len(kinds) > 1 and self._variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            msg = "several kinds of GPU, which CUDA and NVML number differently unless CUDA_DEVICE_ORDER is PCI_BUS_ID"
            raise LookupError(msg)
        return handles[int(visible[ordinal]) if visible else ordinal]


def _driver_platform(device: Device) -> str:
    version = str(getattr(getattr(device, "client", None), "platform_version", ""))
    return "rocm" if device.platform == "gpu" and "rocm" in version.lower() else device.platform
