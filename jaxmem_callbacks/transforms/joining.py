"""The segments of a loss joined: what each keeps where all together may keep so many bytes.

Enters: one frontier a segment. Leaves: the frontier of them all, and for a share of its bytes what each segment keeps. Two
frontiers are joined at a time, every point of one with every point of the other; so many that nothing worth having lies between
the points that are cheapest for some price are joined by those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem_callbacks.transforms.keeping import Kept, Share

# Sums that are formed of two frontiers at most.
_MOST_SUMS = 2**16
# Points of a joined frontier, besides those that are cheapest for some price.
_MOST_BETWEEN = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Joined:
    """The frontier of some segments together.

    Attributes:
        bytes: int64[points], ascending: kept besides the values at the cuts.
        flops: float64[points]: operations computed again.
        work: float64[points], descending: these with what is moved again; see `work.py`.
        peaks: int64[points]: estimated bytes alive at most while one of the segments is differentiated.
        parts: The two that it was joined of; none for a single segment.
        chosen: int64[points, 2]: which point of each of these.
        values: What a single segment keeps at each point.
    """

    bytes: np.ndarray
    flops: np.ndarray
    work: np.ndarray
    peaks: np.ndarray
    parts: tuple[Joined, ...] = ()
    chosen: np.ndarray
    values: tuple[frozenset[Any], ...] = ()

    def kept(self, point: int) -> list[frozenset[Any]]:
        """What each segment keeps at one point, in their order."""
        if not self.parts:
            return list(self.values[point : point + 1])
        return [each for part, own in zip(self.parts, self.chosen[point], strict=True) for each in part.kept(int(own))]

    def shares(self) -> list[Share]:
        """The points as shares of what the last one keeps."""
        whole, segments = int(self.bytes[-1]), len(self.kept(0))
        return [
            Share(int(kept) / whole if whole else 0.0, int(kept), int(again), int(peak), segments, float(work))
            for kept, again, peak, work in zip(self.bytes, self.flops, self.peaks, self.work, strict=True)
        ]

    def keep_within(self, share: float) -> list[frozenset[Any]]:
        """What each segment keeps under one limit for all, as a share of what the last point keeps."""
        # Bytes are whole: a share that came from bytes means those bytes.
        limit = share * int(self.bytes[-1]) + 0.5
        return self.kept(int(np.searchsorted(self.bytes, limit, side="right")) - 1)


def join(frontiers: Sequence[Sequence[Kept]], trips: Sequence[int], peaks: Sequence[int] = ()) -> Joined:
    """The frontier of a whole loss: from nothing kept to hardly anything dear computed again.

    Of equal savings those of later segments come first: the backward pass frees them first.

    Args:
        frontiers: One a segment, in the order of the forward pass.
        trips: How often each segment runs, and so how often its kept values are stored.
        peaks: Estimated bytes alive while each is differentiated, where nothing is kept; where unknown 0.
    """
    known: dict[tuple[bytes, ...], np.ndarray] = {}
    alive = peaks or [0] * len(frontiers)
    whole = [_single(points, times, peak) for points, times, peak in zip(frontiers, trips, alive, strict=True)]
    while len(whole) > 1:
        pairs = [whole[place : place + 2] for place in range(0, len(whole), 2)]
        whole = [_both(*pair, known) if len(pair) > 1 else pair[0] for pair in pairs]
    return whole[0] if whole else _single([Kept(0, 0, frozenset(), 0.0, 0.0)], 1, 0)


def _single(points: Sequence[Kept], times: int, peak: int) -> Joined:
    bytes_ = np.array([point.bytes for point in points], np.int64) * times
    return Joined(
        bytes=bytes_,
        # What a segment keeps is there anyway while it is differentiated itself; a loop differentiates one step at a time.
        peaks=peak + (bytes_ if times > 1 else np.zeros_like(bytes_)),
        flops=np.array([point.flops for point in points], np.float64) * times,
        work=np.array([point.work for point in points], np.float64) * times,
        chosen=np.zeros((len(points), 0), np.int64),
        values=tuple(point.values for point in points),
    )


def _both(left: Joined, right: Joined, known: dict[tuple[bytes, ...], np.ndarray]) -> Joined:
    """Two frontiers joined; layers that were unrolled are alike, and so are the sums of theirs."""
    key = tuple(array.tobytes() for part in (left, right) for array in (part.bytes, part.work))
    if key not in known:
        enough = len(left.bytes) * len(right.bytes) <= _MOST_SUMS
        known[key] = _every_sum(left, right) if enough else _by_price(left, right)
    one, other = known[key].T
    return Joined(
        bytes=left.bytes[one] + right.bytes[other],
        flops=left.flops[one] + right.flops[other],
        work=left.work[one] + right.work[other],
        peaks=np.maximum(left.peaks[one], left.bytes[one] + right.peaks[other]),
        parts=(left, right),
        chosen=known[key],
    )


def _every_sum(left: Joined, right: Joined) -> np.ndarray:
    """The points of two frontiers whose sums no others beat; of too many those with a price, and some between."""
    one, other = (places.ravel() for places in np.indices((len(left.bytes), len(right.bytes))))
    bytes_, work = left.bytes[one] + right.bytes[other], left.work[one] + right.work[other]
    order = np.lexsort((one, work, bytes_))
    order = order[_falls(work[order])]
    if len(order) > _MOST_BETWEEN:
        bytes_, work = bytes_[order], work[order]
        bucket = (bytes_ - bytes_[0]) * _MOST_BETWEEN // max(int(bytes_[-1] - bytes_[0]), 1)
        last_of_bucket = np.r_[np.diff(bucket) != 0, True]
        last_of_bucket[_with_a_price(bytes_, work)] = True
        order = order[last_of_bucket]
    return np.stack([one[order], other[order]], 1)


def _falls(work: np.ndarray) -> np.ndarray:
    """Which are below all before them."""
    return np.r_[True, work[1:] < np.minimum.accumulate(work)[:-1]]


def _by_price(left: Joined, right: Joined) -> np.ndarray:
    """The points with a price, from one to the next along that frontier where a byte saves more."""
    hulls = [_with_a_price(part.bytes, part.work) for part in (left, right)]
    gains = [
        -np.diff(part.work[hull]) / np.diff(part.bytes[hull]) for part, hull in zip((left, right), hulls, strict=True)
    ]
    is_left = np.repeat([True, False], [len(each) for each in gains])
    steps = is_left[np.lexsort((is_left, -np.concatenate(gains)))]
    taken = np.r_[0, np.cumsum(steps)]
    return np.stack([hulls[0][taken], hulls[1][np.arange(len(taken)) - taken]], 1)


def _with_a_price(bytes_: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Places of the points that are cheapest for some price of a byte: the lower convex hull."""
    hull: list[int] = []
    kept, again = bytes_.tolist(), work.tolist()
    for place in range(len(kept)):
        while len(hull) > 1:
            before, last = hull[-2:]
            rise = (again[last] - again[before]) * (kept[place] - kept[before])
            if rise <= (again[place] - again[before]) * (kept[last] - kept[before]):
                break
            hull.pop()
        hull.append(place)
    return np.array(hull)
