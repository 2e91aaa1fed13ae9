"""The monitor's configuration: a preset, a folder and loggers in any accepted form."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.config.named import Name, load_named
from jaxmem_callbacks.environment.apply import require_applied
from jaxmem_callbacks.probes.protocol import Probe
from jaxmem_callbacks.readers.decoding import read_plan
from jaxmem_callbacks.readers.stores import Store, is_address, opener, packages_for
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arguments import refuse, require_path
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.presets import LEAST_GROWTH_STEPS, EnvironmentSettings, MonitorSettings, Preset
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.units import KIB
from jaxmem_callbacks.writers.adapters import as_writer
from jaxmem_callbacks.writers.protocol import Writer

_CUT_ADDRESS = re.compile(r"(?:gs|gcs|s3|s3a|az|abfs|abfss|hdfs|hf|memory|file):/(?!/)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorArguments:
    """What a monitor was given, checked.

    Attributes:
        settings: Cadences and thresholds.
        folder: For the run's files, or None.
        address: Where they are copied to, such as ``gs://bucket/runs/a``, with what opens it; or None.
        probes: The user's own, or None for the built-in ones.
        writers: The user's own loggers.
        on_event: Takes each event, or None.
        plan: What the step is expected to need, or None.
        split: How the preset's policy splits the state over a mesh; see `split_of`.
        versions: Those that decide whether the plan is about this process.
        unverified: The preset, where it has an environment that is to be verified once the backend has started.
    """

    settings: MonitorSettings
    folder: Path | None
    address: tuple[str, Callable[[], Store]] | None
    probes: Sequence[Probe] | None
    writers: tuple[Writer, ...]
    on_event: Callable[[MemoryEvent], object] | None
    plan: PlanRecord | None
    split: str | None
    versions: Mapping[str, str]
    unverified: Preset | None


def monitor_arguments(  # noqa: PLR0913 - those of the monitor
    preset: Any, *, logdir: Any, writer: Any, on_event: Any, plan: Any, probes: Any
) -> MonitorArguments:
    """Check the arguments of ``MemoryMonitor``.

    Raises:
        TypeError, ValueError, PresetError, RunFileError, EnvironmentSettingError: one is not what was expected.
    """
    planned = _plan_of(plan)
    given = preset_given(preset)
    address = _address_of(logdir)
    return MonitorArguments(
        settings=_settings_of(given),
        folder=None if address else _folder_of(logdir),
        address=address,
        probes=None if probes is None else _probes_of(probes),
        writers=_writers_of(writer),
        on_event=_event_callable(on_event),
        plan=planned,
        split=split_of(given),
        versions=versions_now(),
        unverified=given if isinstance(given, Preset) and given.environment != EnvironmentSettings() else None,
    )


_OF_A_PLAN = "plan='plan.json'"

_SPANS = ("window_s", "scan_s", "driver_s", "heap_map_s", "figure_s")
_SPLIT_ALL = ("fsdp", "fsdp_tensor")  # zero1 keeps parameters whole


def preset_given(preset: Preset | MonitorSettings | Name | None) -> Preset | MonitorSettings:
    """The preset or settings that a monitor is given, by themselves or by name; the defaults for None.

    Raises:
        TypeError: none of these; a folder, which is ``logdir``.
        PresetError: a name that is no preset, or a file that is none.
    """
    if preset is None:
        return MonitorSettings()
    if isinstance(preset, str | os.PathLike) and _is_folder(Path(preset)):
        msg = (
            f"MemoryMonitor got the folder {os.fspath(preset)!r} as its preset. Expected the name of a preset, or a YAML file. "
            f"Write {advise('monitor.call', arguments=f'logdir={os.fspath(preset)!r}')} for the folder of the run's files."
        )
        raise TypeError(msg)
    found: Any = load_named(preset)
    if isinstance(found, Preset | MonitorSettings):
        return found
    msg = (
        f"MemoryMonitor got {type(preset).__name__} as preset. Expected a Preset, a preset's name, MonitorSettings or None: "
        f"{advise('monitor.call', arguments=repr('monitor_only'))}."
    )
    raise TypeError(msg)


def _is_folder(path: Path) -> bool:
    """Whether a path is meant as a folder: one that is there, or one in another folder that is named like no file of YAML."""
    return path.is_dir() or (len(path.parts) > 1 and not path.suffix and not path.exists())


def _settings_of(preset: Preset | MonitorSettings) -> MonitorSettings:
    """The monitor's settings, checked.

    Raises:
        ValueError: a number that makes no sense; an environment that was not applied.
    """
    if isinstance(preset, Preset):
        require_applied(preset)
    settings = preset.monitor if isinstance(preset, Preset) else preset
    _check(settings)
    return settings


def split_of(preset: Preset | MonitorSettings) -> str | None:
    """The sharding by which the preset's policy splits the state over a mesh; None where it has none or keeps the state whole."""
    sharding = preset.policy.sharding if isinstance(preset, Preset) else None
    if sharding is None or isinstance(sharding, tuple):
        return None if sharding is None else "rules"
    return sharding if sharding in _SPLIT_ALL else None


def _plan_of(plan: Any) -> PlanRecord | None:
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
        f"MemoryMonitor got {type(plan).__name__} as plan. Expected a plan of jm.plan, or the file that "
        f"jaxmem plan saved: {advise('monitor.call', arguments=_OF_A_PLAN)}."
    )
    raise TypeError(msg)


def versions_now() -> dict[str, str]:
    """The versions that decide whether a plan is about this process."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def _folder_of(logdir: str | os.PathLike[str] | None) -> Path | None:
    """The local folder for the run's files.

    Raises:
        TypeError: no path.
    """
    return None if logdir is None else require_path("MemoryMonitor", "logdir", logdir, "runs/a")


def _address_of(logdir: Any) -> tuple[str, Callable[[], Store]] | None:
    """An address that is no local folder, and what opens it.

    Raises:
        ValueError: no installed package opens it, or `pathlib.Path` took a slash of it.
    """
    text = os.fspath(logdir) if isinstance(logdir, str | os.PathLike) else ""
    if not isinstance(text, str):
        return None
    if not is_address(text):
        if isinstance(logdir, Path) and (cut := _CUT_ADDRESS.match(text)):
            start = f"{cut[0]}/..."
            msg = (
                f"logdir={without_secrets(text)!r} was the address of a store before pathlib.Path took one of its slashes. Give "
                f"it as text: logdir={start!r}."
            )
            raise ValueError(msg)
        return None
    opens = opener(text)
    if opens is None:
        msg = (
            f"logdir={without_secrets(text)!r} is no local folder, and {packages_for(text)}. Give a local folder and copy it, or "
            "pass the framework's own writer by writer=."
        )
        raise ValueError(msg)
    return text, opens


def _probes_of(probes: Any) -> Sequence[Probe]:
    """The user's probes.

    Raises:
        TypeError: no sequence of what can be read.
    """
    if not isinstance(probes, list | tuple) or not all(
        callable(getattr(each, "read", None)) for each in cast("Sequence[Any]", probes)
    ):
        refuse(
            "MemoryMonitor",
            "probes",
            probes,
            "a list of probes, each an object with a method read, such as a jm.ScriptedProbe",
        )
    return cast("Sequence[Probe]", probes)


def _writers_of(writer: Any) -> tuple[Writer, ...]:
    """The user's loggers as writers: none, one, or a list or tuple of them."""
    if writer is None:
        return ()
    each = cast("Sequence[Any]", writer) if isinstance(writer, list | tuple) else (writer,)
    return tuple(as_writer(one) for one in each)


def _event_callable(on_event: Any) -> Callable[[MemoryEvent], object] | None:
    """What takes the events.

    Raises:
        TypeError: it cannot be called.
    """
    if on_event is not None and not callable(on_event):
        refuse("MemoryMonitor", "on_event", on_event, "a callable that takes one MemoryEvent, such as events.append")
    return on_event


def _check(settings: MonitorSettings) -> None:
    """Numbers that would stop the monitor are refused at construction, not at step time."""
    wrong = [
        f"{name}={getattr(settings, name)!r} (expected {expected})"
        for name, expected, right in (
            ("every_steps", "at least 1", settings.every_steps >= 1),
            *((name, "more than 0 seconds", getattr(settings, name) > 0) for name in _SPANS),
            ("host_s", "more than 0 seconds, or None", settings.host_s is None or settings.host_s > 0),
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
            ("near_oom_profiles", "at least 0", settings.near_oom_profiles >= 0),
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
