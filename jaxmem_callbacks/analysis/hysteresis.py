"""Hysteresis: an episode begins at one level and ends at a lower one, so that noise between the two tells nothing twice."""

from __future__ import annotations

from typing import final


@final
class Episode:
    """Whether an episode is running.

    Args:
        begin: An episode begins when a level is above this.
        release: It ends when a level is at or under this; not above ``begin``.
    """

    def __init__(self, *, begin: float, release: float) -> None:
        if release > begin:
            msg = f"release={release} is above begin={begin}: the episode would end before it begins. Give release <= begin."
            raise ValueError(msg)
        self._begin = begin
        self._release = release
        self.running = False

    def begins(self, level: float) -> bool:
        """Take the next level; True exactly when it begins an episode."""
        if self.running:
            self.running = level > self._release
            return False
        self.running = level > self._begin
        return self.running
