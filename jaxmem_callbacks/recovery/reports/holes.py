"""Holes between live arrays: addresses enter; the largest holes leave, with the arrays on both sides, or why there are none.

Only a pool has holes that an allocation could fill, so only GPUs are asked. A temporary of a program can lie in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from jaxmem_callbacks.analysis.heap_map import HOLE, layout_of
from jaxmem_callbacks.probes.heap import HeapProbe
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.oom import Hole
from jaxmem_callbacks.records.readings import Unavailable

_LISTED = 8
_FAR = 2**38  # a GPU's pools lie farther apart than any GPU is large
_NO_POOL = {
    "": "no device is known",
    "cpu": "a CPU's arrays lie among the rest of the process's memory, so what is between them is no hole to fill",
    "tpu": "a TPU tells no addresses",
}


def holes_now(platform: str) -> tuple[tuple[Hole, ...], str]:
    """The largest holes of this process's devices, and why there are none."""
    if platform != "gpu":
        return (), _NO_POOL.get(platform, f"nothing is known of the addresses of {platform}")
    return largest_holes(HeapProbe().read(-1))


def largest_holes(seen: Sequence[HeapMap | Unavailable]) -> tuple[tuple[Hole, ...], str]:
    """The largest holes, the largest first; and why there are none, or an empty text.

    Args:
        seen: A map a device, or why there is none.
    """
    found = sorted((hole for each in seen if isinstance(each, HeapMap) for hole in _holes(each)), key=_size)
    if found:
        return tuple(found[:_LISTED]), ""
    reasons = [each.reason for each in seen if isinstance(each, Unavailable)]
    return (), reasons[0] if reasons else "live arrays lie side by side"


def _holes(heap: HeapMap) -> Iterator[Hole]:
    layout = layout_of(heap.buffers, most_groups=len(heap.buffers), apart_bytes=_FAR)
    for region in layout.regions:
        for (before, hole), (_, behind) in pairwise(pairwise(region)):
            if hole.group == HOLE:
                yield Hole(
                    device=heap.device,
                    bytes=hole.end - hole.begin,
                    below=layout.groups[before.group].label,
                    above=layout.groups[behind.group].label,
                )


def _size(hole: Hole) -> int:
    return -hole.bytes
