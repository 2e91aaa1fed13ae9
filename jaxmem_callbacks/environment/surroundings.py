"""This process and this machine, read without starting a backend: variables, versions, plugins, hardware, JAX's configuration.

Values are taken of the variables that JAX reads only. JAX itself is not imported: where the user has, its configuration counts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.environment.variables import OPTIONS, SHOWN, memory_flags, unread_names
from jaxmem_callbacks.records.environment import Platform, Surroundings

_PLUGINS: dict[Platform, str] = {"cuda": r"jax-cuda\d+-plugin", "rocm": r"jax-rocm\d+-plugin", "tpu": r"libtpu"}
_OWN_PLUGINS = ("xla_cuda", "xla_rocm")  # entry points of these
_SHOWN = 40  # characters of a part that cannot be read
_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last is Windows' subsystem for Linux
_AMD = ("/dev/kfd",)
_GOOGLE = "0x1ae0"  # also the vendor of network cards, so that the device is looked at too
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"}


def surroundings(*, started: bool) -> Surroundings:
    """What decides how JAX treats this process's device memory.

    Args:
        started: Whether JAX has read the settings (``_compat.backends.settings_were_read``).
    """
    options, unreadable, are_text = _options()
    platforms = str(_configured("jax_platforms") or "")
    flags = (memory_flags(os.environ.get(name, "")) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return Surroundings(
        variables={name: os.environ[name] for name in SHOWN if name in os.environ},
        unread=unread_names(os.environ),
        memory_flags=tuple(flag for several in flags for flag in several),
        options=options,
        options_are_text=are_text,
        unreadable_options=unreadable,
        jax=_version("jax"),
        jaxlib=_version("jaxlib"),
        platforms=tuple(part.strip() for part in platforms.split(",") if part.strip()),
        platforms_text=platforms,
        platform_name=str(_configured("jax_platform_name") or ""),
        plugins=_plugins(),
        other_plugins=_other_plugins(),
        hardware=_hardware(),
        started=started,
    )


def _options() -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """The options that win over the variables, of those that concern memory; what is unreadable; whether they came as text."""
    said = _configured("jax_pjrt_client_create_options")
    if isinstance(said, str):
        parts = said.split(";") if said else []
        pairs = (part.partition(":") for part in parts)
        known = {key.strip(): value.strip() for key, _, value in pairs if key.strip() in OPTIONS}
        unreadable = [part for part in parts if part.count(":") != 1 or not part.partition(":")[0].isidentifier()]
        return known, tuple(part[:_SHOWN] for part in unreadable), True
    mapping = cast("Mapping[str, Any]", said if isinstance(said, Mapping) else {})
    return {key: mapping[key] for key in OPTIONS if key in mapping}, (), False


def _configured(name: str) -> Any:
    """A setting of JAX: as the imported JAX has it, else as its variable will make it."""
    jax = sys.modules.get("jax")
    return getattr(jax.config, name, None) if jax is not None else os.environ.get(name.upper())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins() -> dict[Platform, str]:
    installed = {str(each.name).lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    return {
        platform: f"{name} {installed[name]}"
        for platform, pattern in _PLUGINS.items()
        for name in sorted(installed)
        if re.fullmatch(pattern, name)
    }


def _other_plugins() -> tuple[str, ...]:
    """What is advertised as JAX's plugins, but for those of `_PLUGINS`: their modules are called ``xla_cuda12`` and the like.

    As JAX finds them: by entry points, as modules of the package ``jax_plugins``, and by a variable. None is imported.
    """
    names = {each.name for each in importlib.metadata.entry_points(group="jax_plugins")}
    spec = importlib.util.find_spec("jax_plugins")
    folders = spec.submodule_search_locations if spec is not None else None
    names |= {each.name for each in pkgutil.iter_modules(folders or ())}
    named = os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS", "")
    names |= {part.partition(":")[0].strip() for part in named.split(",") if part.strip()}
    return tuple(sorted(name for name in names if not name.startswith(_OWN_PLUGINS)))


def _hardware() -> tuple[Platform, ...]:
    shown: dict[Platform, bool] = {
        "cuda": any(Path(path).exists() for path in _NVIDIA),
        "rocm": any(Path(path).exists() for path in _AMD),
        "tpu": any(map(_is_tpu, Path("/sys/bus/pci/devices").glob("*"))),
    }
    return tuple(platform for platform, there in shown.items() if there)


def _is_tpu(folder: Path) -> bool:
    try:
        return (folder / "vendor").read_text().strip() == _GOOGLE and (folder / "device").read_text().strip() in _TPUS
    except OSError:
        return False
