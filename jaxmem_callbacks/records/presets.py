"""Preset: a policy, settings of the monitor, the environment and recovery under one name. Read from YAML, then pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.recoveries import RecoverySettings
from jaxmem_callbacks.records.settings import EnvironmentSettings, MonitorSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What one or several composed YAML parts say.

    Attributes:
        name: The parts' names joined by ``+``, such as ``donate+full_remat``.
        description: What it is for, from the YAML; the parts' descriptions joined by a space.
        policy: Applied to the step, before its first trace.
        monitor: How the run is watched.
        environment: What XLA's client is told before it starts, by ``jm.apply_environment``.
        recovery: What ``jm.Recovery`` does when memory runs out.
        said: Dotted keys that the YAML spelled out (``policy.remat``); the others are defaults.
        sources: The parts as ``jm.load_preset`` was given them, names and paths; empty where it was not asked.
    """

    name: str
    description: str = ""
    policy: StepPolicy = field(default_factory=StepPolicy)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    said: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)
