"""Keeps growing series and spans of time in bounded memory; pure, without clocks and files."""

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from atoll.report.lanes import Span

T = TypeVar("T")
Point = tuple[tuple[float, ...], Sequence[float | None]]
"""A place, such as (step, seconds), and the values there."""


class Spread(NamedTuple):
    """Holds the values of neighbouring points as one."""

    known: int
    """Values that are finite."""
    total: float
    """Their sum."""
    low: float
    high: float

    @property
    def mean(self) -> float | None:
        """The mean value; None if there is none."""
        return self.total / self.known if self.known else None


class Bucket(NamedTuple):
    """Holds neighbouring points of a series as one."""

    first: tuple[float, ...]
    """The place of its first point, such as (step, seconds)."""
    last: tuple[float, ...]
    spreads: tuple[Spread, ...]
    """Of each value."""


class Series:
    """Keeps points as at most `most` buckets of equally many; neighbours join when all are full.

    Args:
        most: The largest number of buckets, an even number.
    """

    def __init__(self, most: int) -> None:
        assert most >= 2 and most % 2 == 0
        self._most = most
        self._size = 1  # points of a full bucket
        self._full: list[Bucket] = []
        self._open: list[Point] = []  # points of the next bucket

    def add(self, place: tuple[float, ...], values: Sequence[float | None]) -> None:
        """Adds a point after all others, with equally many values; None and those that are not finite are unknown."""
        self._open.append((place, values))
        if len(self._open) < self._size:
            return
        self._full.append(_bucket(self._open))
        self._open = []
        if len(self._full) == self._most:
            pairs = zip(self._full[::2], self._full[1::2], strict=True)
            self._full = [_joined(left, right) for left, right in pairs]
            self._size *= 2

    def buckets(self) -> list[Bucket]:
        """Returns the buckets in order; the last one may hold fewer points than the others."""
        return self._full + ([_bucket(self._open)] if self._open else [])


def _bucket(points: Sequence[Point]) -> Bucket:
    columns = zip(*(values for _, values in points), strict=True)
    return Bucket(points[0][0], points[-1][0], tuple(map(_spread, columns)))


def _spread(values: Sequence[float | None]) -> Spread:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return Spread(len(known), sum(known), min(known, default=math.inf), max(known, default=-math.inf))


def _joined(left: Bucket, right: Bucket) -> Bucket:
    pairs = zip(left.spreads, right.spreads, strict=True)
    both = (Spread(a.known + b.known, a.total + b.total, min(a.low, b.low), max(a.high, b.high)) for a, b in pairs)
    return Bucket(left.first, right.last, tuple(both))


class Thinned(Generic[T]):
    """Keeps every n-th item and the newest; n doubles when full.

    Args:
        most: The largest number of items besides the newest, an even number.
    """

    def __init__(self, most: int) -> None:
        assert most >= 2 and most % 2 == 0
        self._most = most
        self._stride = 1
        self._count = 0
        self._kept: list[T] = []
        self._newest: list[T] = []

    def add(self, item: T) -> None:
        """Adds an item after all others."""
        if self._count % self._stride == 0:
            if len(self._kept) == self._most:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self._kept.append(item)
        self._newest = [item] if self._count % self._stride else []
        self._count += 1

    def items(self) -> list[T]:
        """Returns the kept items in order."""
        return self._kept + self._newest


class TimeBuckets:
    """Adds up spans of time, by kind, in at most `most` buckets of equal length.

    Args:
        most: The largest number of buckets, an even number.
        begin_s: When the first one begins; what is earlier is left out.
        kinds: How many kinds of spans there are.
        bucket_s: The length of a bucket at first, in seconds; it doubles when time goes on beyond the last one.
    """

    def __init__(self, most: int, begin_s: float, kinds: int = 1, bucket_s: float = 0.5) -> None:
        assert most >= 2 and most % 2 == 0 and bucket_s > 0
        self._most = most
        self._begin_s = begin_s
        self.bucket_s = bucket_s
        """Seconds of a bucket now."""
        self._sums = [[0.0] * most for _ in range(kinds)]

    def add(self, kind: int, span: Span) -> None:
        """Adds a span of a kind; one that is not finite is left out."""
        begin, end = max(span.begin_s - self._begin_s, 0.0), span.end_s - self._begin_s
        if not begin < end < math.inf:
            return
        self._widen(end)
        sums, width = self._sums[kind], self.bucket_s
        first, last = int(begin // width), min(int(end // width), self._most - 1)
        if first >= last:
            sums[last] += end - begin
            return
        sums[first] += (first + 1) * width - begin
        for bucket in range(first + 1, last):
            sums[bucket] += width
        sums[last] += end - last * width

    def until(self, end_s: float) -> list[list[float]]:
        """Returns per kind, for each bucket up to a time, the summed seconds over those that have passed in it."""
        length = end_s - self._begin_s
        if not 0 < length < math.inf:
            return [[] for _ in self._sums]
        self._widen(length)
        count = min(self._most, math.ceil(length / self.bucket_s))
        passed = [self.bucket_s] * (count - 1) + [length - (count - 1) * self.bucket_s]
        return [[total / over for total, over in zip(sums, passed, strict=False)] for sums in self._sums]

    def _widen(self, length_s: float) -> None:
        """Doubles the length of the buckets until they reach that far."""
        while length_s > self._most * self.bucket_s:
            rest = [0.0] * (self._most // 2)
            self._sums = [[a + b for a, b in zip(s[::2], s[1::2], strict=True)] + rest for s in self._sums]
            self.bucket_s *= 2


def join_near(spans: ArrayLike, most: int) -> list[Span]:
    """Returns spans as at most `most`: those that are nearest to each other join.

    The first beginning and the last end stay, and no time that a span covers is lost.

    Args:
        spans: Their ends, of shape (count, 2), sorted by their beginnings.
        most: The largest number of spans, at least 1.
    """
    begins, ends = np.asarray(spans, dtype=np.float64).reshape(-1, 2).T
    if not begins.size:
        return []
    reached = np.maximum.accumulate(ends)
    gaps = begins[1:] - reached[:-1]
    widest = np.partition(gaps, len(gaps) - most)[len(gaps) - most] if len(gaps) >= most else 0.0  # of those to close
    cuts = np.flatnonzero(gaps > max(widest, 0.0))
    return [*map(Span, begins[[0, *(cuts + 1)]].tolist(), reached[[*cuts, -1]].tolist())]
