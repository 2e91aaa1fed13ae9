"""Which figures of memory exist in this process, with "unknown, because ..." for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxmem_callbacks.environment.findings import effective
from jaxmem_callbacks.environment.process import (
    ALLOCATOR,
    DEFAULT_FRACTION,
    OPTIONS,
    as_preallocate,
    fraction_given,
    version_numbers,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import DeviceFacts, Figure, Platform, ProcessFacts
from jaxmem_callbacks.records.units import format_bytes

_HAS_LARGEST = (0, 11, 0)  # before, BFC's largest_free_block_bytes is always 0
_SILENT = ("platform", "address", "vmm")
_UNDECIDED = f"JAX was not started; {advise('command.typed', typed='doctor --start')} asks it"


def platform_to_come(seen: ProcessFacts) -> Platform | None:
    """What JAX will run on, where the settings and the installed plugins decide it without a start; else None."""
    wanted = [platform for platform in seen.platforms if platform != "cpu"]
    return None if wanted or (seen.plugins and not seen.platforms) else "cpu"


def in_effect(seen: ProcessFacts) -> tuple[tuple[str, str, str], ...]:
    """The settings that a GPU's client gets: name, value, source. A text that JAX cannot read stands as it is."""
    defaults = {"allocator": "default (BFC)", "memory_fraction": f"{DEFAULT_FRACTION:.0%} of the GPU"}
    defaults |= {"preallocate": "yes, at the first allocation", "collective_memory_size": "none of its own"}
    words = {"memory_fraction": "fraction", "collective_memory_size": "pool for collectives"}
    rows: list[tuple[str, str, str]] = []
    for key, variable in OPTIONS.items():
        name, text = (fraction_given(seen.variables) if key == "memory_fraction" else None) or (
            variable,
            seen.variables.get(variable, ""),
        )
        if key in seen.options:
            value, source = str(seen.options[key]), f"jax_pjrt_client_create_options[{key!r}]"
        elif text:
            value, source = _meaning(key, text), f"{name}={text}"
        else:
            value, source = defaults[key], "JAX's default"
        if key != "allocator" and effective(seen).allocator == "platform":
            value = "none: the platform allocator has no pool"
        rows.append((words.get(key, key), value, source))
    return tuple(rows)


def _meaning(key: str, text: str) -> str:
    if key == "preallocate":
        return "yes, at the first allocation" if as_preallocate(text) else "no, grows with need"
    return f"{text} MiB" if key == "collective_memory_size" else text


def figures_here(
    seen: ProcessFacts,
    devices: Sequence[DeviceFacts] | None,
    *,
    compilers: Mapping[str, Mapping[str, str]],
    resident_bytes: int | None,
    has_driver: bool,
) -> tuple[Figure, ...]:
    """Each figure that the library can show, and whether it exists here.

    Args:
        seen: The process and the machine.
        devices: The local devices, or None before the start.
        compilers: Platform -> package -> version, of the compilers of absent hardware.
        resident_bytes: What this process takes of the host's memory, or None where the system refuses.
        has_driver: Whether NVIDIA's management library (NVML) is installed.
    """
    platform = devices[0].platform if devices else platform_to_come(seen)
    absent = [
        f"{name} ({', '.join(f'{p} {v}' for p, v in found.items())})" for name, found in compilers.items() if found
    ]
    lacking = [name for name, found in compilers.items() if not found]
    compiled = f"of the attached device, and of absent ones: {', '.join(absent) or 'none'}" + (
        f"; no compiler for absent {' or '.join(lacking)} (jaxmem targets)" if lacking else ""
    )
    host = f"resident {format_bytes(resident_bytes)}" if resident_bytes is not None else "the operating system refuses"
    return (
        _statistics(seen, devices, platform),
        _largest_block(seen, devices, platform),
        Figure(name="live arrays", exists=True, text="jax.live_arrays(), on every platform"),
        _addresses(platform),
        Figure(name="compile-time analysis", exists=True, text=compiled),
        _driver(platform, has_driver=has_driver),
        Figure(name="host memory", exists=resident_bytes is not None, text=host),
    )


def _statistics(seen: ProcessFacts, devices: Sequence[DeviceFacts] | None, platform: Platform | None) -> Figure:
    name = "allocator statistics"
    if platform == "cpu":
        return Figure(name=name, exists=False, text="JAX's CPU client keeps none")
    if not devices:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    silent = [device.label for device in devices if device.statistics is None]
    if silent:
        allocator = seen.variables.get(ALLOCATOR, "").lower()
        why = f"the allocator {allocator} reports none" if allocator in _SILENT else "the runtime reports none"
        return Figure(name=name, exists=False, text=f"{', '.join(silent)}: {why}; {ALLOCATOR}=default (BFC) does")
    keys = sorted({key for device in devices for key in device.statistics or ()})
    return Figure(name=name, exists=True, text=f"of {len(devices)} local: {', '.join(keys)}")


def _largest_block(seen: ProcessFacts, devices: Sequence[DeviceFacts] | None, platform: Platform | None) -> Figure:
    name = "largest free block"
    if platform == "cpu":
        return Figure(name=name, exists=False, text="no allocator statistics, so no fragmentation either")
    if platform != "tpu" and seen.jaxlib is not None and version_numbers(seen.jaxlib) < _HAS_LARGEST:
        text = "jaxlib before 0.11 reports 0 on GPUs, which means unknown; fragmentation is unknown too"
        return Figure(name=name, exists=False, text=text)
    if not devices:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    reported = [device.statistics for device in devices if device.statistics is not None]
    if any(each.get("largest_free_block_bytes", 0) > 0 for each in reported):
        return Figure(name=name, exists=True, text="largest_free_block_bytes, and fragmentation of the pool by it")
    if reported and all(each.get("pool_bytes") == 0 for each in reported):
        return Figure(name=name, exists=None, text="nothing was allocated yet, so the pool is empty")
    return Figure(name=name, exists=False, text="this allocator reports none: BFC and TPUs do")


def _addresses(platform: Platform | None) -> Figure:
    name = "array addresses"
    if platform == "tpu":
        return Figure(name=name, exists=False, text="a TPU's runtime reports none, so there is no heap map")
    if platform is None:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    return Figure(name=name, exists=True, text="of arrays that are ready: the monitor's heap map")


def _driver(platform: Platform | None, *, has_driver: bool) -> Figure:
    name = "memory by the driver"
    if has_driver:
        text = (
            "NVIDIA's management library is installed: it counts what CUDA, NCCL and other processes took; the monitor asks "
            "it through the package nvidia-ml-py"
        )
        return Figure(name=name, exists=True, text=text)
    if platform == "cpu":
        return Figure(name=name, exists=False, text="JAX runs on the CPU, where host memory is all")
    return Figure(name=name, exists=False, text="NVIDIA's management library (libnvidia-ml) is not installed")
