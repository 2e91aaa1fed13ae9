"""A preset's settings and what was seen of a process enter; the variables to set leave, or the reason to set none of them."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem_callbacks.environment.surroundings import surroundings
from jaxmem_callbacks.environment.traps import same, settings_findings
from jaxmem_callbacks.environment.variables import (
    ALLOCATOR,
    COLLECTIVE_POOL,
    FRACTION,
    OPTIONS,
    PREALLOCATE,
    fraction_said,
)
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import AppliedEnvironment, Surroundings
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.presets import EnvironmentSettings, Preset
from jaxmem_callbacks.records.units import MIB

_OPTION = "jax_pjrt_client_create_options"


def choose(preset: Preset, seen: Surroundings) -> AppliedEnvironment:
    """What is to be set for a preset, and what is so already. Sets nothing itself.

    Args:
        preset: Whose ``environment`` is wanted.
        seen: The process as it is.

    Raises:
        EnvironmentSettingError: the preset says nothing of the environment; something is wrong with what is set already, or would
            be afterwards; the user said another value; or the backend has started and something is still to be set.
    """
    require_said(preset)
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
    already, _ = _compared(wanted, surroundings(started=True))
    missing = [f"{name}={text}" for name, text in wanted.items() if name not in already]
    if missing:
        msg = (
            f"The preset {preset.name} has an environment that this process does not have: {', '.join(missing)}.\n"
            f"    Type above the first use of JAX: {advise('environment.apply', preset=_call(preset))}\n"
            f"    To do without it: {_call(preset)}.policy for a step, .monitor for a monitor"
        )
        raise EnvironmentSettingError(msg)


def require_said(preset: Preset) -> None:
    """Refuse a preset that would silently do nothing.

    Raises:
        EnvironmentSettingError: it says nothing of the environment.
    """
    if preset.environment == EnvironmentSettings():
        msg = (
            f"The preset {preset.name or 'given'} says nothing of the environment, so there is nothing to apply. Add a part that "
            f"does: {advise('environment.apply', preset=_loaded([*_parts(preset), repr('gpu_growth')]))}. "
            f"`{advise('command.typed', typed='presets')}` lists them: gpu_..., tpu_default."
        )
        raise EnvironmentSettingError(msg)


def wanted_variables(settings: EnvironmentSettings) -> dict[str, str]:
    """The variables, with their texts, that say what the settings say."""
    pool = settings.collective_pool_bytes
    texts = {
        ALLOCATOR: settings.allocator,
        PREALLOCATE: None if settings.preallocate is None else str(settings.preallocate).lower(),
        FRACTION: None if settings.fraction is None else repr(settings.fraction),
        COLLECTIVE_POOL: None if pool is None else str(pool // MIB),
    }
    return {name: text for name, text in texts.items() if text is not None}


def _compared(
    wanted: Mapping[str, str], seen: Surroundings
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Of the variables wanted, those that are so already and those that say something else: wanted name -> what says so."""
    already: dict[str, tuple[str, str]] = {}
    different: dict[str, tuple[str, str]] = {}
    keys = {variable: key for key, variable in OPTIONS.items()}
    for name, text in wanted.items():
        said, value = _said(name, keys[name], seen)
        if value is None:
            continue
        is_same = same(name, text, value) if said.startswith(_OPTION) else _mean_the_same(name, text, str(value))
        (already if is_same else different)[name] = (said, str(value))
    return already, different


def _said(name: str, key: str, seen: Surroundings) -> tuple[str, Any]:
    """What has the last word on a setting here, and its value; None where nothing has."""
    if key in seen.options:
        return f"{_OPTION}[{key!r}]", seen.options[key]
    if name == FRACTION:
        return fraction_said(seen.variables) or (name, None)
    return name, seen.variables.get(name) or None


def _mean_the_same(name: str, wanted: str, text: str) -> bool:
    """Whether JAX makes the same of two texts."""
    if name == ALLOCATOR:
        return wanted == text.lower()
    if name == PREALLOCATE:
        return same(name, text, wanted == "true")
    return same(name, text, float(wanted) if name == FRACTION else int(wanted) * MIB)


def _conflicts(preset: Preset, wanted: Mapping[str, str], different: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"{preset.name}: nothing was set, because this process says otherwise already."]
    for name, (said, value) in different.items():
        lines.append(f"  {said} is {value}, and the preset says {wanted[name]}.")
    clearing = "; ".join(
        f"leave {said} out" if said.startswith(_OPTION) else advise("environment.unset", name=said)
        for said, _ in different.values()
    )
    lines.append(
        f"    To take the preset's: {clearing}   # in the shell; os.environ.pop(...) above this call does it too"
    )
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
