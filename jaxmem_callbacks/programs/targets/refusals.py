"""The error of an absent target's compiler in, what it says about memory out: needed and available bytes."""

from __future__ import annotations

import re

from jaxmem_callbacks.records.errors import CompileError, did_you_mean

_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required[^(]*\({_SIZE}\) exceeds available[^(]*\({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE),
)
_TEXT_LIMIT = 3000
_NO_OPTION = re.compile(r"No such compile option: '([^']+)'")
# Options on which memory depends, for the name that was meant.
_OPTIONS = (
    "xla_gpu_autotune_level",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_memory_limit_slop_factor",
    "xla_gpu_temp_buffer_use_separate_color",
    "xla_tpu_enable_latency_hiding_scheduler",
    "xla_tpu_scoped_vmem_limit_kib",
)


def refuse_unknown_option(title: str, words: str) -> None:
    """Refuse a compiler option that the compiler does not know.

    Args:
        title: What was compiled for which devices.
        words: The compiler's own.

    Raises:
        CompileError: names the option, and the nearest one that is known.
    """
    if (match := _NO_OPTION.search(words)) is None:
        return
    name = match[1]
    msg = (
        f"{title}: its compiler has no option {name!r}.{did_you_mean(name, _OPTIONS)} It comes from the compiler_options of your "
        "jit. Expected an option of this compiler's version, without the dashes."
    )
    raise CompileError(msg)


def refused_for_memory(title: str, error: str, remark: str = "") -> tuple[int | None, int | None]:
    """Bytes that the program needs and that there are, where a compiler refused it for its memory.

    Args:
        title: What was compiled for which target.
        error: The compiler's own words.
        remark: What may be wrong with the compiler itself, for an error of another kind.

    Returns:
        Needed and available bytes; None for what the text does not say.

    Raises:
        CompileError: it is an error of another kind.
    """
    refuse_unknown_option(title, error)
    if "RESOURCE_EXHAUSTED" not in error:
        advice = (
            "Expected operations and options that it takes without a device. Find in its words below which one it does not, and "
            "leave it out or replace it: docs/targets.md, 'What cannot be compiled for an absent device', tells by what."
        )
        msg = f"{title}: the compiler refused the program. {remark}{'. ' if remark else ''}{advice}\n{error[:_TEXT_LIMIT]}"
        raise CompileError(msg)
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(error):
            return _bytes(match[1], match[2]), _bytes(match[3], match[4])
    return None, None


def _bytes(number: str, letter: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(letter.upper() or " "))
