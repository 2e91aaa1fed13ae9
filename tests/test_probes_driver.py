"""The driver probe, with NVML as nvidia-ml-py has it."""

from __future__ import annotations

from types import SimpleNamespace

from jaxmem_callbacks.probes.device_memory import DriverProbe
from jaxmem_callbacks.records.runs import Reading, Unavailable
from tests.sample_devices import GPU, Card


class Nvml:
    """NVML as nvidia-ml-py has it, of a machine with these GPUs."""

    def __init__(self, used: dict[str, int], names: list[str] | None = None) -> None:
        self.used, self.names = used, names or ["NVIDIA H100"] * len(used)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return list(self.used)[index]

    def nvmlDeviceGetHandleByUUID(self, mark: str) -> str:  # noqa: N802
        return mark

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return self.names[list(self.used).index(handle)]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used[handle], free=0, total=0)


class Gpu(Card):
    """A GPU with its CUDA number; its label is that of its global id."""

    @property
    def local_hardware_id(self) -> int:
        return self.id


GPUS = [Gpu("gpu", GPU, id=0), Gpu("gpu", GPU, id=1)]


def driver_says(library: Nvml | None, **variables: str) -> list[int | str]:
    found = DriverProbe(GPUS, library=library, variables=variables).read(4)
    return [each.device_used_bytes if isinstance(each, Reading) else each.reason for each in found]


def test_the_driver_is_asked_for_the_devices_that_cuda_shows():
    library = Nvml({"GPU-a": 10, "GPU-b": 20, "GPU-c": 30})
    assert driver_says(library) == [10, 20]
    assert driver_says(library, CUDA_VISIBLE_DEVICES="2,0") == [30, 10]
    assert driver_says(library, CUDA_VISIBLE_DEVICES="GPU-b, GPU-a") == [20, 10]
    (why, again) = driver_says(library, CUDA_VISIBLE_DEVICES="1")
    assert why == again == "NVML refuses: the device has the CUDA number 1, of 1"


def test_the_driver_of_several_kinds_is_asked_only_where_the_order_is_known():
    mixed = Nvml({"GPU-a": 10, "GPU-b": 20}, ["H100", "A100"])
    assert "CUDA_DEVICE_ORDER is PCI_BUS_ID" in str(driver_says(mixed)[0])
    assert driver_says(mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [10, 20]


def test_without_nvml_or_a_gpu_the_driver_tells_why():
    try:
        import pynvml  # noqa: F401  # pyright: ignore[reportMissingImports]

        expected = "NVML refuses"  # the package is there and the driver is not
    except ModuleNotFoundError:
        expected = "nvidia-ml-py, which is not installed"
    assert expected in str(driver_says(None)[0])
    entries = DriverProbe().read(0)
    assert {type(each) for each in entries} == {Unavailable}
    assert entries[0].reason.startswith("no driver counts the memory of JAX's CPU devices")


def test_a_device_that_the_driver_refuses_hides_no_other():
    library = Nvml({"GPU-a": 10, "GPU-b": 20})
    probe = DriverProbe(GPUS, library=library, variables={})
    probe.read(0)
    del library.used["GPU-a"]
    first, second = probe.read(1)
    assert first.reason == "NVML refuses: 'GPU-a'"
    assert (second.device_used_bytes, second.step, second.device) == (20, 1, "gpu:1")
