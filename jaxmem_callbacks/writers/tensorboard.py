"""TensorBoard: windows as scalars with a page of charts, events and tables as text, pictures as images; one event file a run.

It goes through tensorboardX's event file, not its SummaryWriter: that one moves every value through a `multiprocessing.Queue`,
which fixes the process's start method (a later `set_start_method` of the user's fails) and makes `flush` return before anything
is on disk. Tags: docs/figures.md lists them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import final

from tensorboardX.event_file_writer import EventsWriter

# protobuf makes these classes at import, so type checkers see none.
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import custom_scalars, text

from jaxmem_callbacks.analysis.figures import figure_of
from jaxmem_callbacks.analysis.timeseries import Window
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.terminal import printable
from jaxmem_callbacks.writers.layout import Layout, layout_of
from jaxmem_callbacks.writers.markdown import event_markdown, table_markdown
from jaxmem_callbacks.writers.protocol import EVENTS_TAG, Picture, Record, Table, Writer

# `data_class: DATA_CLASS_SCALAR`, a field that tensorboardX's copy of the format lacks. Without it TensorBoard's data server
# takes the metadata for an old one and drops the description.
_IS_SCALAR = b"\x20\x01"
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
        self._tags: set[str] = set()
        self._layout: Layout = {}

    def write(self, record: Record) -> None:
        """Write windows, events, tables and pictures."""
        match record:
            case Window():
                self._add_scalars(record)
            case MemoryEvent():
                self._add(_text(EVENTS_TAG, event_markdown(record)), record.step, record.time_s)
            case Table():
                self._add(_text(record.tag, table_markdown(record)), record.step, record.time_s)
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

    def _add_scalars(self, window: Window) -> None:
        scalars = {printable(tag): value for tag, value in window.scalars().items()}
        values = [
            Summary.Value(tag=tag, simple_value=value, metadata=None if tag in self._tags else _described(tag))
            for tag, value in scalars.items()
        ]
        self._add(Summary(value=values), window.step, window.time_s)
        if scalars.keys() <= self._tags:
            return
        self._tags.update(scalars)
        layout = layout_of(self._tags)
        if layout != self._layout:  # TensorBoard takes the latest one
            self._layout = layout
            self._add(custom_scalars(layout), window.step, window.time_s)

    def _add(self, summary: Summary, step: int, time_s: float) -> None:
        event = Event(wall_time=time_s or time.time(), summary=summary)
        event.step = max(step, 0)  # before the first step there is no number that TensorBoard could show
        self._file.write_event(event)


def _text(tag: str, words: str) -> Summary:
    """A page's text; the format takes no half of a surrogate pair."""
    return text(printable(tag), printable(words))


def _described(tag: str) -> SummaryMetadata | None:
    """What TensorBoard says of a tag beside its chart; it takes the first one it meets."""
    figure = figure_of(tag)
    if figure is None:
        return None
    end = tag.rpartition("/")[2]
    which = {"min": "Lowest of each window and all devices. ", "max": "Highest of each window and all devices. "}.get(
        end, ""
    )
    scalars = SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = SummaryMetadata(summary_description=f"{which}{figure.described()}", plugin_data=scalars)
    return SummaryMetadata.FromString(metadata.SerializeToString() + _IS_SCALAR)


def _image(picture: Picture) -> Summary:
    image = Summary.Image(
        width=picture.width, height=picture.height, colorspace=_RGBA, encoded_image_string=picture.png
    )
    return Summary(value=[Summary.Value(tag=picture.tag, image=image)])
