"""Models of allocators: XLA's BFC allocator, and the driver's memory in blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import final

from jaxmem_callbacks.records.units import MIB

MIN_BYTES = 256  # kMinAllocationSize: every size is a multiple of it
BINS = 21  # kNumBins: bin b holds free blocks from 256 << b up to twice as much, the last one all larger ones
MOST_SLACK_BYTES = 128 * MIB  # a block is split where more than this would be wasted; max_internal_fragmentation_bytes_
FIRST_REGION_BYTES = 2 * MIB  # of a pool that grows; doubled with every region
PAGE_BYTES = 2 * MIB  # what the driver gives memory in
_BACK = 0.9  # kBackpedalFactor: how much less is asked for where the driver refuses a region

# A free block is one whole number, its size above its address: bins are then sorted by size and, of one size, by address.
_ADDRESS_BITS = 52  # no GPU's addresses are longer
_ADDRESS = (1 << _ADDRESS_BITS) - 1


def rounded(size: int) -> int:
    """The next multiple of 256 bytes."""
    return -(-size // MIN_BYTES) * MIN_BYTES


def bin_of(size: int) -> int:
    """Number of the bin that a free block of that many bytes belongs to."""
    number = (size >> 9).bit_length()
    return number if number < BINS else BINS - 1  # not min(): twice as fast, and each request asks several times


@final
class Blocks:
    """The blocks that a pool is divided into: best fit, blocks split where that is worth it, free neighbours merged.

    Args:
        partitioned: Keep the block that reaches a region's end out of the bins, and take from it last.

    Attributes:
        sizes: Of every block, free or not, by its address.
        free: Addresses of the free ones.
    """

    def __init__(self, *, partitioned: bool = False) -> None:
        self.sizes: dict[int, int] = {}
        self.free: set[int] = set()
        self._partitioned = partitioned
        self._bins: list[list[int]] = [[] for _ in range(BINS)]
        self._filled = 0  # a bit for each bin that holds something
        self._below: dict[int, int] = {}  # the block that ends where this one begins, 0 for none
        self._open_end = 0  # its address, where it is kept apart
        self._ends: set[int] = set()  # of regions

    def add_region(self, address: int, size: int) -> None:
        """Add memory that is free, apart from all other regions."""
        self._ends.add(address + size)
        self.sizes[address] = size
        self._below[address] = 0
        self._insert(address, size)

    def best_fit(self, size: int) -> int | None:
        """The smallest free block that is large enough, the lowest of equal ones; the open end last.

        Args:
            size: Bytes, rounded.
        """
        found = self._smallest(size)
        if found is not None:
            return self._bins[found[0]][found[1]] & _ADDRESS
        return self._open_end if self._open_end and self.sizes[self._open_end] >= size else None

    def take(self, size: int) -> int | None:
        """Take the best fit, and split it where the rest is worth a block. Its address, or None where no block is large enough.

        Args:
            size: Bytes, rounded.
        """
        found = self._smallest(size)
        if found is None:
            return self._take_from_open_end(size) if self._open_end else None
        number, at = found
        keys = self._bins[number]
        address = keys.pop(at) & _ADDRESS
        if not keys:
            self._filled ^= 1 << number
        self.free.discard(address)
        have = self.sizes[address]
        if have >= 2 * size or have - size >= MOST_SLACK_BYTES:
            self._split(address, have, size)
        return address

    def take_at(self, address: int, size: int) -> tuple[int, int]:
        """Take exactly these bytes.

        Returns:
            Address and size of the free block that held them.
        """
        hole = address if address in self.free else max(each for each in self.free if each <= address)
        have = self.sizes[hole]
        self._remove(hole)
        if address > hole:
            self._split(hole, have, address - hole)
            self._insert(hole, address - hole)
            self._remove(address)
        if hole + have > address + size:
            self._split(address, hole + have - address, size)
        return hole, have

    def give_back(self, address: int) -> tuple[int, int]:
        """Free a block and merge it with free neighbours.

        Returns:
            Address and size of the free block that it is now part of.
        """
        sizes, free, below = self.sizes, self.free, self._below
        size = sizes[address]
        after = address + size
        if after in free:
            self._remove(after)
            size += sizes.pop(after)
            del below[after]
        before = below[address]
        if before in free:
            self._remove(before)
            size += sizes[before]
            del sizes[address], below[address]
            address = before
        sizes[address] = size
        if address + size in sizes:
            below[address + size] = address
        self._insert(address, size)
        return address, size

    def largest_free_bytes(self) -> int:
        """The largest free block."""
        binned = self._bins[self._filled.bit_length() - 1][-1] >> _ADDRESS_BITS if self._filled else 0
        return max(binned, self.sizes[self._open_end]) if self._open_end else binned

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of each region, by address."""
        starts = sorted(address for address, below in self._below.items() if below == 0)
        return [(start, end - start) for start, end in zip(starts, sorted(self._ends), strict=True)]

    def bins(self) -> list[list[tuple[int, int]]]:
        """Size and address of the free blocks of each bin; the open end, where it is kept apart, is in none."""
        return [[(key >> _ADDRESS_BITS, key & _ADDRESS) for key in keys] for keys in self._bins]

    def _smallest(self, size: int) -> tuple[int, int] | None:
        """Bin of the best fit, and its place in that bin."""
        least, number = size << _ADDRESS_BITS, bin_of(size)
        filled = self._filled >> number << number
        while filled:
            lowest = filled & -filled
            number = lowest.bit_length() - 1
            keys = self._bins[number]
            at = bisect_left(keys, least)
            if at < len(keys):
                return number, at
            filled ^= lowest
        return None

    def _take_from_open_end(self, size: int) -> int | None:
        address, have = self._open_end, self.sizes[self._open_end]
        if have < size:
            return None
        self._open_end = 0
        self.free.discard(address)
        if have > size:
            self._split(address, have, size)
        return address

    def _split(self, address: int, have: int, size: int) -> None:
        """Leave ``size`` of a block and make a free one of the rest."""
        rest = address + size
        self.sizes[address] = size
        self.sizes[rest] = have - size
        self._below[rest] = address
        if address + have in self.sizes:
            self._below[address + have] = rest
        self._insert(rest, have - size)

    def _insert(self, address: int, size: int) -> None:
        self.free.add(address)
        # Requests come from the lower end only, so the open end is what reaches the region's end.
        if self._partitioned and address + size in self._ends:
            self._open_end = address
            return
        number = bin_of(size)
        insort(self._bins[number], size << _ADDRESS_BITS | address)
        self._filled |= 1 << number

    def _remove(self, address: int) -> None:
        self.free.discard(address)
        if address == self._open_end:
            self._open_end = 0
            return
        size = self.sizes[address]
        number = bin_of(size)
        keys = self._bins[number]
        del keys[bisect_left(keys, size << _ADDRESS_BITS | address)]
        if not keys:
            self._filled ^= 1 << number


@final
class Bfc:
    """One pool.

    Args:
        limit_bytes: What it may have.
        preallocate: Take all of it at the first allocation; else regions double from 2 MiB, and are never joined nor given back.
        partitioned: Keep the open end of a preallocated pool apart, as jaxlib 0.11 does: holes are used first, whatever their
            size, and what is cut from the open end is cut exactly. Nothing for pools that grow.
        device_bytes: What the driver has for it; None for as much as it asks for.
    """

    def __init__(
        self, limit_bytes: int, *, preallocate: bool = True, partitioned: bool = False, device_bytes: int | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._device_bytes = device_bytes
        self._region_bytes = rounded(limit_bytes if preallocate else min(limit_bytes, FIRST_REGION_BYTES))
        self._blocks = Blocks(partitioned=partitioned and preallocate)
        self._end = 0  # of the last region
        self.in_use_bytes = self.peak_in_use_bytes = self.pool_bytes = 0
        self._count = self._largest_alloc = self._peak_pool = self._driver_bytes = 0
        self._growth_bytes = self._growth()

    def allocate(self, size: int) -> int | None:
        """The address of a block, 0 for no bytes at all, None where there is none.

        Args:
            size: Bytes, not yet rounded.
        """
        if size == 0:
            return 0
        size = -(-size // MIN_BYTES) * MIN_BYTES
        address = self._blocks.take(size)
        if address is None:
            if not self._extend(size):
                return None
            address = self._blocks.take(size)
            assert address is not None, "a new region holds what it was made for"
        taken = self._blocks.sizes[address]
        self._count += 1
        self.in_use_bytes += taken
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, self.in_use_bytes)
        self._largest_alloc = max(self._largest_alloc, taken)
        return address

    def free(self, address: int) -> None:
        """Give a block back."""
        if address == 0:
            return
        self.in_use_bytes -= self._blocks.sizes[address]
        self._blocks.give_back(address)

    def largest_free_bytes(self) -> int:
        """The largest free block of the pool."""
        return self._blocks.largest_free_bytes()

    def largest_block_bytes(self) -> int:
        """The largest block that could be had: a free one, or what the pool may still grow by."""
        return max(self.largest_free_bytes(), self._growth_bytes)

    def free_bytes(self) -> int:
        """All that is free, what the pool may still grow by included."""
        return self.pool_bytes - self.in_use_bytes + self._growth_bytes

    def statistics(self) -> dict[str, int]:
        """What ``Device.memory_stats()`` reports of a GPU with jaxlib 0.11 or newer, under the same names."""
        return {
            "num_allocs": self._count,
            "bytes_in_use": self.in_use_bytes,
            "peak_bytes_in_use": self.peak_in_use_bytes,
            "largest_alloc_size": self._largest_alloc,
            "bytes_limit": self.limit_bytes,
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "largest_free_block_bytes": self.largest_free_bytes(),
            "pool_bytes": self.pool_bytes,
            "peak_pool_bytes": self._peak_pool,
        }

    def chunks(self) -> list[tuple[int, int, bool]]:
        """Address, size and whether it is in use, of all that the regions are divided into, by address."""
        blocks = self._blocks
        return [(address, blocks.sizes[address], address not in blocks.free) for address in sorted(blocks.sizes)]

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of each region, by address."""
        return self._blocks.regions()

    def bins(self) -> list[list[tuple[int, int]]]:
        """Size and address of the free blocks of each bin; the open end, where it is kept apart, is in none."""
        return self._blocks.bins()

    def _growth(self) -> int:
        """What a region could still be made of."""
        left = self.limit_bytes - self.pool_bytes
        if self._device_bytes is not None:
            left = min(left, (self._device_bytes - self._driver_bytes) // PAGE_BYTES * PAGE_BYTES)
        return max(left, 0) // MIN_BYTES * MIN_BYTES

    def _extend(self, size: int) -> bool:
        """Take a region that holds ``size`` from the driver."""
        available = (self.limit_bytes - self.pool_bytes) // MIN_BYTES * MIN_BYTES
        if size > available:
            return False
        doubled = False
        while size > self._region_bytes:
            self._region_bytes *= 2
            doubled = True
        region = min(self._region_bytes, available)
        while self._device_bytes is not None and _pages(region) > self._device_bytes - self._driver_bytes:
            region = min(rounded(int(region * _BACK)), region - MIN_BYTES)
            if region < size:
                return False
        if not doubled:
            self._region_bytes *= 2
        self.pool_bytes += region
        self._driver_bytes += _pages(region)
        self._peak_pool = max(self._peak_pool, self.pool_bytes)
        self._growth_bytes = self._growth()
        # A page between two regions, so that no block of one ever ends where the next one begins.
        address = _pages(self._end) + PAGE_BYTES
        self._end = address + region
        self._blocks.add_region(address, region)
        return True


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


_SMALL_BYTES = 512  # what cudaMalloc aligns to


@final
class Pages:
    """Pages of one device.

    Args:
        device_bytes: What there is of it.
        kept_bytes: Pages up to this many bytes stay with the pool when they are free; None for an allocator without a pool.
    """

    def __init__(self, device_bytes: int, *, kept_bytes: int | None = None) -> None:
        self.limit_bytes = device_bytes // PAGE_BYTES * PAGE_BYTES
        self._kept = kept_bytes
        self._blocks: dict[int, tuple[int, int]] = {}  # bytes of pages of its own, or the shared page
        self._shared: dict[int, int] = {}  # page -> blocks in it
        self._room = 0  # left in the page that is filled now
        self._page = self._number = 0
        self._count = self._largest_alloc = 0
        self.in_use_bytes = self.peak_in_use_bytes = self._pool = 0

    def allocate(self, size: int) -> int | None:
        """The number of a block, 0 for no bytes at all, None where the device is full."""
        if size == 0:
            return 0
        own = -(-size // PAGE_BYTES) * PAGE_BYTES if size >= PAGE_BYTES else 0
        small = -(-size // _SMALL_BYTES) * _SMALL_BYTES
        needs_page = not own and small > self._room
        more = own or (PAGE_BYTES if needs_page else 0)
        if self.in_use_bytes + more > self.limit_bytes:
            return None
        if needs_page:
            self._page += 1
            self._room = PAGE_BYTES
        if not own:
            self._room -= small
            self._shared[self._page] = self._shared.get(self._page, 0) + 1
        self._number += 1
        self._blocks[self._number] = (own, 0 if own else self._page)
        self._count += 1
        self._largest_alloc = max(self._largest_alloc, size)
        self.in_use_bytes += more
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, self.in_use_bytes)
        self._pool = max(self._pool, self.in_use_bytes)
        return self._number

    def free(self, address: int) -> None:
        """Give a block back."""
        if address == 0:
            return
        own, page = self._blocks.pop(address)
        if not own:
            self._shared[page] -= 1
            if self._shared[page]:
                return
            del self._shared[page]
            if page == self._page:
                self._room = 0
            own = PAGE_BYTES
        self.in_use_bytes -= own
        self._pool = max(self.in_use_bytes, min(self._pool, self._kept or 0))

    @property
    def pool_bytes(self) -> int | None:
        """What the pool holds of the device; None where there is no pool."""
        return None if self._kept is None else self._pool

    def largest_free_bytes(self) -> int | None:
        """None: neither allocator reports one."""
        return None

    def largest_block_bytes(self) -> int:
        """The largest block that could be had: all that is free."""
        return self.limit_bytes - self.in_use_bytes

    def free_bytes(self) -> int:
        """All that is free."""
        return self.limit_bytes - self.in_use_bytes
