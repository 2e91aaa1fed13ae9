"""What a failure for want of memory says of itself. Numbers of a text or of an allocator enter; nothing is worked out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["compile", "run"]
OomPlatform = Literal["gpu", "tpu", "cpu", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OomFacts:
    """An out-of-memory failure, as far as its text tells it; None where the text does not say.

    Sizes are bytes. A size printed in units (K, KiB, M, ... T: powers of 1024) is as exact as its printed decimals.

    Attributes:
        phase: While compiling (autotuning counts), or while running (loading a program and allocating buffers count).
        platform: Whose memory; ``host`` is host memory used beside an accelerator. ROCm is ``gpu``.
        requested_bytes: The one allocation or reservation that failed.
        free_bytes: What was free.
        largest_free_bytes: The largest contiguous, or reservable, part of what was free.
        limit_bytes: The capacity or limit that was exceeded.
        used_bytes: What was in use, or what the whole program needs.
        fragmentation: True where the text says that fragmentation is the cause or its numbers prove it (a request no
            larger than limit less use, yet refused); None where it only hints.
        allocator: The allocator's name, such as ``GPU_0_bfc``.
        program: The executable's name, such as ``jit_train_step``.
    """

    phase: Phase | None = None
    platform: OomPlatform | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    limit_bytes: int | None = None
    used_bytes: int | None = None
    fragmentation: bool | None = None
    allocator: str | None = None
    program: str | None = None
