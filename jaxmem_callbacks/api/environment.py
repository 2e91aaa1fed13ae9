"""``jm.apply_environment``: a preset's settings for this process, set before the backend starts.

Imports no JAX, so that it may stand above ``import jax``.
"""

from __future__ import annotations

import dataclasses
import os

from jaxmem_callbacks._compat.backends import settings_were_read
from jaxmem_callbacks.config.named import Name, load_named
from jaxmem_callbacks.environment.apply import choose, verify
from jaxmem_callbacks.environment.process import process_facts
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.environment import AppliedEnvironment
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.presets import Preset

_GROWING = advise("environment.apply", preset="'gpu_growth'")


def apply_environment(preset: Preset | Name) -> AppliedEnvironment:
    """Set a preset's settings of XLA's client, before JAX's backend starts; the same call after the start verifies it.

        jm.apply_environment("gpu_growth")      # above the first use of JAX

    Args:
        preset: A ``Preset``, the name of one (several joined by ``+``) or its path; its ``environment`` is what counts.

    Returns:
        What was set, what was so already, and, once the backend has started, what was verified by the runtime's own figures.

    Raises:
        EnvironmentSettingError: a preset without environment; a setting that JAX would misread, ignore or fail on; a value that
            the user set and that differs, which is never overwritten; a backend that has started without these settings, or
            that shows by its figures that it does not obey them. Nothing is set then.
        TypeError: no preset.
    """
    preset = load_named(preset)
    if not isinstance(preset, Preset):
        msg = f"Expected a Preset or its name, got {type(preset).__name__}. Write {_GROWING}."
        raise TypeError(msg)
    seen = process_facts(started=settings_were_read())
    chosen = choose(preset, seen)
    os.environ.update(chosen.set)
    if not seen.started:
        return chosen
    from jaxmem_callbacks.probes.device_memory import devices_here

    checks = verify(preset.environment, devices_here(), seen)
    broken = [str(check) for check in checks if check.outcome == "broken"]
    if broken:
        msg = f"{preset.name}: the backend does not obey.\n" + "\n".join(f"  {line}" for line in broken)
        raise EnvironmentSettingError(msg)
    return dataclasses.replace(chosen, checks=checks)
