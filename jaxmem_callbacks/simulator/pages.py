"""The driver's memory as a model: sizes enter, numbers of blocks leave. For the allocators ``platform`` and ``cuda_async``.

Modelled, not read from any source: the driver maps pages of 2 MiB wherever they are free, so that only capacity can fail. Blocks
smaller than a page share one, which is free again when the last of them is. The real pool of ``cuda_async`` may fail earlier.
"""

from __future__ import annotations

from typing import final

from jaxmem_callbacks.simulator.bfc import PAGE_BYTES

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
        """None: neither allocator tells one."""
        return None

    def largest_block_bytes(self) -> int:
        """The largest block that could be had: all that is free."""
        return self.limit_bytes - self.in_use_bytes

    def free_bytes(self) -> int:
        """All that is free."""
        return self.limit_bytes - self.in_use_bytes
