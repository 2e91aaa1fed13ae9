"""Device memory as the driver counts it: what is taken on a whole NVIDIA GPU, by this process and all others.

Measured: bytes in use of the device, through NVML; beside JAX's pool it holds the CUDA context, NCCL, cuDNN and other processes.
Backends: NVIDIA GPUs, with the package nvidia-ml-py. Cost: tens of microseconds a device, on the monitor's own thread.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from jaxmem_callbacks.probes.protocol import Device, device_label
from jaxmem_callbacks.records.readings import Reading, Unavailable

_NO_LIBRARY = "the driver is asked through nvidia-ml-py, which is not installed"
_NOT_NVIDIA = {
    "cpu": "no driver counts the memory of JAX's CPU devices; memory/host_gib has the process's",
    "tpu": "a TPU's driver tells no figures to processes",
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
            return Unavailable(figure="driver", device=label, reason=_NOT_NVIDIA.get(_platform(device), self._why))
        try:
            used = int(self._library.nvmlDeviceGetMemoryInfo(handle).used)
        except Exception as error:  # noqa: BLE001 - NVML's own error types are known only with its library
            return Unavailable(figure="driver", device=label, reason=f"NVML refuses: {error}")
        return Reading(source="driver", device=label, step=step, time_s=time.time(), device_used_bytes=used)

    def _opened(self, devices: Sequence[Device]) -> dict[str, Any]:
        """Label -> NVML's handle; nothing, with the reason kept, where NVML or the way to a device is not known."""
        gpus = [device for device in devices if _platform(device) == "gpu"]
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
            LookupError: NVML counts the devices in another order than CUDA, and nothing says which is which.
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


def _platform(device: Device) -> str:
    version = str(getattr(getattr(device, "client", None), "platform_version", ""))
    return "rocm" if device.platform == "gpu" and "rocm" in version.lower() else device.platform
