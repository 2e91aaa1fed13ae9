"""What a run prints: each event as one line of `logging`, and two lines at the end. And events handed to a callable.

The logger is ``jaxmem_callbacks``. Its level and handlers are the user's; where none shows a line it goes to stderr.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.runs import MemoryEvent, Reading
from jaxmem_callbacks.records.terminal import log_line
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.events import event_title
from jaxmem_callbacks.writers.protocol import Record, Writer

END = "the run ended"
# Figures that the last lines may name, the best first, each in words. Nothing is compared with what another source counts.
_PEAKS = (
    ("peak_bytes_since_start", "the allocator held {size} at most since the process began"),
    ("in_use_bytes", "the allocator held {size} at most"),
    ("live_array_bytes", "live arrays held {size} at most"),
)


@final
class LogWriter(Writer):
    """Logs events as they come, and at the end what the run's memory was.

    Args:
        logdir: The run's folder or its address, or None.
        limit_bytes: The preset's limit, or None.
        ends: Whether the last two lines are logged, which one process of a run does.
    """

    def __init__(self, logdir: Path | str | None = None, *, limit_bytes: int | None = None, ends: bool = True) -> None:
        self._logdir, self._preset_bytes, self._ends = logdir, limit_bytes, ends
        self._highs: dict[str, Reading] = {}
        self._limits: dict[str, int] = {}
        self._kinds: Counter[str] = Counter()
        self._step = -1

    def write(self, record: Record) -> None:
        """Log an event; learn from readings."""
        if isinstance(record, MemoryEvent):
            self._kinds[event_title(record.kind)] += 1
            what = f"{event_title(record.kind)} at step {record.step} ({record.device}): {record.message}"
            act = f" What to do: {record.action}" if record.action else ""
            # A failure's report has printed its sentence before it compiled remedies.
            log_line(logging.WARNING, f"{what}{act}", printed=record.kind == "out_of_memory", memory_event=record)
        elif isinstance(record, Reading):
            self._step = max(self._step, record.step)
            if record.limit_bytes is not None:
                self._limits[record.device] = record.limit_bytes
            for figure, _ in _PEAKS:
                size, known = getattr(record, figure), self._highs.get(figure)
                if size is not None and (known is None or size > getattr(known, figure)):
                    self._highs[figure] = record

    def close(self) -> None:
        """Log the last two lines, where there was a step."""
        if self._ends and self._step >= 0:
            for line in self._last_lines():
                log_line(logging.INFO, f"{END}: {line}")

    def _last_lines(self) -> Iterator[str]:
        count = self._kinds.total()
        kinds = ", ".join(f"{kind} {times}" for kind, times in self._kinds.items())
        events = f"{count} event{'' if count == 1 else 's'}" + (f": {kinds}" if kinds else "")
        yield f"{self._peak()}; {events}."
        if self._logdir is None:
            yield f"no files were asked for; {advise('monitor.call', arguments=_FOLDER)} keeps the run's."
        else:
            yield f"all of it is in {self._logdir}; `{advise('command.typed', typed=f'report {self._logdir}')}` shows it."

    def _peak(self) -> str:
        for figure, words in _PEAKS:
            high = self._highs.get(figure)
            if high is not None:
                size = int(getattr(high, figure))
                return f"{words.format(size=format_bytes(size))}, {self._of_limit(size, high.device)}"
        return "the peak is unknown, because no device's memory was read"

    def _of_limit(self, size: int, device: str) -> str:
        limit = min((each for each in (self._limits.get(device), self._preset_bytes) if each), default=None)
        if limit is None:
            return f"on {device}, whose limit is unknown"
        return f"{size / limit:.1%} of the limit of {format_bytes(limit)}, on {device}"


_FOLDER = "logdir='runs/a'"


@final
class EventCallback(Writer):
    """Hands events to a callable of the user's.

    Args:
        call: Takes a `MemoryEvent`.
    """

    def __init__(self, call: Callable[[MemoryEvent], object]) -> None:
        self._call = call

    def write(self, record: Record) -> None:
        """Hand over an event."""
        if isinstance(record, MemoryEvent):
            self._call(record)
