"""One buffer of a compiled program, as its compiler places it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer alive at the peak of a program's temporaries.

    Attributes:
        bytes: Its size.
        shape: Dtype, shape and layout as the compiler prints them.
        operation: The JAX operation with its module path, such as ``jit(step)/Block_3/dot_general``, or None.
        source: ``file.py:line`` of the user's code, or None where the compiler kept none.
        kind: ``temporary``, ``argument``, ``output``, ``constant``, or ``gap``: memory that the plan leaves between the
            temporaries alive at the peak; ``unplaced`` is what the compiler counts and has no place for in its plan.
        group: What it is to the step, one of `records.peaks.GROUPS`.
        unpadded_bytes: Bytes of its elements side by side, or None where the shape does not show it.
        memory_space: ``device`` or, for what lies beside the peak, ``host`` or ``on-chip``.
        why: Why its group is ``unknown``, else None.
    """

    bytes: int
    shape: str
    kind: str
    operation: str | None = None
    source: str | None = None
    group: str = "unknown"
    unpadded_bytes: int | None = None
    memory_space: str = "device"
    why: str | None = None

    @property
    def waste_bytes(self) -> int | None:
        """Bytes that hold no element: what tiles are padded with on a TPU; None where unknown."""
        return None if self.unpadded_bytes is None else max(self.bytes - self.unpadded_bytes, 0)
