"""Other processes, for tests that start and end them: whether one still does anything, and waiting for what they do."""

from __future__ import annotations

import time

import psutil
import pytest


def alive(process):
    """Whether a process still does anything; what is left of one whose parent died may wait for ever to be looked at."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, *, seconds=20.0):
    """The condition's first true value; a failure where it has none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail("it did not happen in time")
