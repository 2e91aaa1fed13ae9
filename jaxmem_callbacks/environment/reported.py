"""The environment as a report may show it: variables enter; names, and the few values that hold no secret, leave.

Every variable whose name belongs to JAX, XLA or an accelerator is named. A value is shown only of those on the list, and only
where it looks like one of its values; of flags only switches and numbers, so that paths are never told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxmem_callbacks.environment.variables import SHOWN

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
