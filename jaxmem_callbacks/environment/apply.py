"""The variables that a preset sets, and the check that the runtime obeyed them."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem_callbacks.environment.findings import same, settings_findings
from jaxmem_callbacks.environment.process import (
    ALLOCATOR,
    COLLECTIVE_POOL,
    DEFAULT_FRACTION,
    FRACTION,
    OPTIONS,
    PREALLOCATE,
    fraction_given,
    process_facts,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import AppliedEnvironment, Check, DeviceFacts, Finding, Platform, ProcessFacts
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.presets import EnvironmentSettings, Preset
from jaxmem_callbacks.records.units import MIB, format_bytes

_OPTION = "jax_pjrt_client_create_options"


def choose(preset: Preset, seen: ProcessFacts) -> AppliedEnvironment:
    """What is to be set for a preset, and what is so already. Sets nothing itself.

    Args:
        preset: Whose ``environment`` is wanted.
        seen: The process as it is.

    Raises:
        EnvironmentSettingError: the preset sets nothing of the environment; something is wrong with what is set already, or would
            be afterwards; the user has set another value; or the backend has started and something is still to be set.
    """
    require_environment(preset)
    wanted = wanted_variables(preset.environment)
    already, different = _compared(wanted, seen)
    missing = {name: text for name, text in wanted.items() if name not in already and name not in different}
    after = dataclasses.replace(seen, variables={**missing, **seen.variables})
    found = settings_findings(after)
    if found:
        msg = f"{preset.name}: nothing was set.\n" + "\n".join(map(str, found))
        raise EnvironmentSettingError(msg)
    if different:
        raise EnvironmentSettingError(_conflicts(preset, wanted, different))
    if missing and seen.started:
        raise EnvironmentSettingError(_too_late(preset, missing))
    return AppliedEnvironment(preset=preset.name, set=missing, already=dict(already.values()))


def require_applied(preset: Any) -> None:
    """Refuse a preset whose environment was never applied: handed to a step or a monitor, it would silently do nothing.

    Args:
        preset: A ``Preset``; anything else is let through.

    Raises:
        EnvironmentSettingError: variables that the preset wants are not set so.
    """
    wanted = wanted_variables(preset.environment) if isinstance(preset, Preset) else {}
    if not wanted:
        return
    already, _ = _compared(wanted, process_facts(started=True))
    missing = [f"{name}={text}" for name, text in wanted.items() if name not in already]
    if missing:
        msg = (
            f"The preset {preset.name} has an environment that this process does not have: {', '.join(missing)}.\n"
            f"    Type above the first use of JAX: {advise('environment.apply', preset=_call(preset))}\n"
            f"    To do without it: {_call(preset)}.policy for a step, .monitor for a monitor"
        )
        raise EnvironmentSettingError(msg)


def require_environment(preset: Preset) -> None:
    """Refuse a preset that would silently do nothing.

    Raises:
        EnvironmentSettingError: it sets nothing of the environment.
    """
    if preset.environment == EnvironmentSettings():
        msg = (
            f"The preset {preset.name or 'given'} sets nothing of the environment, so there is nothing to apply. Add a part that "
            f"does: {advise('environment.apply', preset=_loaded([*_parts(preset), repr('gpu_growth')]))}. "
            f"`{advise('command.typed', typed='presets')}` lists them: gpu_..., tpu_default."
        )
        raise EnvironmentSettingError(msg)


def wanted_variables(settings: EnvironmentSettings) -> dict[str, str]:
    """The variables, with their texts, that express the settings."""
    pool = settings.collective_pool_bytes
    texts = {
        ALLOCATOR: settings.allocator,
        PREALLOCATE: None if settings.preallocate is None else str(settings.preallocate).lower(),
        FRACTION: None if settings.fraction is None else repr(settings.fraction),
        COLLECTIVE_POOL: None if pool is None else str(pool // MIB),
    }
    return {name: text for name, text in texts.items() if text is not None}


def _compared(
    wanted: Mapping[str, str], seen: ProcessFacts
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Of the variables needed, those that are set so already and those that differ: name -> what sets it, and its value."""
    already: dict[str, tuple[str, str]] = {}
    different: dict[str, tuple[str, str]] = {}
    keys = {variable: key for key, variable in OPTIONS.items()}
    for name, text in wanted.items():
        source, value = _source_of(name, keys[name], seen)
        if value is None:
            continue
        is_same = same(name, text, value) if source.startswith(_OPTION) else _mean_the_same(name, text, str(value))
        (already if is_same else different)[name] = (source, str(value))
    return already, different


def _source_of(name: str, key: str, seen: ProcessFacts) -> tuple[str, Any]:
    """What has the last word on a setting here, and its value; None where nothing has."""
    if key in seen.options:
        return f"{_OPTION}[{key!r}]", seen.options[key]
    if name == FRACTION:
        return fraction_given(seen.variables) or (name, None)
    return name, seen.variables.get(name) or None


def _mean_the_same(name: str, wanted: str, text: str) -> bool:
    """Whether JAX makes the same of two texts."""
    if name == ALLOCATOR:
        return wanted == text.lower()
    if name == PREALLOCATE:
        return same(name, text, wanted == "true")
    return same(name, text, float(wanted) if name == FRACTION else int(wanted) * MIB)


def _conflicts(preset: Preset, wanted: Mapping[str, str], different: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"{preset.name}: nothing was set, because this process is set otherwise already."]
    for name, (source, value) in different.items():
        lines.append(f"  {source} is {value}, and the preset has {wanted[name]}.")
    clearing = "; ".join(
        f"leave {source} out" if source.startswith(_OPTION) else advise("environment.unset", name=source)
        for source, _ in different.values()
    )
    lines.append(f"    To take the preset's: {clearing}   # in the shell")
    if not any(source.startswith(_OPTION) for source, _ in different.values()):
        popped = "; ".join(advise("environment.pop", name=repr(source)) for source, _ in different.values())
        lines.append(f"    {popped}   # or so, above this call")
    fields = {
        ALLOCATOR: "allocator",
        PREALLOCATE: "preallocate",
        FRACTION: "fraction",
        COLLECTIVE_POOL: "collective_pool",
    }
    kept = ", ".join(f"{fields[name]!r}: {_typed(name, value)}" for name, (_, value) in different.items())
    loaded = _loaded([*(_parts(preset) or ["..."]), f"environment={{{kept}}}"])
    lines.append(f"    To keep yours: {advise('environment.apply', preset=loaded)}")
    return "\n".join(lines)


def _typed(name: str, value: str) -> str:
    """A value as one types it for the preset's key."""
    if name == PREALLOCATE:
        return str(same(name, value, value=True))
    if name == COLLECTIVE_POOL:
        return repr(f"{value}MiB")
    return repr(value) if name == ALLOCATOR else value


def _too_late(preset: Preset, missing: Mapping[str, str]) -> str:
    variables = " ".join(f"{name}={shlex.quote(text)}" for name, text in missing.items())
    script = shlex.quote(sys.argv[0]) if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    call = advise("environment.apply", preset=_call(preset))
    return (
        f"{preset.name}: too late for {', '.join(missing)}. JAX has read its settings in this process and reads them once; what "
        "started it is unknown: the first call of jax.devices, an array made at import, a random key, or the like. Nothing was "
        f"set.\n    Type this before everything else of JAX, and before importing what uses it: {call}\n"
        f"    or set it from the shell: {variables} python {script}"
    )


def _call(preset: Preset) -> str:
    """The preset as one types it."""
    return _loaded(_parts(preset) or ["..."])


def _loaded(parts: Sequence[str]) -> str:
    return advise("preset.load", names=", ".join(parts))


def _parts(preset: Preset) -> list[str]:
    return [repr(part) for part in preset.sources or preset.name.split("+") if part]


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


def verify(settings: EnvironmentSettings, devices: Sequence[DeviceFacts], seen: ProcessFacts) -> tuple[Check, ...]:
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


def start_findings(devices: Sequence[DeviceFacts], seen: ProcessFacts) -> tuple[Finding, ...]:
    """What went wrong with a start that succeeded: a CPU where this machine has an accelerator and no setting asks for it."""
    lost = _given_up(devices[0], ("cuda", "rocm", "tpu"), seen)
    if lost is None:
        return ()
    line = f"{advise('environment.set', name='TF_CPP_MIN_LOG_LEVEL', value='0')}; {_ASKED}   # and read what JAX logs"
    return (Finding(kind="on the CPU", given="JAX fell back to the CPU.", why=f"{lost}.", type_next=line),)


def _given_up(device: DeviceFacts, wanted: Sequence[Platform], seen: ProcessFacts) -> str | None:
    here = [platform for platform in seen.hardware if platform in wanted]
    if device.platform != "cpu" or not here or not _is_allowed(here[0], seen.platforms):
        return None
    return (
        f"It runs on {device.label} although this machine shows {here[0]} hardware; its log lines show why that was given up. "
        f"{advise('environment.set', name='JAX_PLATFORMS', value=here[0])} makes that an error"
    )


def _of_platform(settings: EnvironmentSettings, device: DeviceFacts, seen: ProcessFacts) -> Check:
    wanted: tuple[Platform, ...] = (settings.platform,) if settings.platform else ("cuda", "rocm")
    if device.platform in wanted:
        return Check(setting="platform", outcome="held", text=f"JAX runs on {device.label}, {device.kind}")
    if lost := _given_up(device, wanted, seen):
        return Check(setting="platform", outcome="broken", text=f"JAX fell back to the CPU. {lost}")
    if settings.platform:
        text = f"JAX runs on {device.label}, and the preset is for {settings.platform}"
        return Check(setting="platform", outcome="broken", text=text)
    if device.platform == "cpu":
        text = "JAX runs on the CPU here, whose client has none of these settings: nothing to verify"
        return Check(setting="environment", outcome="unknown", text=text)
    text = f"JAX runs on {device.label}, which reads none of these settings"
    return Check(setting="platform", outcome="broken", text=text)


def _is_allowed(platform: str, platforms: Sequence[str]) -> bool:
    return not platforms or platform in platforms or (platform != "tpu" and "gpu" in platforms)


def _of_gpu(settings: EnvironmentSettings, device: DeviceFacts) -> Iterator[Check]:
    yield from _allocator(settings, device)
    if settings.fraction is not None:
        yield _fraction(settings, device)
    if settings.preallocate is not None:
        yield _preallocate(settings.preallocate, device)
    if settings.collective_pool_bytes is not None:
        text = f"{device.label}: the runtime reports no statistics of the pool for collectives"
        yield Check(setting="collective_pool", outcome="unknown", text=text)


def _allocator(settings: EnvironmentSettings, device: DeviceFacts) -> Iterator[Check]:
    if settings.allocator is None:
        return
    shape = _shape(device.statistics)
    wanted = _SHAPES[settings.allocator]
    text = f"{device.label}: its statistics have the shape {shape!r}, and {settings.allocator} gives {wanted!r}"
    yield Check(setting="allocator", outcome="held" if shape == wanted else "broken", text=text)


def _shape(statistics: Mapping[str, int] | None) -> str:
    if statistics is None:
        return "nothing"
    return "pool" if "pool_bytes" in statistics else "statistics without a pool"


def _fraction(settings: EnvironmentSettings, device: DeviceFacts) -> Check:
    limit = (device.statistics or {}).get("bytes_limit", 0)
    if limit <= 0:
        text = f"{device.label}: this allocator reports no limit"
    elif device.total_bytes is None:
        text = (
            f"{device.label}: its limit is {format_bytes(limit)}, and the memory of a {device.kind} is in no table here"
        )
    else:
        wanted = DEFAULT_FRACTION if settings.fraction is None else settings.fraction
        share = limit / device.total_bytes
        outcome = "held" if abs(share - wanted) <= _TOLERANCE else "broken"
        whole = f"{format_bytes(limit)} of {format_bytes(device.total_bytes)}"
        return Check(setting="fraction", outcome=outcome, text=f"{device.label}: its limit is {whole}, {share:.0%}")
    return Check(setting="fraction", outcome="unknown", text=text)


def _preallocate(wanted: bool, device: DeviceFacts) -> Check:  # noqa: FBT001 - the setting itself
    statistics = device.statistics or {}
    pool, limit = statistics.get("pool_bytes", 0), statistics.get("bytes_limit", 0)
    peak = statistics.get("peak_bytes_in_use", 0)
    text = f"{device.label}: its pool is {format_bytes(pool)} of a limit of {format_bytes(limit)}"
    if pool <= 0 or limit <= 0:
        why = "this allocator reports no pool" if "pool_bytes" not in statistics else "nothing was allocated yet"
        return Check(setting="preallocate", outcome="unknown", text=f"{device.label}: {why}")
    if pool < limit:
        return Check(setting="preallocate", outcome="broken" if wanted else "held", text=text)
    if not wanted and 2 * peak >= limit:  # a pool that grows doubles, and can have come to its limit
        return Check(setting="preallocate", outcome="unknown", text=f"{text}, which a growing pool can have reached")
    return Check(setting="preallocate", outcome="held" if wanted else "broken", text=text)
