"""A compiled program in, its bytes as a `ProgramMemory` out: the one place that reads JAX's ``memory_analysis()``."""

from __future__ import annotations

from typing import Any

from jaxmem_callbacks.programs.reading.assignment import assigned_bytes
from jaxmem_callbacks.programs.reading.constants import constant_bytes
from jaxmem_callbacks.programs.reading.hlo import count_compiler_remat
from jaxmem_callbacks.records.programs import ProgramMemory


def memory_figures(compiled: Any, platform: str) -> dict[str, int | None]:
    """The compiler's figures, in bytes on one device, by the names of `ProgramMemory`'s fields.

    ``total_bytes`` is the runtime's own total, which jaxlib has since 0.12; None before. ``assigned_bytes`` is the sum of its
    buffer assignment, None where it gives none. ``host_temp_bytes`` is what an offload policy keeps in host memory meanwhile.

    Raises:
        ValueError: the platform reports nothing.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        msg = "The compiler of this platform reports no memory figures. Compile for 'cpu', a TPU or a CUDA GPU."
        raise ValueError(msg)
    return figures_of(stats, platform)


def figures_of(stats: Any, platform: str) -> dict[str, int | None]:
    """The same of the statistics themselves, such as a loaded executable has them."""
    total = getattr(stats, "total_allocation_bytes", None)
    return {
        "argument_bytes": int(stats.argument_size_in_bytes),
        "output_bytes": int(stats.output_size_in_bytes),
        "alias_bytes": int(stats.alias_size_in_bytes),
        "temp_bytes": int(stats.temp_size_in_bytes),
        "host_temp_bytes": int(stats.host_temp_size_in_bytes),
        "total_bytes": int(total) if total else None,
        "assigned_bytes": assigned_bytes(getattr(stats, "serialized_buffer_assignment_proto", b""), platform),
    }


def program_memory(
    compiled: Any, *, name: str, platform: str, target: str, hlo_text: str | None = None
) -> ProgramMemory:
    """The record of one compiled program.

    Args:
        compiled: What ``lowered.compile()`` gave.
        name: The function's name.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        target: ``attached`` or a target's name.
        hlo_text: ``compiled.as_text()`` where the caller has it already.
    """
    figures = memory_figures(compiled, platform)
    text = compiled.as_text() if hlo_text is None else hlo_text
    told: Any = figures | {"constant_bytes": constant_bytes(text), "compiler_remat": count_compiler_remat(text)}
    return ProgramMemory(name=name, platform=platform, target=target, **told)
