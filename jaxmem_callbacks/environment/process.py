"""This process and this machine, read without starting a backend: variables, versions, plugins, hardware, JAX's configuration.

Values are taken of the variables that JAX reads only. JAX itself is not imported: where the user has, its configuration counts.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.records.environment import Platform, ProcessFacts

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
COLLECTIVE_POOL = "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"
SWITCHES = ("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT")
READ_BY_JAX = (ALLOCATOR, PREALLOCATE, FRACTION, OLD_FRACTION, COLLECTIVE_POOL, *SWITCHES)
UNIFIED = "TF_FORCE_UNIFIED_MEMORY"
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
HOST_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
TENSORFLOW_ALLOCATOR = "TF_GPU_ALLOCATOR"
# Variables whose values may be shown. Everything else in an environment may be a secret.
SHOWN = (
    *READ_BY_JAX,
    UNIFIED,
    TENSORFLOW_ALLOCATOR,
    HOST_LIMIT,
    HOST_PREALLOCATE,
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "CUDA_VISIBLE_DEVICES",
    "JAX_CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "JAX_ROCM_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
)
# Key of jax_pjrt_client_create_options -> the variable that it wins over.
OPTIONS = {
    "allocator": ALLOCATOR,
    "memory_fraction": FRACTION,
    "preallocate": PREALLOCATE,
    "collective_memory_size": COLLECTIVE_POOL,
}
# Allocator -> the first jaxlib that knows it.
ALLOCATORS = {
    "default": (0, 0, 0),
    "bfc": (0, 0, 0),
    "cuda_async": (0, 0, 0),
    "platform": (0, 0, 0),
    "vmm": (0, 10, 0),
    "address": (0, 11, 0),
}
DEFAULT_FRACTION = 0.75
PLATFORM_WAS_BFC = ((0, 10, 1), (0, 10, 2))
_FALSE = ("false", "False", "0")
_PREFIXES = ("XLA_PYTHON_CLIENT_", "XLA_CLIENT_")
_MEMORY_WORDS = ("memory", "remat", "alloc", "hbm", "command_buffer_update_mode")
_ALIKE = 0.85


def fraction_given(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that gives the fraction, and its text; None where neither does. The new name wins, as nothing reads both."""
    found = [(name, variables[name]) for name in (FRACTION, OLD_FRACTION) if variables.get(name)]
    return found[0] if found else None


def as_fraction(text: str) -> float | None:
    """The number that JAX reads, or None where it is none and JAX fails."""
    try:
        return float(text)
    except ValueError:
        return None


def as_whole(text: str) -> int | None:
    """The whole number that JAX reads, or None where it is none and JAX fails."""
    try:
        return int(text)
    except ValueError:
        return None


def as_preallocate(text: str) -> bool:
    """What JAX makes of the text: everything but three words is true."""
    return text not in _FALSE


def as_switch(text: str) -> bool | None:
    """What XLA makes of a switch of its own, such as `UNIFIED`; None where it reads none and takes its default."""
    return {"0": False, "false": False, "1": True, "true": True}.get(text.lower())


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with, as JAX compares them: ``0.12.0.1`` as (0, 12, 0, 1), without ``.dev3``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def unread_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names that look like a variable of `READ_BY_JAX` and that nothing reads."""
    return tuple(sorted(name for name in names if name not in SHOWN and _looks_like_one(name)))


def nearest(name: str) -> str:
    """The variable that was probably meant."""
    return difflib.get_close_matches(name.upper(), READ_BY_JAX, n=1, cutoff=0)[0]


def memory_flags(text: str) -> tuple[str, ...]:
    """The flags of ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS`` that concern memory; paths and others are left out."""
    words = [word for word in text.split() if word.startswith("--")]
    return tuple(word for word in words if any(mark in word.partition("=")[0] for mark in _MEMORY_WORDS))


def _looks_like_one(name: str) -> bool:
    upper = name.upper()
    return upper.startswith(_PREFIXES) or bool(difflib.get_close_matches(upper, READ_BY_JAX, n=1, cutoff=_ALIKE))


NOT_SHOWN = "set; its value is not shown"
_NAMED = (
    "XLA_",
    "JAX_",
    "JAXMEM_",
    "TF_GPU_",
    "TF_FORCE_",
    "TF_CPP_",
    "LIBTPU_",
    "TPU_",
    "CUDA_",
    "NCCL_",
    "HIP_",
    "ROCR_",
)
_REPORTED = frozenset(
    {
        *SHOWN,
        "JAX_ENABLE_X64",
        "JAX_DEBUG_NANS",
        "JAX_DISABLE_JIT",
        "JAX_NUM_CPU_DEVICES",
        "JAX_TRACEBACK_FILTERING",
        "JAX_ENABLE_COMPILATION_CACHE",
        "JAX_DEFAULT_MATMUL_PRECISION",
        "JAX_COMPILER_ENABLE_REMAT_PASS",
        "TF_CPP_MIN_LOG_LEVEL",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "JAXMEM_COMPILE_TIMEOUT_S",
    }
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VALUE = re.compile(r"[\w.,:+-]{1,40}")
_FLAG_VALUE = re.compile(r"(?:true|false|-?\d+(?:\.\d+)?)", re.IGNORECASE)


def reported_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Name -> value, or that it is set and not shown; sorted.

    Args:
        variables: The process's environment.
    """
    return {
        name: _flags(text) if name in _FLAGS else _value(name, text)
        for name, text in sorted(variables.items())
        if name.startswith(_NAMED)
    }


def _value(name: str, text: str) -> str:
    return text if name in _REPORTED and _VALUE.fullmatch(text) else NOT_SHOWN


def _flags(text: str) -> str:
    """Each flag's name, with its value where that is a switch or a number."""
    shown: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--\w+", name):
            continue
        shown.append(word if not equals or _FLAG_VALUE.fullmatch(value) else f"{name}=(not shown)")
    return " ".join(shown) or NOT_SHOWN


_PLUGINS: dict[Platform, str] = {"cuda": r"jax-cuda\d+-plugin", "rocm": r"jax-rocm\d+-plugin", "tpu": r"libtpu"}
_OWN_PLUGINS = ("xla_cuda", "xla_rocm")  # entry points of these
_SHOWN_CHARACTERS = 40  # characters of a part that cannot be read
_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last is Windows' subsystem for Linux
_AMD = ("/dev/kfd",)
_GOOGLE = "0x1ae0"  # also the vendor of network cards, so that the device is looked at too
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"}


def process_facts(*, started: bool) -> ProcessFacts:
    """What decides how JAX treats this process's device memory.

    Args:
        started: Whether JAX has read the settings (``_compat.backends.settings_were_read``).
    """
    options, unreadable, are_text = _options()
    platforms = str(_configured("jax_platforms") or "")
    flags = (memory_flags(os.environ.get(name, "")) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return ProcessFacts(
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
    given = _configured("jax_pjrt_client_create_options")
    if isinstance(given, str):
        parts = given.split(";") if given else []
        pairs = (part.partition(":") for part in parts)
        known = {key.strip(): value.strip() for key, _, value in pairs if key.strip() in OPTIONS}
        unreadable = [part for part in parts if part.count(":") != 1 or not part.partition(":")[0].isidentifier()]
        return known, tuple(part[:_SHOWN_CHARACTERS] for part in unreadable), True
    mapping = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
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
