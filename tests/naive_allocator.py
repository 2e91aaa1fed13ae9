"""A second allocator, written from the description and not from the model: lists of chunks, searched from end to end."""

from __future__ import annotations

MIB = 2**20


class NaiveAllocator:
    """What XLA's pool does, without bins, links or bookkeeping: a region is a list of [size, requested or None]."""

    def __init__(self, limit, *, preallocate, partitioned=False):
        self.limit, self.preallocate, self.partitioned = limit, preallocate, partitioned and preallocate
        self.regions = []
        self.next_region = up(limit if preallocate else min(limit, 2 * MIB))

    def allocate(self, requested):
        """(region, offset) of the chunk, or None."""
        size = up(requested)
        found = self.best(size)
        if found is None:
            if not self.grow(size):
                return None
            found = self.best(size)
        region, index = found
        chunks = self.regions[region]
        have = chunks[index][0]
        is_open_end = self.partitioned and index == len(chunks) - 1
        worth_splitting = have > size if is_open_end else have >= 2 * size or have - size >= 128 * MIB
        if worth_splitting:
            chunks[index : index + 1] = [[size, requested], [have - size, None]]
        else:
            chunks[index] = [have, requested]
        return region, sum(size for size, _ in chunks[:index])

    def best(self, size):
        """The smallest free chunk that is large enough, of like ones the lowest; the open end only where no hole is."""
        fitting = [
            (self.partitioned and index == len(chunks) - 1, chunk[0], region, index)
            for region, chunks in enumerate(self.regions)
            for index, chunk in enumerate(chunks)
            if chunk[1] is None and chunk[0] >= size
        ]
        return min(fitting)[2:] if fitting else None

    def grow(self, size):
        available = (self.limit - sum(map(total, self.regions))) // 256 * 256
        if size > available:
            return False
        if size > self.next_region:
            while size > self.next_region:
                self.next_region *= 2
            self.regions.append([[min(self.next_region, available), None]])
        else:
            self.regions.append([[min(self.next_region, available), None]])
            self.next_region *= 2
        return True

    def free(self, region, offset):
        """Free one chunk and join what is free beside it by building the region anew."""
        at, joined = 0, []
        for size, held in self.regions[region]:
            requested = None if at == offset else held
            at += size
            if joined and joined[-1][1] is None and requested is None:
                joined[-1][0] += size
            else:
                joined.append([size, requested])
        self.regions[region] = joined

    def free_sizes(self):
        return sorted(size for chunks in self.regions for size, requested in chunks if requested is None)

    def in_use(self):
        return sum(size for chunks in self.regions for size, requested in chunks if requested is not None)

    def pool(self):
        return sum(map(total, self.regions))


def up(size):
    return (size + 255) // 256 * 256


def total(chunks):
    return sum(size for size, _ in chunks)
