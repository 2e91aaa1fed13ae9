"""TensorBoard: scalars with a page of charts, texts and pictures."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import final

from tensorboardX.event_file_writer import EventsWriter

# protobuf makes these classes at import, so type checkers see none.
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import custom_scalars, text

from jaxmem_callbacks.analysis.figures import (
    BUDGET,
    DERIVED,
    ERROR,
    FIGURES,
    PLANNED,
    PRESET_LIMIT,
    PROGRAM,
    ByteUnit,
    Window,
    end_of,
    figure_of,
    in_unit,
    over_processes,
    range_tags,
    tag_in,
)
from jaxmem_callbacks.records.documents import Document, as_markdown
from jaxmem_callbacks.records.errors import printable
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.writers.events import event_document
from jaxmem_callbacks.writers.protocol import EVENTS_TAG, LoggedTable, Picture, Record, Writer

Chart = tuple[str, list[str]]
Layout = dict[str, dict[str, Chart]]

_MULTILINE, _MARGIN = "Multiline", "Margin"
# A line, and a band from a lower to an upper tag. TensorBoard draws all lines of a run in one colour, and a band in a lighter
# one. It shows an error where a run has only some of the three, or at other steps: an allocator without a limit has neither.
_USE = (
    "The limit, and below it as a band what is in use [GiB]",
    ("memory/limit_gib", "memory/headroom_gib", "memory/limit_gib"),
)
# Category -> title of a chart of several lines, and its tags; a tag that ends with a slash stands for all that begin so.
_LINES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Device memory": {
        "Against the limit, mean of each window [GiB]": (
            *("memory/limit_gib", PRESET_LIMIT, "memory/peak_since_start_gib", "memory/pool_gib"),
            *("memory/in_use_gib", "memory/live_arrays_gib"),
        ),
        "Room that is left [GiB]": ("memory/headroom_gib", "memory/largest_free_gib"),
        "Not explained, or outside JAX [GiB]": (
            *("memory/unattributed_gib", "memory/outside_pool_gib", "memory/device_used_gib", "memory/reserved_gib"),
        ),
    },
    "Programs": {
        "Need of each program by its compiler, beside what was planned [GiB]": (PROGRAM, PLANNED),
        "What it is judged by [GiB]": (BUDGET, PRESET_LIMIT),
        "Compiled over planned, less 1 [share]": (ERROR,),
    },
    "Host": {"Resident memory of the process [GiB]": ("memory/host_gib",)},
    "Training": {"The step's metrics, mean of each window": ("train/",)},
}
_SHORT = {
    "memory/in_use_gib": "In use",
    "memory/live_arrays_gib": "Live arrays",
    "memory/live_arrays_count": "Live arrays",
    "memory/headroom_gib": "Headroom",
    "memory/fragmentation_share": "Fragmentation",
    "memory/unattributed_gib": "Unattributed",
    "memory/device_used_gib": "Whole device, by the driver",
}
_UNITS: tuple[ByteUnit, ...] = ("GiB", "MiB")  # a run has one of them


def _range_charts() -> Iterator[tuple[str, str, list[str]]]:
    """Category, title and tags of each chart of a mean between the lowest and the highest."""
    known = [in_unit(figure, unit) for figure in (*FIGURES, *DERIVED) for unit in _UNITS]
    named = [(figure, _SHORT.get(figure.tag.replace("_mib", "_gib"))) for figure in known]
    for category, of in (("Range of each window", lambda figure: figure), ("All processes", over_processes)):
        for figure, short in ((of(figure), short) for figure, short in named if short):
            tags = [figure.tag, *range_tags(figure.tag)]
            yield f"{category}: min, mean, max", f"{short} [{figure.unit}], from {figure.source}", tags


_RANGE_CHARTS = tuple(_range_charts())


def layout_of(tags: Collection[str]) -> Layout:
    """Category -> title -> chart, as ``tensorboardX.summary.custom_scalars`` takes it.

    A chart names all its lines, also those without data here: TensorBoard joins the layouts of several runs, and shows equal
    charts once. Ranges are lines and no bands: the ends of a tag that begins to range later have other steps than the tag.
    """
    found: Layout = {}
    title, band = _USE
    for unit in _UNITS:
        if set(ends := [tag_in(tag, unit) for tag in band]) <= set(tags):
            found["Device memory"] = {title.replace("[GiB]", f"[{unit}]"): (_MARGIN, ends)}
    for category, charts in _LINES.items():
        for (title, lines), unit in itertools.product(charts.items(), _UNITS):
            patterns = [_pattern(tag_in(tag, unit)) for tag in lines]
            if any(re.match(pattern, tag) for pattern in patterns for tag in tags):
                found.setdefault(category, {})[title.replace("[GiB]", f"[{unit}]")] = (_MULTILINE, patterns)
    for category, title, lines in _RANGE_CHARTS:
        if all(tag in tags for tag in lines):
            found.setdefault(category, {})[title] = (_MULTILINE, list(map(_pattern, lines)))
    return found


def _pattern(tag: str) -> str:
    """The regular expression of a tag, or of all that begin so."""
    return f"^{re.escape(tag)}{'' if tag.endswith('/') else '$'}"


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
                self._add(
                    _text(EVENTS_TAG, as_markdown(event_document(record), escaped=False)), record.step, record.time_s
                )
            case LoggedTable():
                self._add(_text(record.tag, as_markdown(Document([record]), escaped=False)), record.step, record.time_s)
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


_ENDS = {"min": "Lowest of each window and all devices. ", "max": "Highest of each window and all devices. "}


def _described(tag: str) -> SummaryMetadata | None:
    """What TensorBoard shows of a tag beside its chart; it takes the first one it meets."""
    figure = figure_of(tag)
    if figure is None:
        return None
    which = _ENDS.get(end_of(tag), "")
    scalars = SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = SummaryMetadata(summary_description=f"{which}{figure.described()}", plugin_data=scalars)
    return SummaryMetadata.FromString(metadata.SerializeToString() + _IS_SCALAR)


def _image(picture: Picture) -> Summary:
    image = Summary.Image(
        width=picture.width, height=picture.height, colorspace=_RGBA, encoded_image_string=picture.png
    )
    return Summary(value=[Summary.Value(tag=picture.tag, image=image)])
