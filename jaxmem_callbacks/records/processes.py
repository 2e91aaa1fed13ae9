"""What the processes of one run said of their memory: the lowest, the mean and the highest of each figure, with the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrossFigure:
    """One figure over the processes, each of which told its lowest, mean and highest since it told before.

    Attributes:
        low: The lowest that any of them told; bytes, a number or a share, as the figure's name says.
        low_process: Whose it is.
        mean: Of the processes' means; whole bytes for bytes.
        high: The highest.
        high_process: Whose it is.
        high_device: The device that had it, where that process has several; else empty.
    """

    low: float
    low_process: int
    mean: float
    high: float
    high_process: int
    high_device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrossProcesses:
    """What process 0 knows of all processes at one moment.

    Attributes:
        step: The latest step of process 0; the others may be some steps before or behind.
        time_s: Seconds since the epoch.
        processes: How many the run has.
        silent: Those that told nothing for three rounds, or nothing at all; what they told is left out.
        figures: Figure, such as ``in_use_bytes``, over those that told it.
    """

    step: int
    time_s: float
    processes: int
    silent: tuple[int, ...] = ()
    figures: Mapping[str, AcrossFigure] = field(default_factory=dict)

    @property
    def heard(self) -> int:
        """How many told something."""
        return self.processes - len(self.silent)
