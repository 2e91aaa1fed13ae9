"""Heap maps on their way: taken on the thread that calls the hook, when one is due, and handed to the monitor's own thread.

probes/heap.py says why no other thread may ask for addresses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from jaxmem_callbacks.analysis.timeseries import PICTURES, Spans
from jaxmem_callbacks.callbacks.faults import Faults
from jaxmem_callbacks.probes.heap import HeapProbe
from jaxmem_callbacks.records.arrays import HeapMap
from jaxmem_callbacks.records.readings import Unavailable


@final
class HeapMaps:
    """The latest maps that were not collected yet.

    Args:
        every_s: Seconds between two that are taken by themselves, at first.
        faults: Told of a probe that raises.
    """

    def __init__(self, every_s: float, faults: Faults) -> None:
        self._spans = Spans(every_s, PICTURES)
        self._spans.begin(time.monotonic())
        self._faults = faults
        self._probe = HeapProbe()
        self._taken: tuple[HeapMap | Unavailable, ...] = ()

    def is_due(self) -> bool:
        """Whether the next call of the hook should take one; true once a span."""
        now = time.monotonic()
        over = self._spans.is_over(now)
        if over:
            self._spans.begin(now)
        return over

    def take(self, step: int) -> None:
        """Read the addresses now, on the caller's thread."""
        self._taken = tuple(self._faults.attempt("the heap map", self._probe.read, step, default=()))

    def collect(self) -> tuple[Sequence[HeapMap], Sequence[Unavailable]]:
        """What was taken since the last time: maps, and why there are none."""
        taken, self._taken = self._taken, ()
        maps = [each for each in taken if isinstance(each, HeapMap)]
        return maps, [each for each in taken if isinstance(each, Unavailable)]
