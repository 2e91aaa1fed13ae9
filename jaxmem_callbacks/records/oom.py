"""What a failure for want of memory says of itself. Numbers of a text or of an allocator enter; nothing is worked out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["compile", "run"]
OomPlatform = Literal["gpu", "tpu", "cpu", "host"]
# Why it did not fit: the limit was too small; the pool had enough free, but in pieces; the pool could still grow, but neither by
# that nor by what it had free was there enough in one piece; the device gave no more, since something else holds the rest.
OomCause = Literal["capacity", "fragmentation", "growth", "refused", "unknown"]


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
        compacted_bytes: What would be free in one piece if all that can be moved were moved; the rest of what is free is
            reserved.
        limit_bytes: The capacity or limit that was exceeded.
        used_bytes: What was in use, or what the whole program needs.
        pool_bytes: What the allocator's pool held, in use and free; below ``limit_bytes`` the pool could still grow.
        fragmentation: True where the text names fragmentation as the cause and no number contradicts, or where its numbers
            prove it: memory that the pool itself had free was enough for the request. What a pool may still grow by is not
            free memory of the pool. None where the text only hints.
        driver_refused: True where the GPU's driver refused memory, so that the device itself had no more to give.
        allocator: The allocator's name, such as ``GPU_0_bfc``.
        program: The executable's name, such as ``jit_train_step``.
    """

    phase: Phase | None = None
    platform: OomPlatform | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    compacted_bytes: int | None = None
    limit_bytes: int | None = None
    used_bytes: int | None = None
    pool_bytes: int | None = None
    fragmentation: bool | None = None
    driver_refused: bool | None = None
    allocator: str | None = None
    program: str | None = None
