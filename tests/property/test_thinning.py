"""Thinning keeps what a curve must not lose, in bounded memory, whatever comes."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.report.lanes import Span
from atoll.watch.thinning import Series, Thinned, TimeBuckets, join_near

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan)), max_size=300)
MOST = st.sampled_from([2, 4, 10, 64])
SPANS = st.lists(st.tuples(st.floats(0, 1e4), st.floats(1e-3, 300)), max_size=120)


def spans_of(pairs: list[tuple[float, float]]) -> list[Span]:
    return sorted(Span(begin, begin + length) for begin, length in pairs)


@given(values=VALUES, most=MOST)
def test_a_series_is_bounded_and_keeps_order_mean_and_extremes(values: list[float | None], most: int) -> None:
    series = Series(most)
    for step, value in enumerate(values):
        series.add((step,), (value, None if value is None else -value))
    buckets = series.buckets()
    known = [value for value in values if value is not None and math.isfinite(value)]
    assert len(buckets) <= most
    assert len(buckets) >= min(len(values), most // 2), "no coarser than it must be"
    assert len({bucket.last[0] - bucket.first[0] for bucket in buckets[:-1]}) <= 1, "all are of one size but the last"
    places = [place for bucket in buckets for place in (bucket.first, bucket.last)]
    assert places == sorted(places)
    assert not values or (places[0], places[-1]) == ((0,), (len(values) - 1,))
    first, mirrored = ([bucket.spreads[n] for bucket in buckets] for n in range(2))
    assert sum(spread.known for spread in first) == len(known)
    assert math.isclose(sum(spread.total for spread in first), sum(known), abs_tol=1e-3)
    assert min((spread.low for spread in first), default=math.inf) == min(known, default=math.inf)
    assert max((spread.high for spread in first), default=-math.inf) == max(known, default=-math.inf)
    assert [spread.high for spread in mirrored] == [-spread.low for spread in first]


@given(values=VALUES, most=MOST)
def test_a_bucket_holds_the_points_between_its_ends(values: list[float | None], most: int) -> None:
    series = Series(most)
    for step, value in enumerate(values):
        series.add((step,), (value,))
    for bucket in series.buckets():
        inside = values[int(bucket.first[0]) : int(bucket.last[0]) + 1]
        known = [value for value in inside if value is not None and math.isfinite(value)]
        (spread,) = bucket.spreads
        assert (spread.low, spread.high) == (min(known, default=math.inf), max(known, default=-math.inf))
        assert (spread.mean is None) == (not known)


@given(count=st.integers(0, 700), most=MOST)
def test_thinned_items_are_bounded_even_and_end_with_the_newest(count: int, most: int) -> None:
    thinned: Thinned[int] = Thinned(most)
    for item in range(count):
        thinned.add(item)
    items = thinned.items()
    assert len(items) <= most + 1
    assert items == sorted(set(items))
    assert not count or (items[0], items[-1]) == (0, count - 1)
    assert len({b - a for a, b in pairwise(items[:-1])}) <= 1, "one stride but for the newest"
    assert len(items) >= min(count, most // 2)


@given(pairs=SPANS, most=MOST, begin=st.sampled_from([0.0, 1.7e9]))
def test_time_buckets_keep_all_time(pairs: list[tuple[float, float]], most: int, begin: float) -> None:
    buckets = TimeBuckets(most, begin, kinds=2)
    spans = spans_of(pairs)
    for span in spans:
        buckets.add(0, Span(begin + span.begin_s, begin + span.end_s))
    end = max((span.end_s for span in spans), default=0.0)
    shares, others = buckets.until(begin + end)
    assert len(shares) == len(others) <= most
    assert not any(others)
    widths = [min(buckets.bucket_s, end - n * buckets.bucket_s) for n in range(len(shares))]
    summed = sum(share * width for share, width in zip(shares, widths, strict=True))
    assert math.isclose(summed, sum(span.end_s - span.begin_s for span in spans), rel_tol=1e-5, abs_tol=1e-3)


def test_time_buckets_by_hand() -> None:
    buckets = TimeBuckets(4, 10.0, bucket_s=1.0)
    buckets.add(0, Span(9.0, 10.5))  # what is earlier is left out
    buckets.add(0, Span(11.5, 13.25))
    assert buckets.until(13.5) == [[0.5, 0.5, 1.0, 0.5]], "the last one is half over"
    buckets.add(0, Span(14.0, 14.5))
    assert (buckets.bucket_s, buckets.until(15.0)) == (2.0, [[0.5, 0.625, 0.5]])
    assert buckets.until(25.0) == [[0.5625, 0.125, 0.0, 0.0]], "and it widens as time goes on"


@pytest.mark.parametrize("span", [Span(math.nan, 3.0), Span(1.0, math.inf), Span(3.0, 1.0), Span(1.0, math.nan)])
def test_what_is_no_time_is_left_out(span: Span) -> None:
    buckets = TimeBuckets(4, 0.0)
    buckets.add(0, span)
    assert buckets.until(2.0) == [[0.0] * 4]
    assert buckets.until(math.nan) == [[]]


def test_a_time_beyond_all_measure_ends() -> None:
    buckets = TimeBuckets(4, 0.0)
    buckets.add(0, Span(0.0, 1e300))
    assert buckets.until(1e300)[0][0] == pytest.approx(1.0)


@given(pairs=SPANS, most=st.integers(1, 20))
def test_joined_spans_are_few_and_cover_all(pairs: list[tuple[float, float]], most: int) -> None:
    spans = spans_of(pairs)
    joined = join_near(spans, most)
    assert len(joined) <= most
    assert all(left.end_s < right.begin_s for left, right in pairwise(joined))
    assert all(any(j.begin_s <= span.begin_s and span.end_s <= j.end_s for j in joined) for span in spans)
    if spans:
        assert (joined[0].begin_s, joined[-1].end_s) == (spans[0].begin_s, max(span.end_s for span in spans))


def test_the_smallest_gaps_go_first() -> None:
    spans = [Span(0, 1), Span(1.1, 2), Span(5, 6), Span(6.5, 7)]
    assert join_near(spans, 4) == spans
    assert join_near(spans, 3) == [Span(0, 2), Span(5, 6), Span(6.5, 7)]
    assert join_near(spans, 2) == [Span(0, 2), Span(5, 7)]
    assert join_near(spans, 1) == [Span(0, 7)]
