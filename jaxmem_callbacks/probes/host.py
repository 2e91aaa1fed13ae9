"""Host memory: the process's resident bytes, as the operating system counts them.

Measured: resident set, all memory kinds of the process together; on CPU it includes the arrays. Cost: tens of microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import psutil

from jaxmem_callbacks.records.readings import Reading, Unavailable


@final
class HostProbe:
    """Reads the resident memory of this process."""

    def read(self, step: int) -> Sequence[Reading | Unavailable]:
        """One reading with the device label ``host``."""
        try:
            resident = psutil.Process().memory_info().rss
        except (psutil.Error, OSError) as error:  # a sandbox may hide /proc
            return [Unavailable(figure="host", device="host", reason=f"the operating system refuses: {error}")]
        return [Reading(source="host", device="host", step=step, time_s=time.time(), resident_bytes=resident)]
