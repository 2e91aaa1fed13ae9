"""``jm.simulate_allocator``: a trace of allocations replayed under an allocator's settings.

Presets are read here, so that what is simulated is what ``jm.apply_environment`` would set. Starts no backend.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from jaxmem_callbacks.config.named import Name, load_named
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.readers.traces import read_trace
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import require, require_path, require_wholes
from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.presets import EnvironmentSettings, Preset
from jaxmem_callbacks.records.traces import DEFAULT_FRACTION, AllocatorSettings, Simulated, Simulation, Timeline, Trace
from jaxmem_callbacks.records.units import parse_bytes
from jaxmem_callbacks.simulator.cases import CASES
from jaxmem_callbacks.simulator.replay import replay

Defragment = Literal["never", "when_needed"]
# The ways that are compared, the least change to a run first: a preset's name or none, and changes to its environment.
_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("gpu_preallocate", {}),
    ("gpu_growth", {}),
    ("gpu_growth", {"fraction": 0.9}),
)
_DRIVERS = ("gpu_async", "gpu_platform_debug")
_MOVED = advise("memory.defragment")


def simulate_allocator(  # noqa: PLR0913 - a trace, an allocator, and options of the device
    trace: Trace | str | os.PathLike[str],
    settings: AllocatorSettings | EnvironmentSettings | Preset | Name,
    *,
    device_memory: int | str | None = None,
    outside: int | str = 0,
    defragment: Defragment = "never",
    defragment_steps: Sequence[int] = (),
) -> Timeline:
    """Replay a trace of allocations under an allocator: would the run have survived, and how did the memory look?

        timeline = jm.simulate_allocator("runs/a", "gpu_growth", device_memory="h100_sxm")
        timeline.survived, timeline.failure

    Args:
        trace: A trace, its file, a monitor's logdir with one, or the name of one that comes with the package:
            ``losses_in_a_list``, ``train_and_evaluate``, ``variable_lengths``.
        settings: A preset with an environment or its name, its ``EnvironmentSettings``, or all ``AllocatorSettings``.
        device_memory: Memory of the device: bytes, text such as ``"80GiB"``, or a GPU's name such as ``"h100_sxm"``. None takes
            the memory that the trace names.
        outside: What others hold of the device, likewise.
        defragment: ``when_needed`` moves all arrays together before what does not fit.
        defragment_steps: Steps after which they are moved in any case.

    Returns:
        The memory at each step's end, and the first request that could not be met, or None.

    Raises:
        SimulationError: a trace that cannot be read or contradicts itself; no device memory; an allocator that is not modelled.
        PresetError: a name that is no preset.
        TargetError: a device memory that is neither a size nor a GPU.
    """
    trace = trace_of(trace)
    require("simulate_allocator", "defragment_steps", defragment_steps, (list, tuple, range), "a list of whole numbers")
    require_wholes("simulate_allocator", "defragment_steps", defragment_steps)
    if not isinstance(settings, AllocatorSettings):
        settings = _settings_of(
            _environment_of(settings),
            device_bytes=device_bytes_of(device_memory, trace),
            outside_bytes=size_of(outside, "outside"),
            defragment=defragment,
            defragment_steps=tuple(defragment_steps),
        )
    return replay(trace, settings)


def simulate_ways(
    trace: Trace,
    device_bytes: int,
    *,
    outside_bytes: int = 0,
    partitioned: bool = True,
    defragment_steps: Sequence[int] = (),
) -> Simulation:
    """A trace under every way to take a GPU's memory that a preset has, with and without defragmentation.

    Args:
        trace: The trace.
        device_bytes: Memory of the device.
        outside_bytes: What others hold of it.
        partitioned: As jaxlib 0.11 and newer; False for older ones.
        defragment_steps: Steps after which arrays are moved together, as a way of its own for each pool; empty for none.
    """
    from jaxmem_callbacks.config.presets import load_preset

    asked: list[tuple[str, str, dict[str, Any]]] = [(preset, "", changes) for preset, changes in _WAYS]
    asked += [(preset, "when_needed", changes) for preset, changes in _WAYS]
    asked += [(preset, "steps", changes) for preset, changes in _WAYS if defragment_steps]
    asked += [(preset, "", {}) for preset in _DRIVERS]
    rows: list[Simulated] = []
    for preset, moving, changes in asked:
        loaded = load_preset(preset, environment=changes) if preset else Preset(name="")
        settings = _settings_of(
            loaded.environment,
            device_bytes=device_bytes,
            outside_bytes=outside_bytes,
            partitioned=partitioned,
            defragment="when_needed" if moving == "when_needed" else "never",
            defragment_steps=tuple(defragment_steps) if moving == "steps" else (),
        )
        name, line = _called(preset, changes, moving, defragment_steps)
        rows.append(
            Simulated(name=name, line=line, timeline=replay(trace, settings), modelled=settings.allocator != "bfc")
        )
    return Simulation(head=trace.head, device_bytes=device_bytes, rows=tuple(rows))


def trace_of(trace: Trace | str | os.PathLike[str]) -> Trace:
    """A trace from its file, its run or its name.

    Raises:
        SimulationError: nothing there, or no trace.
    """
    if isinstance(trace, Trace):
        return trace
    path = require_path("simulate_allocator", "trace", trace, "runs/a")
    if str(trace) in CASES and not path.exists():
        return CASES[str(trace)]()
    if not path.exists():
        msg = (
            f"{path} does not exist. Expected a trace's file, a monitor's logdir with one, or one that comes with the package: "
            f"{', '.join(CASES)}."
        )
        raise SimulationError(msg)
    return read_trace(path)


def device_bytes_of(device_memory: int | str | None, trace: Trace) -> int:
    """A device's memory from a size, a GPU's name, or the trace's own record.

    Raises:
        SimulationError: none of them has it.
        TargetError: a name that is no GPU's.
    """
    if device_memory is not None and (not isinstance(device_memory, str) or device_memory[:1].isdigit()):
        return size_of(device_memory, "device_memory")
    if device_memory is not None:
        known = resolve_target(device_memory, require_installed=False)
        if known.platform == "cuda" and known.memory_bytes:
            return known.memory_bytes
    elif trace.head.device_bytes:
        return trace.head.device_bytes
    given = (
        f"{device_memory!r} is no GPU"
        if device_memory
        else f"the trace {trace.head.name!r} does not say its device's memory"
    )
    msg = (
        f"Simulating an allocator needs a GPU's memory, and {given}. Say a size or a GPU: "
        f"{advise('option.typed', option='device-memory', value='80GiB')} or "
        f"{advise('option.typed', option='target', value='h100_sxm')}; in Python device_memory='80GiB'."
    )
    raise SimulationError(msg)


def size_of(size: int | str, name: str) -> int:
    """Bytes from an int or text with a unit.

    Args:
        size: An int, or text.
        name: What it is the size of.

    Raises:
        SimulationError: neither.
    """
    try:
        return parse_bytes(size, unit_needed=True)
    except ValueError as error:
        msg = f"{name}={size!r}: {error}"
        raise SimulationError(msg) from error


def _environment_of(settings: EnvironmentSettings | Preset | Name) -> EnvironmentSettings:
    settings = load_named(settings)
    if isinstance(settings, Preset):
        settings = settings.environment
    if isinstance(settings, EnvironmentSettings):
        return settings
    msg = (
        f"simulate_allocator got {type(settings).__name__} as settings. Expected a preset or its name, EnvironmentSettings or "
        "AllocatorSettings, such as 'gpu_growth'."
    )
    raise TypeError(msg)


def _settings_of(environment: EnvironmentSettings, **rest: Any) -> AllocatorSettings:
    """What an environment means for the allocator; what it leaves open is as JAX has it."""
    names: dict[str | None, Any] = {None: "bfc", "default": "bfc", "address": "platform"}
    name = names.get(environment.allocator, environment.allocator)
    if name == "vmm" or environment.platform == "tpu":
        given = "the allocator vmm" if name == "vmm" else "a TPU's allocator"
        msg = f"{given} is not modelled. Expected bfc, platform or cuda_async: the presets gpu_growth, gpu_async or the like."
        raise SimulationError(msg)
    return AllocatorSettings(
        allocator=name,
        preallocate=environment.preallocate is not False,
        fraction=DEFAULT_FRACTION if environment.fraction is None else environment.fraction,
        **rest,
    )


def _called(preset: str, changes: dict[str, Any], moving: str, steps: Sequence[int]) -> tuple[str, str]:
    """A way's name in tables, and the lines that bring it about."""
    name = preset or "JAX's default"
    shares = [f"fraction {value:g}" for value in changes.values()]
    added = f", environment={changes!r}" if changes else ""
    named = advise("preset.load", names=f"{preset!r}{added}") if added else repr(preset)
    line = advise("environment.apply", preset=named)
    lines = [f"{line}  # above the first use of JAX"] if preset else []
    if moving:
        when = "when needed" if moving == "when_needed" else f"after step {', '.join(map(str, steps))}"
        shares.append(f"defragmented {when}")
        lines.append(f"{_MOVED}  # {'before what does not fit' if moving == 'when_needed' else when}")
    return ", ".join([name, *shares]), "\n".join(lines)
