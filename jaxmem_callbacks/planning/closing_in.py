"""Policies in the order of the bytes that they keep, and what some of them need, enter; which to compile next for a room leaves.

What a step needs is the most of what is alive at several moments. With the bytes that are kept it rises slowly, as long as the
most is alive elsewhere, and then by a byte for each: never faster, and ever faster. So between two points that were compiled it
lies below the line from one to the other, and above the line down from the upper one that falls by a byte for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is to be filled, and with what.

    Attributes:
        bytes: What a step may need.
        kept: float64[places], ascending: bytes that each policy keeps on a device, as modelled.
        knee: Behind this place there is little left to win.
    """

    bytes: float
    kept: np.ndarray
    knee: int

    def next_places(self, needs: Mapping[int, int], between: tuple[int, int], most: int) -> list[int]:
        """The places to compile next: the last that fits for sure if needs rise as said above, and the last that may.

        Two compilers run at a time. So where the two are the same, the one behind it is asked too; and of an odd number of asks
        the first is the one that may alone, since what it needs tells more than any estimate. A single ask lies in the middle.
        But where only the first place is known, the last two asks begin with what fits for sure, alone: buffers are laid out
        anew, and where a byte takes a little more than one, the second is mended by the first.

        Args:
            needs: Bytes that the step needs at some places, the first among them.
            between: The last place that is known to fit, and the first that is known not to, or the number of places.
            most: How many may be asked.
        """
        (low, high), known = between, sorted(needs)
        if high - low < 2 or most < 1:  # noqa: PLR2004 - nothing lies between neighbours
            return []
        line = np.interp(self.kept, self.kept[known], [needs[place] for place in known])
        sure = self._last(line + np.maximum(self.kept - self.kept[known[-1]], 0), between)
        if high in needs:
            may = self._last(needs[high] - (self.kept[high] - self.kept), between)
        else:
            may = min(self.knee, high - 1) if self.knee > low else high - 1
            if most % 2 and most > 1:
                return [may]
        may = max(may, sure)
        if low == 0 and high not in needs and most <= 2:  # noqa: PLR2004 - the last two
            return [sure]
        if most == 1:
            return [(sure + may + 1) // 2]
        return [sure, may] if may > sure else [place for place in (sure, sure + 1) if place < high]

    def _last(self, needs: np.ndarray, between: tuple[int, int]) -> int:
        """The last place between both whose needs are within the room; at least the first."""
        places = np.arange(between[0] + 1, between[1])
        return int(places[needs[places] <= self.bytes].max(initial=between[0] + 1))
