"""Lasting: what is seen at each look enters; what stayed for long enough leaves, once, until it was gone as long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

_LOOKS = 5
_SHARE = 10  # of the steps that growth must last


@dataclass(slots=True)
class _Stay:
    step: int
    looks: int = 0
    missed: int = 0
    told: bool = False


@final
class Lasting:
    """Tells what is transient from what stays: five looks, and a tenth of ``steps``.

    Args:
        steps: `MonitorSettings.growth_steps`.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps // _SHARE)
        self._stays: dict[Hashable, _Stay] = {}

    def begun(self, step: int, present: set[Hashable]) -> set[Hashable]:
        """Take one look; those of ``present`` whose episode begins with it."""
        for key in list(self._stays):
            stay = self._stays[key]
            stay.missed = 0 if key in present else stay.missed + 1
            if stay.missed and (not stay.told or stay.missed >= _LOOKS):
                del self._stays[key]
        found: set[Hashable] = set()
        for key in present:
            stay = self._stays.setdefault(key, _Stay(step))
            stay.looks += 1
            if not stay.told and stay.looks >= _LOOKS and step - stay.step >= self._steps:
                stay.told = True
                found.add(key)
        return found

    def since(self, keys: set[Hashable]) -> int:
        """The step at which the first of them was seen."""
        return min(self._stays[key].step for key in keys)
