"""Figures in files that other tools read: CSV, and the text format of Prometheus."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import final

from jaxmem_callbacks.analysis.figures import RANGE, Window, figure_of
from jaxmem_callbacks.records.arguments import require_path
from jaxmem_callbacks.records.files import append_to, write_file
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.writers.protocol import Record, Writer

_HEAD = ("time_s", "step", "tag", "value")


@final
class CsvWriter(Writer):
    """Appends one row for each metric and window to a CSV file: ``time_s``, ``step``, ``tag``, ``value``.

    Seconds are since the epoch; the tag ends with the unit (docs/figures.md). Rows of a later run are appended.

    Args:
        path: The file, in a folder that is there; made at the first window.

    Raises:
        TypeError: no path.

    Example:
        >>> with MemoryMonitor(writer=CsvWriter("memory.csv")) as monitor:  # doctest: +SKIP
        ...     monitor(0)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = require_path("CsvWriter", "path", path, "memory.csv")

    def write(self, record: Record) -> None:
        """Append the figures of a window, by one call of the system."""
        if not isinstance(record, Window):
            return
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        file = append_to(self._path)
        try:
            if os.fstat(file).st_size == 0:
                rows.writerow(_HEAD)
            rows.writerows((f"{record.time_s:.3f}", record.step, *each) for each in record.scalars().items())
            data = text.getvalue().encode("utf-8", "backslashreplace")
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


@final
class PrometheusWriter(Writer):
    """Keeps the latest figures in a text file of Prometheus, for the textfile collector of its node exporter.

    The file is replaced whole at each window. Metrics are gauges such as ``jaxmem_memory_in_use_bytes``; what is counted in GiB
    or MiB elsewhere is in bytes here. ``jaxmem_events_total`` counts events by kind, and ``jaxmem_step`` is the latest step.

    Args:
        path: The file, whose name ends with ``.prom`` for that collector, in a folder that is there.

    Raises:
        TypeError: no path.

    Example:
        >>> with MemoryMonitor(writer=PrometheusWriter("jaxmem.prom")) as monitor:  # doctest: +SKIP
        ...     monitor(0)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = require_path("PrometheusWriter", "path", path, "jaxmem.prom")
        self._kinds: Counter[str] = Counter()

    def write(self, record: Record) -> None:
        """Replace the file by what a window holds; count an event."""
        if isinstance(record, MemoryEvent):
            self._kinds[record.kind] += 1
        elif isinstance(record, Window):
            write_file(self._path, prometheus_text(record.step, record.scalars(), self._kinds))


def prometheus_text(step: int, scalars: Mapping[str, float], kinds: Mapping[str, int]) -> str:
    """Figures in the text format of Prometheus.

    Args:
        step: The latest step.
        scalars: Tag -> value.
        kinds: Kind of event -> how many.
    """
    gauges: dict[str, float] = {"jaxmem_step": step}
    for tag, value in scalars.items():
        figure = figure_of(tag)
        plain = tag.removeprefix(RANGE)
        named = plain if figure is None else re.sub("_[gm]ib", "_bytes", plain, count=1)
        _ = gauges.setdefault(f"jaxmem_{_NO_NAME.sub('_', named)}", value * (1 if figure is None else figure.divisor))
    lines = [line for name, value in gauges.items() for line in (f"# TYPE {name} gauge", f"{name} {_spelled(value)}")]
    lines.append("# TYPE jaxmem_events_total counter")
    lines += [f'jaxmem_events_total{{kind="{kind}"}} {count}' for kind, count in kinds.items()]
    return "\n".join(lines) + "\n"


def _spelled(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
