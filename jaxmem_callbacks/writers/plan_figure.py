"""A plan's frontier as a figure: bytes against extra operations."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.plan_table import candidate_words, extra_share, extra_text
from jaxmem_callbacks.writers.protocol import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_DISTANCES = (3.0, 8.0, 15.0, 24.0, 36.0, 52.0, 72.0, 96.0, 130.0)
_DIRECTIONS = 24
_MARKER = 8.0  # half of what a marker covers
_GAP, _BESIDE = 1.5, 10.0  # between two labels, one above the other and side by side: more than a space between words
_CROSSED, _COVERED = 20.0, 60.0  # what a line behind a label, and a label behind a leader, are worth in distance


class Box(NamedTuple):
    """A rectangle with sides along the axes."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Whether both have an inner point in common."""
        apart_x = self.right <= other.left or other.right <= self.left
        return not (apart_x or self.top <= other.bottom or other.top <= self.bottom)

    def within(self, other: Box) -> bool:
        """Whether no part of it is outside the other."""
        inside_x = self.left >= other.left and self.right <= other.right
        return inside_x and self.bottom >= other.bottom and self.top <= other.top

    def grown(self, by: float, beside: float | None = None) -> Box:
        """The same with a margin; of another width at its left and right where that is given."""
        wide = by if beside is None else beside
        return Box(self.left - wide, self.bottom - by, self.right + wide, self.top + by)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Its point nearest to another point."""
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    field: Box,
    lines: Sequence[Box] = (),
) -> list[Box | None]:
    """A place for each label, near its point: inside the field, over no marker, neither over another label nor close to its side.

    Args:
        points: Where the markers are; the labels of the first are placed first.
        sizes: Width and height of each label.
        field: What labels must not leave.
        lines: Flat rectangles that labels should leave free where they can.

    Returns:
        For each point the label's box, or None where there is no room for it.
    """
    markers = [Box(x, y, x, y).grown(_MARKER) for x, y in points]
    placed: list[Box | None] = []
    for point, size in zip(points, sizes, strict=True):
        others = [box.grown(_GAP, _BESIDE) for box in placed if box is not None]
        free = [
            (distance + _worth(box, point, others, lines), number, box)
            for number, (distance, box) in enumerate(_around(point, size))
            if box.within(field) and not any(map(box.meets, (*markers, *others)))
        ]
        placed.append(min(free)[2] if free else None)
    return placed


def _around(point: tuple[float, float], size: tuple[float, float]) -> Iterator[tuple[float, Box]]:
    """Boxes around a point, the nearest first; up and to the right come before the others."""
    (x, y), (width, height) = point, size
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            angle = 2 * math.pi * turn / _DIRECTIONS + math.pi / 4
            along, up = math.cos(angle), math.sin(angle)
            # The side of the box that looks at the point is as far away from it as asked for.
            left = x + along * (distance + _MARKER) + (along - 1) / 2 * width
            bottom = y + up * (distance + _MARKER) + (up - 1) / 2 * height
            yield distance, Box(left, bottom, left + width, bottom + height)


def _worth(box: Box, point: tuple[float, float], others: Sequence[Box], lines: Sequence[Box]) -> float:
    """How bad a place is besides its distance."""
    near = box.nearest(*point)
    between = [
        (near[0] + part * (point[0] - near[0]), near[1] + part * (point[1] - near[1])) for part in (0.2, 0.4, 0.6, 0.8)
    ]
    covered = sum(any(other.nearest(*spot) == spot for spot in between) for other in others)
    return _CROSSED * sum(map(box.meets, lines)) + _COVERED * covered


TAG = "plan/frontier"
_SIZE, _DPI = (7.0, 4.7), 144
# Of the picture for TensorBoard, which shows 350 pixels of its width: letters are of twice the size that can be read.
_SMALL, _SMALL_DPI = (4.0, 4.0), 175
_POINTS = 72  # typographic points an inch, the unit of label places
_LETTERS = 8.5
_FEW = 8  # candidates whose labels also have their figures
_WIDE = 8  # from this ratio of bytes on the axis is logarithmic
_NEAR = (
    1 / 3,
    2,
)  # limits within this range of the smallest and the largest point are drawn; others would squeeze all points
_FITS, _TOO_MUCH, _CHOSEN, _LINE = "#1f77b4", "#d62728", "#2ca02c", "#9a9a9a"


def plan_figure(record: PlanRecord, frontier: Collection[Candidate]) -> Figure:
    """Extra operations in percent of the plain step over bytes on one device. Points that the compiler recomputes at are hollow.

    Returns:
        A figure of its own, not registered with ``pyplot``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes, places = _draw(figure, record, frontier)
    shown = [each for each, _ in places]
    _name_axes(axes, record, shown)
    chosen = record.candidates[record.chosen]
    figure.suptitle(_subject(record), fontsize=11, fontweight="bold")
    axes.set_title(f"{_verdict(record)} {candidate_words(chosen, record)}; {_figures(chosen, record)}", fontsize=10)
    _draw_legend(figure, _legend(record, shown), fontsize=9)
    _draw_labels(figure, axes, record, places, with_figures=len(shown) <= _FEW)
    return figure


def plan_picture(record: PlanRecord, frontier: Collection[Candidate], *, step: int, time_s: float) -> Picture:
    """The same in few words as PNG, for writers: of the points only the chosen one and the two ends have a name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=_SMALL, dpi=_SMALL_DPI, layout="constrained"), io.BytesIO()
    axes, places = _draw(figure, record, frontier)
    axes.tick_params(labelsize=_LETTERS)
    axes.set_xlabel("needed on one device", fontsize=_LETTERS)
    axes.set_ylabel("operations computed again", fontsize=_LETTERS)
    chosen = record.candidates[record.chosen]
    words = f"{_verdict(record)} {candidate_words(chosen, record)}\n{_figures(chosen, record)}"
    figure.suptitle(f"{_subject(record)}\n{words}", fontsize=_LETTERS, x=0.02, ha="left")
    _draw_legend(figure, _legend(record, [each for each, _ in places]), fontsize=_LETTERS)
    ends = (
        (places[0], min(places, key=lambda each: each[1]), min(places, key=lambda each: each[1][::-1]))
        if places
        else ()
    )
    _draw_labels(figure, axes, record, list(dict.fromkeys(ends)), with_figures=False)
    FigureCanvasAgg(figure).print_png(file)
    width, height = (round(side * _SMALL_DPI) for side in _SMALL)
    return Picture(tag=TAG, step=step, time_s=time_s, png=file.getvalue(), width=width, height=height)


def _draw(
    figure: Any, record: PlanRecord, frontier: Collection[Candidate]
) -> tuple[Any, list[tuple[Candidate, tuple[float, float]]]]:
    """Points, lines and scales; no words but the ticks'. Returns the axes, and what is drawn with its place."""
    axes = figure.add_subplot()
    unit = GIB if max(_needs(record), default=0) > 2 * GIB else MIB
    places = [(each, _place(each, record, unit)) for each in _shown(record)]
    _draw_frontier(axes, sorted(place for each, place in places if each in frontier))
    _draw_limits(axes, record, unit)
    for each, place in places:
        _draw_point(axes, each, record, place)
    _scale_axes(axes, record, unit)
    return axes, places


def _shown(record: PlanRecord) -> list[Candidate]:
    """What has a place in the picture: the chosen one first, so that its label has the most room."""
    chosen = record.candidates[record.chosen]
    rest = [each for each in record.candidates if each is not chosen]
    return [each for each in (chosen, *rest) if record.need_of(each) is not None]


def _place(candidate: Candidate, record: PlanRecord, unit: int) -> tuple[float, float]:
    return (record.need_of(candidate) or 0) / unit, 100 * (extra_share(candidate, record) or 0.0)


def _needs(record: PlanRecord) -> list[int]:
    """What the device must hold under each candidate that is drawn: resident bytes and the largest program."""
    return [record.need_of(each) or 0 for each in _shown(record)]


def _draw_frontier(axes: Any, line: Sequence[tuple[float, float]]) -> None:
    """In steps: between two points one gets what the smaller one costs."""
    if len(line) > 1:
        axes.step(*zip(*line, strict=True), where="post", color=_LINE, linewidth=1.4, zorder=1)


def _draw_point(axes: Any, candidate: Candidate, record: PlanRecord, place: tuple[float, float]) -> None:
    is_chosen = candidate is record.candidates[record.chosen]
    colour = _TOO_MUCH if candidate.fits is False else _CHOSEN if is_chosen else _FITS
    axes.scatter(
        *place,
        s=90 if is_chosen else 40,
        marker="D" if is_chosen else "o",
        edgecolors=colour,
        facecolors="white" if candidate.compiler_remat else colour,
        linewidths=1.6,
        zorder=3,
    )


def _draw_limits(axes: Any, record: PlanRecord, unit: int) -> None:
    """The budget, and what is usable where that is more; both only where points are near."""
    for limit, style, colour in ((record.budget_bytes, "--", _TOO_MUCH), (_more_usable(record), ":", "0.3")):
        if limit is not None and _is_near(limit, record):
            axes.axvline(limit / unit, color=colour, linestyle=style, linewidth=1.3, zorder=2)


def _shade_what_is_too_much(axes: Any, record: PlanRecord, unit: int) -> None:
    """After the range of the axis is settled: from the budget to its right edge."""
    if record.budget_bytes is not None and _is_near(record.budget_bytes, record):
        edges, left = axes.get_xlim(), record.budget_bytes / unit
        axes.axvspan(left, max(edges[1], left), color=_TOO_MUCH, alpha=0.05, linewidth=0, zorder=0)
        axes.set_xlim(edges)


def _more_usable(record: PlanRecord) -> int | None:
    """What is usable on the target, where it is not the budget itself."""
    return None if record.limit_bytes == record.budget_bytes else record.limit_bytes


def _is_near(limit: int, record: PlanRecord) -> bool:
    sizes = _needs(record)
    return bool(sizes) and _NEAR[0] * min(sizes) <= limit <= _NEAR[1] * max(sizes)


def _scale_axes(axes: Any, record: PlanRecord, unit: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    sizes = _needs(record) or [1]
    if max(sizes) > _WIDE * min(sizes):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    name = "GiB" if unit == GIB else "MiB"
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g} {name}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}%" if value else "0%"))
    axes.margins(x=0.16, y=0.2)
    # One point alone has no range, and a range of a few bytes has no readable ticks.
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.0), bottom=min(axes.get_ylim()[0], -0.2))
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.97 * right), max(right, 1.03 * left))
    _shade_what_is_too_much(axes, record, unit)
    axes.grid(visible=True, alpha=0.25)


def _name_axes(axes: Any, record: PlanRecord, shown: Sequence[Candidate]) -> None:
    where = "the attached device's compiler" if record.target == "attached" else f"the compiler for {record.target}"
    more = [f"{format_bytes(record.resident_bytes)} resident"] if record.resident_bytes else []
    more += ["the largest program"] if any(each.sets_need for each in shown) else []
    axes.set_xlabel(f"needed on one device, by {where}" + (f"; with {' and '.join(more)}" if more else ""))
    axes.set_ylabel("operations computed again, of the plain step's\n(FLOPs, counted in the trace)")


def _verdict(record: PlanRecord) -> str:
    return "nothing fits; nearest:" if record.candidates[record.chosen].fits is False else "chosen:"


def _subject(record: PlanRecord) -> str:
    devices = f", {record.device_count} devices" if record.device_count > 1 else ""
    place = f"the attached {record.platform}" if record.target == "attached" else record.target
    return f"{record.step} on {place}{devices}"


def _draw_legend(figure: Any, handles: Sequence[Any], *, fontsize: float) -> None:
    for columns in (2, 1):
        legend = figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=fontsize
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()  # what reaches over the edge is cut off


def _legend(record: PlanRecord, shown: Sequence[Candidate]) -> list[Any]:
    """What the marks mean, of those that are there; limits show their bytes, also where they are outside the picture."""
    from matplotlib.lines import Line2D

    def entry(label: str, colour: str, **style: Any) -> Any:
        return Line2D([], [], label=label, color=colour, **style)

    def mark(label: str, colour: str, shape: str = "o", fill: str | None = None) -> Any:
        return entry(label, colour, linestyle="", marker=shape, markerfacecolor=fill or colour)

    chosen = record.candidates[record.chosen]
    others = [each for each in shown if each is not chosen]
    handles = [mark("nearest", _TOO_MUCH, "D") if chosen.fits is False else mark("chosen", _CHOSEN, "D")]
    if any(each.fits is not False for each in others):
        handles.append(mark("fits" if record.budget_bytes is not None else "compiled", _FITS))
    if any(each.fits is False for each in others):
        handles.append(mark("too much", _TOO_MUCH))
    if any(each.compiler_remat for each in shown):
        handles.append(mark("hollow: the compiler itself recomputes there (estimated)", "0.3", fill="white"))
    if len(shown) > 1:
        handles.append(entry("least operations within so many bytes", _LINE))
    for what, limit, style, colour in (
        ("budget", record.budget_bytes, "--", _TOO_MUCH),
        ("usable", _more_usable(record), ":", "0.3"),
    ):
        if limit is not None:
            handles.append(entry(_limit_words(what, limit, record), colour, linestyle=style))
    missing = len(record.candidates) - len(shown)
    return [*handles, entry(f"not drawn: {missing} without a size", "none")] if missing else handles


def _limit_words(what: str, limit: int, record: PlanRecord) -> str:
    side = "right" if limit > max(_needs(record), default=0) else "left"
    return f"{what}: {format_bytes(limit)}" + ("" if _is_near(limit, record) else f", far to the {side}")


def _figures(candidate: Candidate, record: PlanRecord) -> str:
    return f"{format_bytes(record.need_of(candidate))}, {extra_text(candidate, record)}"


def _draw_labels(
    figure: Any,
    axes: Any,
    record: PlanRecord,
    shown: Sequence[tuple[Candidate, tuple[float, float]]],
    *,
    with_figures: bool,
) -> None:
    """Labels near their points, none over another, and a thin line to those that had to go further away."""
    texts = [
        f"{candidate_words(each, record)}\n{_figures(each, record)}" if with_figures else candidate_words(each, record)
        for each, _ in shown
    ]
    figure.draw_without_rendering()  # now the axes have their place
    figure.set_layout_engine("none")
    scale = _POINTS / figure.dpi
    sizes = [_size_of(axes, text, scale, _weight(each, record)) for text, (each, _) in zip(texts, shown, strict=True)]
    points = [tuple(axes.transData.transform(place) * scale) for _, place in shown]
    left, bottom, right, top = (side * scale for side in axes.get_window_extent().extents)
    field = Box(left + 2, bottom + 2, right - 2, top - 2)
    for text, (each, place), point, box in zip(
        texts, shown, points, place_labels(points, sizes, field, _lines_of(axes, scale)), strict=True
    ):
        if box is not None:
            _write_label(axes, text, place, point, box).set_fontweight(_weight(each, record))


def _weight(candidate: Candidate, record: PlanRecord) -> str:
    return "bold" if candidate is record.candidates[record.chosen] else "normal"


def _size_of(axes: Any, text: str, scale: float, weight: str) -> tuple[float, float]:
    drawn = axes.text(0, 0, text, fontsize=_LETTERS, fontweight=weight, transform=None)
    extent = drawn.get_window_extent()
    drawn.remove()
    return extent.width * scale, extent.height * scale


def _lines_of(axes: Any, scale: float) -> list[Box]:
    """The pieces of all drawn lines, as flat boxes; limits reach from edge to edge."""
    boxes: list[Box] = []
    for line in axes.lines:
        corners = line.get_transform().transform_path(line.get_path()).to_polygons(closed_only=False)
        for polygon in corners:
            spots = [(x * scale, y * scale) for x, y in polygon]
            for (x1, y1), (x2, y2) in itertools.pairwise(spots):
                boxes.append(Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)).grown(3.0))
    return boxes


def _write_label(axes: Any, text: str, place: tuple[float, float], point: Any, box: Box) -> Any:
    near = box.nearest(*point)
    far = max(abs(near[0] - point[0]), abs(near[1] - point[1])) > 14  # noqa: PLR2004 - points; nearer needs no line
    width, height = box.right - box.left, box.top - box.bottom
    leader = {
        "arrowstyle": "-",
        "color": "0.55",
        "linewidth": 0.7,
        "shrinkA": 0,
        "shrinkB": 4,
        "relpos": ((near[0] - box.left) / width, (near[1] - box.bottom) / height),
    }
    return axes.annotate(
        text,
        place,
        xytext=(box.left - point[0], box.bottom - point[1]),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=_LETTERS,
        arrowprops=leader if far else None,
    )
