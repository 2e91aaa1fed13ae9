"""`Writer`: where records go; and one that collects them, for tests."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TypeVar, final

from jaxmem_callbacks.analysis.figures import Window
from jaxmem_callbacks.analysis.observation import Metrics
from jaxmem_callbacks.records import documents
from jaxmem_callbacks.records.arrays import ArrayCensus, HeapMap
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.records.runs import (
    AcrossProcesses,
    CheckpointSave,
    Dropped,
    MemoryEvent,
    Reading,
    Said,
    Unavailable,
)
from jaxmem_callbacks.records.traces import TracePart

EVENTS_TAG = "memory/events"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedTable(documents.Table):
    """A table of a step, for loggers.

    Attributes:
        tag: Where it is shown, such as ``memory/known_here``.
        step: The step that had just completed.
        time_s: Seconds since the epoch.
    """

    tag: str
    step: int
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A drawn figure.

    Attributes:
        tag: Where it is shown, such as ``memory/over_time``.
        step: The step that had just completed.
        time_s: Seconds since the epoch.
        png: The file's bytes.
        width: Pixels.
        height: Pixels.
    """

    tag: str
    step: int
    time_s: float
    png: bytes
    width: int
    height: int


Record = (
    Reading
    | Unavailable
    | Compilation
    | Metrics
    | Window
    | MemoryEvent
    | CheckpointSave
    | LoggedTable
    | Picture
    | PlanRecord
    | ArrayCensus
    | AcrossProcesses
    | HeapMap
    | TracePart
    | Dropped
    | Said
)


class Writer(abc.ABC):
    """Takes records and ignores the kinds it has no place for. Called from one thread at a time."""

    takes_pictures = False  # drawing costs a fraction of a second, so nothing is drawn for writers that show none

    @abc.abstractmethod
    def write(self, record: Record) -> None:
        """Write one record."""

    def flush(self) -> None:  # noqa: B027 - most writers keep nothing back
        """Hand over what is buffered."""

    def close(self) -> None:  # noqa: B027 - nor hold anything
        """Write what is left and let go of files; the writer is not used again."""


_Kind = TypeVar("_Kind")


@final
class CollectingWriter(Writer):
    """Keeps records in ``records``, oldest first.

    Example:
        >>> writer = CollectingWriter()
        >>> writer.events
        []
    """

    takes_pictures = True

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        """Keep the record."""
        self.records.append(record)

    def close(self) -> None:
        """Record that the monitor closed the writer."""
        self.closed = True

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """The records of one kind, oldest first."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def events(self) -> list[MemoryEvent]:
        """The events, oldest first."""
        return self.of(MemoryEvent)
