"""What the environment room takes and gives: what was seen of a process, what is wrong with it, what was set and verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Platform = Literal["cpu", "cuda", "rocm", "tpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """What decides how JAX will treat this process's device memory; reading it starts no backend.

    Attributes:
        variables: Environment variables that JAX and XLA read, with their values; no other variable's value is ever kept.
        unread: Names of variables that look like one of these and that nothing reads.
        memory_flags: The flags of ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` that concern memory.
        options: What ``jax_pjrt_client_create_options`` has for the GPU's memory; JAX lets it win over the variables.
        options_are_text: Whether that came as text, whose values are texts too.
        unreadable_options: The parts of that text that are no ``key:value``.
        jax: JAX's version, or None where it is not installed.
        jaxlib: jaxlib's version, or None where it is not installed.
        platforms: What ``JAX_PLATFORMS`` or the configuration has, such as ``("cuda", "cpu")``; empty: JAX chooses.
        platforms_text: The same as it was written, blanks and empty names included.
        platform_name: What the older ``JAX_PLATFORM_NAME`` has; empty: nothing.
        plugins: Accelerators whose JAX plugin is installed, with the package's version.
        other_plugins: Names under which packages offer JAX further plugins.
        hardware: Accelerators that the operating system shows.
        started: Whether JAX has read these settings; it reads them once.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    memory_flags: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    options_are_text: bool = False
    unreadable_options: tuple[str, ...] = ()
    jax: str | None = None
    jaxlib: str | None = None
    platforms: tuple[str, ...] = ()
    platforms_text: str = ""
    platform_name: str = ""
    plugins: Mapping[Platform, str] = field(default_factory=dict)
    other_plugins: tuple[str, ...] = ()
    hardware: tuple[Platform, ...] = ()
    started: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong with the settings.

    Attributes:
        kind: A short name for programs, such as ``both fractions``.
        given: What was found.
        why: What JAX makes of it.
        type_next: What to type.
    """

    kind: str
    given: str
    why: str
    type_next: str

    def __str__(self) -> str:
        return f"{self.given} {self.why}\n    Type: {self.type_next}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One local device after the start.

    Attributes:
        label: Such as ``gpu:0``.
        platform: What it is.
        kind: The maker's name of it.
        statistics: ``Device.memory_stats()`` as it came, or None.
        total_bytes: The memory of such a device by the table of targets, or None where it is not in it.
    """

    label: str
    platform: Platform
    kind: str
    statistics: Mapping[str, int] | None
    total_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One setting, verified after the start.

    Attributes:
        setting: Which.
        outcome: ``held``, ``broken``, or ``unknown`` where the runtime reports nothing of it.
        text: By which figure, or why it is unknown.
    """

    setting: str
    outcome: Literal["held", "broken", "unknown"]
    text: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.outcome}, {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedEnvironment:
    """What ``jm.apply_environment`` did.

    Attributes:
        preset: The preset's name.
        set: Variables that it set, with their values.
        already: Variables, or keys of ``jax_pjrt_client_create_options``, that had the same before.
        checks: What was verified; empty before the backend starts. The same call afterwards verifies.
    """

    preset: str
    set: Mapping[str, str]
    already: Mapping[str, str]
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        def listed(given: Mapping[str, str]) -> str:
            return ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing"

        lines = [f"{self.preset}: set {listed(self.set)}; already so: {listed(self.already)}"]
        return "\n".join([*lines, *(f"  {check}" for check in self.checks)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure that the library can show, and whether it exists on this machine.

    Attributes:
        name: Such as ``largest free block``.
        exists: True, False, or None where that is unknown.
        text: Where it comes from, or why it does not exist or is unknown.
    """

    name: str
    exists: bool | None
    text: str
