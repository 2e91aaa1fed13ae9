"""Host memory that is held so that a report can be written when there is none left: let go of first, before anything else."""

from __future__ import annotations

import mmap
from typing import final

BALLAST_BYTES = 48 * 2**20


@final
class Ballast:
    """Address space that costs no memory until it is needed: nobody touches it.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int = BALLAST_BYTES) -> None:
        self._size = size
        self._held: list[mmap.mmap] = []  # one for each guard around the same code; appended and popped whole

    def hold(self) -> None:
        """Take it, where there is so much left."""
        try:
            self._held.append(mmap.mmap(-1, self._size))
        except (OSError, MemoryError, ValueError):  # there is little left already
            return

    def release(self) -> None:
        """Let go of what was taken last."""
        if self._held:
            self._held.pop().close()
