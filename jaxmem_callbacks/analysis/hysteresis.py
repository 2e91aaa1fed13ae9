"""Hysteresis: an episode begins at one level and ends at a lower one that lasts, so that noise tells nothing twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final


@final
class Episode:
    """Whether an episode is running.

    Args:
        begin: An episode begins when a level is above this.
        release: It ends when levels are at or under this; not above ``begin``.
        quiet: So many of them in a row. While a step is dispatched its donated state is counted nowhere for a moment.
    """

    def __init__(self, *, begin: float, release: float, quiet: int = 1) -> None:
        if release > begin:
            msg = f"release={release} is above begin={begin}: the episode would end before it begins. Give release <= begin."
            raise ValueError(msg)
        self._begin = begin
        self._release = release
        self._quiet = quiet
        self._low = 0  # levels in a row that were low enough to end it
        self._low_at: Hashable = None
        self.running = False

    def begins(self, level: float, at: Hashable = None) -> bool:
        """Take the next level; True exactly when it begins an episode.

        Args:
            level: It.
            at: The step, say: low levels of one step count once, however often it was looked at. None counts each.
        """
        if not self.running:
            self._low, self._low_at = 0, None
            self.running = level > self._begin
            return self.running
        if level > self._release:
            self._low, self._low_at = 0, None
        elif at is None or at != self._low_at:
            self._low, self._low_at = self._low + 1, at
        self.running = self._low < self._quiet
        return False
