"""Where a run's lines begin and end: what was running, on what, with which settings and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """The first line of a run, repeated at the head of every part of its file.

    Attributes:
        time_s: When the part was begun, in seconds since the epoch.
        part: Number of the part within the run, from 1.
        versions: Package -> version.
        devices: What the run had: ``platform``, ``kind``, ``count`` and ``processes``.
        settings: The monitor's settings by name.
    """

    time_s: float
    part: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str | int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The last line of a run that was closed; a run that was killed has none.

    Attributes:
        time_s: When, in seconds since the epoch.
    """

    time_s: float
