"""Hysteresis: an episode begins at one level and ends at a lower one that lasts, so that noise tells nothing twice."""

from __future__ import annotations

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
        self.running = False

    def begins(self, level: float) -> bool:
        """Take the next level; True exactly when it begins an episode."""
        if self.running:
            self._low = 0 if level > self._release else self._low + 1
            self.running = self._low < self._quiet
            return False
        self._low = 0
        self.running = level > self._begin
        return self.running
