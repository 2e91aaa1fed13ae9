"""Layout of TensorBoard's Custom Scalars page: the scalars' tags enter, titled charts leave, each with its unit and source.

Charts only of what this platform reports, since the page shows an error in place of a chart without data.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from jaxmem_callbacks.analysis.figures import (
    BUDGET,
    DERIVED,
    ERROR,
    FIGURES,
    PLANNED,
    PRESET_LIMIT,
    PROCESSES,
    PROGRAM,
    Figure,
    over_processes,
)

Chart = tuple[str, list[str]]
Layout = dict[str, dict[str, Chart]]

_MULTILINE, _MARGIN = "Multiline", "Margin"
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
_RANGES = "Range of each window: min, mean, max"
_ALL = "All processes: min, mean, max"


def layout_of(tags: Collection[str]) -> Layout:
    """Category -> title -> chart, as ``tensorboardX.summary.custom_scalars`` takes it.

    A chart names all its lines, also those without data here: TensorBoard joins the layouts of several runs, and shows equal
    charts once.
    """
    found: Layout = {}
    for category, charts in _LINES.items():
        for title, lines in charts.items():
            patterns = [_pattern(tag) for tag in lines]
            if any(re.match(pattern, tag) for pattern in patterns for tag in tags):
                found.setdefault(category, {})[title] = (_MULTILINE, patterns)
    known = (*FIGURES, *DERIVED)
    for category, figures in ((_RANGES, known), (_ALL, tuple(map(over_processes, known)))):
        if ranged := dict(_ranges(tags, figures)):
            found[category] = ranged
    return found


def _ranges(tags: Collection[str], figures: Iterable[Figure]) -> Iterator[tuple[str, Chart]]:
    for figure in figures:
        ends = [f"{figure.tag}/min", f"{figure.tag}/max"]
        short = _SHORT.get(figure.tag.replace(PROCESSES, "memory/"))
        if short and all(tag in tags for tag in (figure.tag, *ends)):
            yield f"{short} [{figure.unit}], from {figure.source}", (_MARGIN, [figure.tag, *ends])


def _pattern(tag: str) -> str:
    """The regular expression of a tag, or of all that begin so, without the ends of ranges."""
    return rf"^{re.escape(tag)}(?!.*/(min|max)$)" if tag.endswith("/") else f"^{re.escape(tag)}$"
