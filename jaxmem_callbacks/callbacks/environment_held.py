"""The environment of a monitor's preset, verified once the backend has started: a preset enters; what does not hold is told.

The constructor refuses a preset whose variables are not set (`callbacks/wanted.py`). Whether the runtime obeys shows only now,
and a run that goes on is never stopped for it.
"""

from __future__ import annotations

from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.environment.choosing import verify
from jaxmem_callbacks.environment.surroundings import surroundings
from jaxmem_callbacks.probes.allocator import devices_here
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import EnvironmentSettingError
from jaxmem_callbacks.records.presets import Preset

_PART = "environment"


def tell_of_environment(preset: Preset, faults: Faults) -> None:
    """Say what the runtime's own figures contradict; nothing where all holds or is unknown.

    Args:
        preset: With an environment.
        faults: Told of it; with ``on_error="raise"`` the user's own thread raises ``EnvironmentSettingError``.
    """
    checks = verify(preset.environment, devices_here(), surroundings(started=True))
    broken = "; ".join(f"{check.setting}: {check.told}" for check in checks if check.outcome == "broken")
    if not broken:
        return
    more = advise("command.typed", typed="doctor --start")
    words = f"{preset.name}: the backend does not obey its environment. {broken}. `{more}` says more."
    if faults.raises:
        faults.report(_PART, EnvironmentSettingError(words))
    else:
        faults.note(_PART, words)
