"""The environment variables that JAX reads for a GPU's memory, and those that a report may show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

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


def fraction_said(variables: Mapping[str, str]) -> tuple[str, str] | None:
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
_SHOWN = frozenset(
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
    return text if name in _SHOWN and _VALUE.fullmatch(text) else NOT_SHOWN


def _flags(text: str) -> str:
    """Each flag's name, with its value where that is a switch or a number."""
    told: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--\w+", name):
            continue
        told.append(word if not equals or _FLAG_VALUE.fullmatch(value) else f"{name}=(not shown)")
    return " ".join(told) or NOT_SHOWN
