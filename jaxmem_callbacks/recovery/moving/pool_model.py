"""A device's memory as blocks in a row: buffers with addresses enter, places and holes are told as buffers come and go.

A new buffer goes where XLA's pool puts it: the smallest hole that holds it, the lowest of equal ones, at its low end; a hole that
is not much larger is taken whole (bfc_allocator.cc: it is split from twice the size or 128 MiB left over).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

from jaxmem_callbacks.records.defragment import PlacedBuffer

ALIGNMENT = 256
LEFT_OVER = 128 * 2**20


def rounded(count: int) -> int:
    """Bytes that the pool gives for so many."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class PoolModel:
    """Blocks in a row between the lowest buffer and the end of what lies behind the highest.

    Args:
        buffers: What lies there. They do not overlap.
        tail_bytes: Free memory behind the highest buffer.
    """

    def __init__(self, buffers: Iterable[PlacedBuffer], tail_bytes: int = 0) -> None:
        placed = sorted(buffers, key=lambda each: each.address)
        self._starts: list[int] = []
        self._rooms: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self.place_of: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = []
        self._hole_at: dict[int, int] = {}
        self._hole_ending: dict[int, int] = {}
        self.changes: Counter[int] = Counter()
        end = placed[0].address if placed else 0
        for each in placed:
            if each.address > end:
                self._open(end, each.address - end)
            room = max(each.room, rounded(each.bytes))
            self._take(each.key, each.address, room)
            end = max(end, each.address + room)
        if tail_bytes:
            self._open(end, tail_bytes)
        self.changes.clear()

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        return self._holes[-1][0] if self._holes else 0

    def holes(self) -> list[tuple[int, int]]:
        """Address and bytes of each hole, in the order of addresses."""
        return sorted((start, size) for size, start in self._holes)

    def after(self, start: int) -> Iterable[int]:
        """The keys of the buffers above an address, in their order."""
        for place in self._starts[bisect.bisect_left(self._starts, start) :]:
            yield self._keys[place]

    def best_fit(self, count: int) -> int | None:
        """Where a new buffer would go, or None where no hole holds it."""
        index = bisect.bisect_left(self._holes, (rounded(count), -1))
        return self._holes[index][1] if index < len(self._holes) else None

    def put(self, key: int, count: int) -> int | None:
        """Put a new buffer in. Its address, or None where no hole holds it."""
        start = self.best_fit(count)
        if start is None:
            return None
        size, wanted = self._hole_at[start], rounded(count)
        split = size >= 2 * wanted or size - wanted >= LEFT_OVER
        self.put_back(key, start, wanted if split else size)
        return start

    def put_back(self, key: int, start: int, room: int) -> None:
        """Put a buffer at the low end of a hole, or at a place inside one that it was taken from."""
        hole = start if start in self._hole_at else max(low for low in self._hole_at if low <= start)
        size = self._hole_at[hole]
        self._close(hole)
        if start > hole:
            self._open(hole, start - hole)
        if start + room < hole + size:
            self._open(start + room, hole + size - start - room)
        self._take(key, start, room)

    def let_go(self, key: int) -> tuple[int, int]:
        """Take a buffer out; its hole joins its neighbours. Its address and room."""
        start = self.place_of.pop(key)
        room = self._rooms.pop(start)
        del self._keys[start]
        del self._starts[bisect.bisect_left(self._starts, start)]
        low, high = start, start + room
        if start in self._hole_ending:
            low = self._hole_ending[start]
            self._close(low)
        if high in self._hole_at:
            size = self._hole_at[high]
            self._close(high)
            high += size
        self._open(low, high - low)
        return start, room

    def improved(self) -> bool:
        """Whether the changes since `settle` made the largest of the holes that differ larger."""
        differ = [size for size, count in self.changes.items() if count]
        return bool(differ) and self.changes[max(differ)] > 0

    def settle(self) -> None:
        """What was done is the new state."""
        self.changes.clear()

    def _take(self, key: int, start: int, room: int) -> None:
        bisect.insort(self._starts, start)
        self._rooms[start], self._keys[start], self.place_of[key] = room, key, start

    def _open(self, start: int, size: int) -> None:
        bisect.insort(self._holes, (size, start))
        self._hole_at[start], self._hole_ending[start + size] = size, start
        self.changes[size] += 1

    def _close(self, start: int) -> None:
        size = self._hole_at.pop(start)
        del self._hole_ending[start + size]
        del self._holes[bisect.bisect_left(self._holes, (size, start))]
        self.changes[size] -= 1
