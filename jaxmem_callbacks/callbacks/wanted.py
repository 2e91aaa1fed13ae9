"""What the user asked for: a preset, a folder and loggers in any accepted form enter; settings, a path and writers leave."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.environment.choosing import require_applied
from jaxmem_callbacks.readers.plans import read_plan
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.records.settings import LEAST_GROWTH_STEPS, EnvironmentSettings, MonitorSettings
from jaxmem_callbacks.records.units import KIB
from jaxmem_callbacks.writers.protocol import Writer
from jaxmem_callbacks.writers.shapes import as_writer

_SPANS = ("window_s", "scan_s", "host_s", "driver_s", "heap_map_s", "figure_s")
_SPLIT_ALL = ("fsdp", "fsdp_tensor")  # zero1 keeps parameters whole


def settings_of(preset: Preset | MonitorSettings | str | None) -> MonitorSettings:
    """The monitor's settings, from a preset, a preset's name, settings, or None for the defaults.

    Raises:
        TypeError: none of these.
        ValueError: a number that makes no sense; a name that is no preset (``PresetError``); an environment that was not applied.
    """
    if preset is None:
        return MonitorSettings()
    preset = _loaded(preset)
    require_applied(preset)
    settings: Any = preset.monitor if isinstance(preset, Preset) else preset
    if not isinstance(settings, MonitorSettings):
        msg = (
            f"MemoryMonitor got {type(preset).__name__} as preset. Expected a Preset, a preset's name, MonitorSettings or None: "
            "jm.MemoryMonitor(jm.load_preset('monitor_only'))."
        )
        raise TypeError(msg)
    _check(settings)
    return settings


def split_of(preset: Preset | MonitorSettings | str | None) -> str | None:
    """What the preset's policy says of a state that it splits over a mesh; None where it says nothing or keeps it whole."""
    policy = getattr(_loaded(preset), "policy", None)
    sharding = None if policy is None else policy.sharding
    if sharding is None or isinstance(sharding, tuple):
        return None if sharding is None else "rules"
    return sharding if sharding in _SPLIT_ALL else None


def with_environment(preset: Preset | MonitorSettings | str | None) -> Preset | None:
    """The preset, where it says something of the environment; else None."""
    loaded = _loaded(preset)
    return loaded if isinstance(loaded, Preset) and loaded.environment != EnvironmentSettings() else None


def _loaded(preset: Any) -> Any:
    if not isinstance(preset, str):
        return preset
    from jaxmem_callbacks.config.presets import load_preset

    return load_preset(preset)


def plan_of(plan: Any) -> PlanRecord | None:
    """The record of a plan, from what `jm.plan` gave, from the file that a plan was saved to, or from the record itself.

    Raises:
        TypeError: none of these.
        RunFileError: a path at which there is no plan.
    """
    if isinstance(plan, str | os.PathLike):
        return read_plan(Path(cast("str | os.PathLike[str]", plan)))
    record = getattr(plan, "record", plan)
    if record is None or isinstance(record, PlanRecord):
        return record
    msg = (
        f"MemoryMonitor got {type(plan).__name__} as plan. Expected what jm.plan(train_step, ...) returned, or the file that "
        "`jaxmem plan SCRIPT --save plan.json` wrote: jm.MemoryMonitor(plan='plan.json')."
    )
    raise TypeError(msg)


def versions_now() -> dict[str, str]:
    """The versions that decide whether a plan is about this process."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def folder_of(logdir: str | os.PathLike[str] | None) -> Path | None:
    """The folder for the run's files.

    Raises:
        ValueError: an address that is no local folder.
    """
    if logdir is None:
        return None
    text = os.fspath(logdir)
    if "://" in text:
        msg = (
            f"logdir={text!r} is no local folder, and JSON lines cannot be appended there. Give a local folder and copy it, or "
            "pass the framework's own writer: jm.MemoryMonitor(writer=...)."
        )
        raise ValueError(msg)
    return Path(text)


def writers_of(writer: Any) -> tuple[Writer, ...]:
    """The user's loggers as writers: none, one, or a list or tuple of them."""
    if writer is None:
        return ()
    each = cast("Sequence[Any]", writer) if isinstance(writer, list | tuple) else (writer,)
    return tuple(as_writer(one) for one in each)


def _check(settings: MonitorSettings) -> None:
    """Numbers that would stop the monitor are refused at construction, not at step time."""
    wrong = [
        f"{name}={getattr(settings, name)!r} (expected {expected})"
        for name, expected, right in (
            ("every_steps", "at least 1", settings.every_steps >= 1),
            *((name, "more than 0 seconds", getattr(settings, name) > 0) for name in _SPANS),
            ("processes_s", "more than 0 seconds, or None", settings.processes_s is None or settings.processes_s > 0),
            ("trace_steps", "at least 0", settings.trace_steps >= 0),
            ("limit_bytes", "more than 0 bytes, or None", settings.limit_bytes is None or settings.limit_bytes > 0),
            (
                "jsonl_part_bytes",
                "at least 1024 bytes, or None",
                settings.jsonl_part_bytes is None or settings.jsonl_part_bytes >= KIB,
            ),
            ("near_oom_headroom", "a share from 0 to under 1", 0 <= settings.near_oom_headroom < 1),
            ("near_oom_steps", "at least 1", settings.near_oom_steps >= 1),
            ("fragmentation_share", "a share above 0, at most 1", 0 < settings.fragmentation_share <= 1),
            ("growth_steps", f"at least {LEAST_GROWTH_STEPS}", settings.growth_steps >= LEAST_GROWTH_STEPS),
            ("growth_min_bytes", "at least 1 byte", settings.growth_min_bytes >= 1),
            (
                "growth_min_arrays",
                "at least 1, or None",
                settings.growth_min_arrays is None or settings.growth_min_arrays >= 1,
            ),
            ("replication_min_bytes", "at least 1 byte", settings.replication_min_bytes >= 1),
            ("fragmentation_min_bytes", "at least 0 bytes", settings.fragmentation_min_bytes >= 0),
            ("imbalance_min_bytes", "at least 0 bytes", settings.imbalance_min_bytes >= 0),
            ("on_error", "warn or raise", settings.on_error in ("warn", "raise")),
            ("imbalance_share", "a share above 0, at most 1", 0 < settings.imbalance_share <= 1),
        )
        if not right
    ]
    if wrong:
        msg = f"MonitorSettings: {'; '.join(wrong)}. The defaults are MonitorSettings()."
        raise ValueError(msg)
