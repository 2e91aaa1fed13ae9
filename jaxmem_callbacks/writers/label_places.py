"""Where labels go: points, sizes of their labels and what must not be covered enter; a place for each label leaves, or None.

Lengths are in one unit of the caller's, y upwards. Greedy: the first label has the whole field, each later one what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
        """Whether no part of it lies outside the other."""
        inside_x = self.left >= other.left and self.right <= other.right
        return inside_x and self.bottom >= other.bottom and self.top <= other.top

    def grown(self, by: float, beside: float | None = None) -> Box:
        """The same with a margin; of another width at its left and right where that is said."""
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
            # The side of the box that looks at the point lies as far away from it as asked for.
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
