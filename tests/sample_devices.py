"""Devices as probes see them, with the statistics that real ones gave."""

from __future__ import annotations

from typing import Any, NamedTuple

GIB = 2**30


class Card(NamedTuple):
    """A device as probes see one, with the statistics a real one gave."""

    platform: str
    stats: dict[str, int] | None
    id: int = 0

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats

    def default_memory(self) -> Any:
        return None


# As jaxlib 0.12 on an H100 with BFC gives them, after some steps.
GPU = {
    "num_allocs": 120,
    "bytes_in_use": 10 * GIB,
    "peak_bytes_in_use": 30 * GIB,
    "largest_alloc_size": GIB,
    "bytes_limit": 60 * GIB,
    "bytes_reserved": 0,
    "peak_bytes_reserved": 0,
    "largest_free_block_bytes": 40 * GIB,
    "pool_bytes": 60 * GIB,
    "peak_pool_bytes": 60 * GIB,
}
