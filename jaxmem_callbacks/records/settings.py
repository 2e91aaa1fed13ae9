"""MonitorSettings: how often the monitor looks, what it calls an event, and where it writes. Presets fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """What ``MemoryMonitor`` does.

    Attributes:
        every_steps: Allocator statistics are read at every N-th step (on the training thread; microseconds).
        window_s: Seconds that one TensorBoard point covers (minimum, mean and maximum of the readings in it).
        scan_s: Seconds between the dearer readings on the monitor's own thread: live arrays, host memory, programs.
        limit_bytes: A limit to judge against where the platform reports none, or a tighter one than it reports; bytes.
        near_oom_headroom: Near-OOM begins when free memory falls under this share of the limit.
        fragmentation_share: A fragmentation event begins when this share of the free pool is outside the largest free block.
        fragmentation_min_bytes: and when at least so many bytes of the pool are free, so that an almost full pool is no event.
        tensorboard: Write TensorBoard scalars, texts and figures.
        jsonl: Write every reading and event as JSON lines.
        on_error: ``warn`` switches a failing part of the monitor off with one line on stderr; ``raise`` is for tests.
    """

    every_steps: int = 1
    window_s: float = 1.0
    scan_s: float = 1.0
    limit_bytes: int | None = None
    near_oom_headroom: float = 0.05
    fragmentation_share: float = 0.5
    fragmentation_min_bytes: int = 64 * 2**20
    tensorboard: bool = True
    jsonl: bool = True
    on_error: Literal["warn", "raise"] = "warn"
