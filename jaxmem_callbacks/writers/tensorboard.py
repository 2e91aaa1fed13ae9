"""TensorBoard: windows as scalars, events and tables as text, pictures as images; one event file a run.

It goes through tensorboardX's event file, not its SummaryWriter: that one moves every value through a `multiprocessing.Queue`,
which fixes the process's start method (a later `set_start_method` of the user's fails) and makes `flush` return before anything
is on disk. Tags: `memory/...` and `train/...` (scalars), `memory/events`, `memory/known_here` (text), `memory/over_time` (image).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import final

from tensorboardX.event_file_writer import EventsWriter

# protobuf makes these classes at import, so type checkers see none.
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import text

from jaxmem_callbacks.analysis.windows import Window
from jaxmem_callbacks.records.events import MemoryEvent
from jaxmem_callbacks.writers.markdown import event_markdown, table_markdown
from jaxmem_callbacks.writers.protocol import EVENTS_TAG, Picture, Record, Table, Writer

_RGBA = 4  # TensorBoard's number for the colours of a PNG with transparency


@final
class TensorBoardWriter(Writer):
    """Writes one event file.

    Args:
        folder: Where the file is made; it must exist.
        run_id: Ends the file's name, so that two runs that start in the same second do not share one.
    """

    takes_pictures = True

    def __init__(self, folder: Path, run_id: str) -> None:
        self._file = EventsWriter(str(folder / "events"), filename_suffix=f".{run_id}")

    def write(self, record: Record) -> None:
        """Write windows, events, tables and pictures."""
        match record:
            case Window():
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in record.scalars().items()]
                self._add(Summary(value=values), record.step, record.time_s)
            case MemoryEvent():
                self._add(text(EVENTS_TAG, event_markdown(record)), record.step, record.time_s)
            case Table():
                self._add(text(record.tag, table_markdown(record)), record.step, record.time_s)
            case Picture():
                self._add(_image(record), record.step, record.time_s)
            case _:
                pass

    def flush(self) -> None:
        """Put everything written so far on disk."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _add(self, summary: Summary, step: int, time_s: float) -> None:
        event = Event(wall_time=time_s or time.time(), summary=summary)
        event.step = max(step, 0)  # before the first step there is no number that TensorBoard could show
        self._file.write_event(event)


def _image(picture: Picture) -> Summary:
    image = Summary.Image(
        width=picture.width, height=picture.height, colorspace=_RGBA, encoded_image_string=picture.png
    )
    return Summary(value=[Summary.Value(tag=picture.tag, image=image)])
