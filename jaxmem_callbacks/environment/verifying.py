"""A preset's settings and the devices after the start enter; what the runtime's own figures say of each setting leaves.

By the shape of ``Device.memory_stats()``: BFC reports its pool, cudaMallocAsync statistics without one, and the pass-through
allocators nothing. The pool is taken at the first allocation, so that it is 0 before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxmem_callbacks.environment.variables import DEFAULT_FRACTION
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import Check, DeviceFacts, Finding, Platform, Surroundings
from jaxmem_callbacks.records.presets import EnvironmentSettings
from jaxmem_callbacks.records.units import format_bytes

_ASKED = advise("command.typed", typed="doctor --start")

_SHAPES = {
    "default": "pool",
    "bfc": "pool",
    "cuda_async": "statistics without a pool",
    "platform": "nothing",
    "address": "nothing",
    "vmm": "nothing",
}
_TOLERANCE = 0.05  # the table of device memory is the maker's; drivers keep a little of it


def verify(settings: EnvironmentSettings, devices: Sequence[DeviceFacts], seen: Surroundings) -> tuple[Check, ...]:
    """What held of the settings.

    Args:
        settings: What was wanted.
        devices: This process's devices.
        seen: The process and its machine, for a start that fell back to the CPU.
    """
    gpus = [device for device in devices if device.platform in ("cuda", "rocm")]
    return (
        *(_of_platform(settings, device, seen) for device in devices[:1]),
        *(check for device in gpus for check in _of_gpu(settings, device)),
    )


def start_findings(devices: Sequence[DeviceFacts], seen: Surroundings) -> tuple[Finding, ...]:
    """What went wrong with a start that succeeded: a CPU where this machine has an accelerator, and nobody said otherwise."""
    lost = _given_up(devices[0], ("cuda", "rocm", "tpu"), seen)
    if lost is None:
        return ()
    line = f"{advise('environment.set', name='TF_CPP_MIN_LOG_LEVEL', value='0')}; {_ASKED}   # and read what JAX logs"
    return (Finding(kind="on the CPU", given="JAX fell back to the CPU.", why=f"{lost}.", type_next=line),)


def _given_up(device: DeviceFacts, wanted: Sequence[Platform], seen: Surroundings) -> str | None:
    here = [platform for platform in seen.hardware if platform in wanted]
    if device.platform != "cpu" or not here or not _is_allowed(here[0], seen.platforms):
        return None
    return (
        f"It runs on {device.label} although this machine shows {here[0]} hardware; its own log lines say why that was given up. "
        f"{advise('environment.set', name='JAX_PLATFORMS', value=here[0])} makes that an error"
    )


def _of_platform(settings: EnvironmentSettings, device: DeviceFacts, seen: Surroundings) -> Check:
    wanted: tuple[Platform, ...] = (settings.platform,) if settings.platform else ("cuda", "rocm")
    if device.platform in wanted:
        return Check(setting="platform", outcome="held", told=f"JAX runs on {device.label}, {device.kind}")
    if lost := _given_up(device, wanted, seen):
        return Check(setting="platform", outcome="broken", told=f"JAX fell back to the CPU. {lost}")
    if settings.platform:
        told = f"JAX runs on {device.label}, and the preset is for {settings.platform}"
        return Check(setting="platform", outcome="broken", told=told)
    if device.platform == "cpu":
        told = "JAX runs on the CPU here, whose client has none of these settings: nothing to verify"
        return Check(setting="environment", outcome="unknown", told=told)
    told = f"JAX runs on {device.label}, which reads none of these settings"
    return Check(setting="platform", outcome="broken", told=told)


def _is_allowed(platform: str, platforms: Sequence[str]) -> bool:
    return not platforms or platform in platforms or (platform != "tpu" and "gpu" in platforms)


def _of_gpu(settings: EnvironmentSettings, device: DeviceFacts) -> Iterator[Check]:
    yield from _allocator(settings, device)
    if settings.fraction is not None:
        yield _fraction(settings, device)
    if settings.preallocate is not None:
        yield _preallocate(settings.preallocate, device)
    if settings.collective_pool_bytes is not None:
        told = f"{device.label}: the runtime reports no statistics of the pool for collectives"
        yield Check(setting="collective_pool", outcome="unknown", told=told)


def _allocator(settings: EnvironmentSettings, device: DeviceFacts) -> Iterator[Check]:
    if settings.allocator is None:
        return
    shape = _shape(device.statistics)
    wanted = _SHAPES[settings.allocator]
    told = f"{device.label}: its statistics have the shape {shape!r}, and {settings.allocator} gives {wanted!r}"
    yield Check(setting="allocator", outcome="held" if shape == wanted else "broken", told=told)


def _shape(statistics: Mapping[str, int] | None) -> str:
    if statistics is None:
        return "nothing"
    return "pool" if "pool_bytes" in statistics else "statistics without a pool"


def _fraction(settings: EnvironmentSettings, device: DeviceFacts) -> Check:
    limit = (device.statistics or {}).get("bytes_limit", 0)
    if limit <= 0:
        told = f"{device.label}: this allocator reports no limit"
    elif device.total_bytes is None:
        told = (
            f"{device.label}: its limit is {format_bytes(limit)}, and the memory of a {device.kind} is in no table here"
        )
    else:
        wanted = DEFAULT_FRACTION if settings.fraction is None else settings.fraction
        share = limit / device.total_bytes
        outcome = "held" if abs(share - wanted) <= _TOLERANCE else "broken"
        whole = f"{format_bytes(limit)} of {format_bytes(device.total_bytes)}"
        return Check(setting="fraction", outcome=outcome, told=f"{device.label}: its limit is {whole}, {share:.0%}")
    return Check(setting="fraction", outcome="unknown", told=told)


def _preallocate(wanted: bool, device: DeviceFacts) -> Check:  # noqa: FBT001 - the setting itself
    statistics = device.statistics or {}
    pool, limit = statistics.get("pool_bytes", 0), statistics.get("bytes_limit", 0)
    peak = statistics.get("peak_bytes_in_use", 0)
    told = f"{device.label}: its pool is {format_bytes(pool)} of a limit of {format_bytes(limit)}"
    if pool <= 0 or limit <= 0:
        why = "this allocator reports no pool" if "pool_bytes" not in statistics else "nothing was allocated yet"
        return Check(setting="preallocate", outcome="unknown", told=f"{device.label}: {why}")
    if pool < limit:
        return Check(setting="preallocate", outcome="broken" if wanted else "held", told=told)
    if not wanted and 2 * peak >= limit:  # a pool that grows doubles, and can have come to its limit
        return Check(setting="preallocate", outcome="unknown", told=f"{told}, which a growing pool can have reached")
    return Check(setting="preallocate", outcome="held" if wanted else "broken", told=told)
