"""The error of an absent target's compiler in, what it says about memory out: needed and available bytes."""

from __future__ import annotations

import re

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import CompileError, did_you_mean

_SIZE = r"([\d.]+)\s*([KMGT]?)i?B?"
_OUT_OF_MEMORY = (
    re.compile(rf"total memory required[^(]*\({_SIZE}\) exceeds available[^(]*\({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE),
)
_TEXT_LIMIT = 3000
_PLACED = re.compile(r"argument (?P<argument>\S+) of .+? device ids \[(?P<devices>[^\]]*)\]")
_NO_OPTION = re.compile(r"No such compile option: '([^']+)'")
_NEAR = 0.7
# Options on which memory depends, for the name that was meant.
_OPTIONS = (
    "xla_backend_optimization_level",
    "xla_cpu_enable_concurrency_optimized_scheduler",
    "xla_cpu_enable_fast_math",
    "xla_cpu_use_thunk_runtime",
    "xla_disable_hlo_passes",
    "xla_dump_to",
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
    family = next((each for each in ("xla_cpu_", "xla_gpu_", "xla_tpu_") if name.startswith(each)), "xla_")
    # The names of a family are alike by their beginning, which says nothing of what is meant.
    known = [each.removeprefix(family) for each in _OPTIONS if each.startswith(family)]
    alike = did_you_mean(name.removeprefix(family), known, cutoff=_NEAR).replace("`", f"`{family}", 1)
    msg = (
        f"{title}: its compiler has no option {name!r}.{alike} It comes from the compiler_options of your "
        "jit. Expected an option of this compiler's version, without the dashes."
    )
    raise CompileError(msg)


def refuse_devices_apart(name: str, words: str) -> None:
    """Refuse a call whose arguments lie on different devices.

    Args:
        name: The step.
        words: JAX's own.

    Raises:
        CompileError: which argument lies where, and what to write.
    """
    if "incompatible devices" not in words:
        return
    found = list(_PLACED.finditer(words))
    said = words.partition(" Got ")[2] or words
    msg = f"{name}: expected all arguments on the same devices, got {said.rstrip('.')}. "
    fewest, most = (pick(found, key=_device_count, default=None) for pick in (min, max))
    if fewest and most and fewest["argument"].isidentifier() and _device_count(most) > 1:
        line = advise("devices.apart", argument=fewest["argument"], other=most["argument"])
        msg += f"Before the call, place {fewest['argument']} on all of them:\n    {line}"
    else:
        msg += "Can they be placed on one mesh, by jax.device_put, before the call?"
    raise CompileError(msg)


def _device_count(placed: re.Match[str]) -> int:
    return placed["devices"].count(",") + 1


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
