"""When rounds pass a line: what must hold for every shape, without a clock."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.allreduce import sent_bytes, shots
from atoll.link.base import RoundId
from atoll.link.shaped import PACKET_BYTES, LineClock, Outage, Shape, Transmission
from atoll.plan.cost import transfer_s
from atoll.plan.line import Line as PlannedLine

whole = st.integers(0, 40)
rates = st.floats(1e3, 1e9) | st.just(math.inf)
outages = st.builds(Outage, start_s=st.floats(0, 100), length_s=st.floats(0, 30))
shapes = st.builds(
    Shape,
    bits_per_s=rates,
    latency_s=st.floats(0, 2),
    jitter_s=st.floats(0, 2),
    loss=st.just(0.0) | st.floats(0, 0.9),
    outages=st.lists(outages, max_size=4).map(tuple),
    seed=st.integers(0, 3),
)


class Sent(NamedTuple):
    at_s: float
    size: int
    shot_count: int


rounds = st.lists(st.builds(Sent, st.floats(0, 120), st.integers(0, 10**6), st.integers(0, 2)), max_size=8).map(sorted)


def carry(shape: Shape, sent: Sequence[Sent], joined_s: float = 0.0) -> list[Transmission]:
    line = LineClock(shape, joined_s)
    return [line.carry(*one, shape.rng(0, RoundId(step, 0))) for step, one in enumerate(sent)]


def no_later(early: Sequence[Transmission], late: Sequence[Transmission]) -> bool:
    pairs = zip(early, late, strict=True)
    return all(a.free_s <= b.free_s + 1e-9 and a.arrival_s <= b.arrival_s + 1e-9 for a, b in pairs)


@given(rates, st.floats(0, 10), st.integers(0, 10**9), st.integers(1, 20), st.floats(0, 1e4))
def test_one_round_on_a_free_line_takes_what_the_plan_says(
    bits_per_s: float, latency_s: float, payload_bytes: int, members: int, at_s: float
) -> None:
    shape = Shape(bits_per_s=bits_per_s, latency_s=latency_s)
    planned_s = transfer_s(payload_bytes, members, PlannedLine(bits_per_s, latency_s))
    size, shot_count = sent_bytes(payload_bytes, members), shots(members)
    assert carry(shape, [Sent(0.0, size, shot_count)])[0].arrival_s == planned_s
    assert carry(shape, [Sent(at_s, size, shot_count)])[0].arrival_s == pytest.approx(at_s + planned_s)


@given(shapes, rounds)
def test_rounds_pass_one_after_the_other_and_arrive_in_order(shape: Shape, sent: list[Sent]) -> None:
    transits = carry(shape, sent)
    for before, after in pairwise(transits):
        assert after.begin_s >= before.free_s and after.free_s >= before.free_s
        assert after.arrival_s >= before.arrival_s
    for one, transit in zip(sent, transits, strict=True):
        assert transit.begin_s >= one.at_s and transit.arrival_s >= one.at_s


@given(shapes, rounds)
def test_never_faster_than_the_rate_and_the_distance(shape: Shape, sent: list[Sent]) -> None:
    for one, transit in zip(sent, carry(shape, sent), strict=True):
        if one.shot_count:
            assert transit.free_s >= transit.begin_s + 8 * one.size / shape.bits_per_s - 1e-9
            assert transit.arrival_s >= transit.free_s + one.shot_count * shape.latency_s


@given(shapes, rounds)
def test_the_line_works_for_as_long_as_the_bits_take(shape: Shape, sent: list[Sent]) -> None:
    """A second way to the same number: of the time it is taken, subtract when it was out."""
    edges = sorted({edge for o in shape.outages for edge in (o.start_s, o.start_s + o.length_s)})
    for one, transit in zip(sent, carry(shape, sent), strict=True):
        if one.shot_count:
            cuts = [transit.begin_s, *(e for e in edges if transit.begin_s < e < transit.free_s), transit.free_s]
            works_s = sum(b - a for a, b in pairwise(cuts) if not out(shape, (a + b) / 2))
            mean_size = one.size / (1 - shape.loss)
            assert works_s == pytest.approx(8 * mean_size / shape.bits_per_s, rel=1e-9, abs=1e-9)


def out(shape: Shape, at_s: float) -> bool:
    return any(o.start_s <= at_s < o.start_s + o.length_s for o in shape.outages)


@given(shapes, rounds, st.floats(0, 1), st.floats(1, 100))
def test_a_better_line_is_never_later(shape: Shape, sent: list[Sent], less: float, more: float) -> None:
    worse = carry(shape, sent)
    assert no_later(carry(replace(shape, bits_per_s=shape.bits_per_s * more), sent), worse)
    assert no_later(carry(replace(shape, latency_s=shape.latency_s * less), sent), worse)
    assert no_later(carry(replace(shape, jitter_s=shape.jitter_s * less), sent), worse)
    assert no_later(carry(replace(shape, loss=shape.loss * less), sent), worse)
    assert no_later(carry(replace(shape, outages=shape.outages[1:]), sent), worse)


@given(shapes, rounds, st.integers(0, 10**6), st.floats(0, 5))
def test_smaller_rounds_and_earlier_ones_are_never_later(
    shape: Shape, sent: list[Sent], smaller: int, earlier_s: float
) -> None:
    assert no_later(carry(shape, [s._replace(size=max(0, s.size - smaller)) for s in sent]), carry(shape, sent))
    assert no_later(carry(shape, [s._replace(at_s=s.at_s - earlier_s) for s in sent]), carry(shape, sent))


@given(shapes, st.integers(0, 10**6), st.integers(1, 2), st.floats(0, 50), st.floats(0, 1000))
def test_an_outage_over_everything_delays_by_its_length(
    shape: Shape, size: int, shot_count: int, start_s: float, length_s: float
) -> None:
    sent = [Sent(start_s, size, shot_count), Sent(start_s, size, shot_count)]
    calm = carry(replace(shape, outages=()), sent)
    stormy = carry(replace(shape, outages=(Outage(start_s=start_s, length_s=length_s),)), sent)
    for before, after in zip(calm, stormy, strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s + length_s)


@given(st.lists(st.tuples(whole, whole), max_size=4), st.lists(whole, max_size=6).map(sorted), whole)
def test_outages_count_from_the_joining(gone: list[tuple[int, int]], opened: list[int], joined_s: int) -> None:
    """In whole seconds, so that nothing is rounded."""
    shape = Shape(bits_per_s=8, latency_s=3, outages=tuple(Outage(start_s=a, length_s=b) for a, b in gone))
    early = carry(shape, [Sent(at_s, 2, 1) for at_s in opened])
    late = carry(shape, [Sent(at_s + joined_s, 2, 1) for at_s in opened], joined_s)
    assert [transit.arrival_s + joined_s for transit in early] == [transit.arrival_s for transit in late]


@given(shapes, st.integers(0, 10**6), st.floats(0, 100))
def test_who_sends_nothing_waits_for_no_line(shape: Shape, size: int, at_s: float) -> None:
    alone, after = carry(shape, [Sent(at_s, size, 0), Sent(at_s, size, 1)])
    assert alone.arrival_s == at_s
    assert after.begin_s == at_s


@given(st.floats(0, 0.9), st.integers(1, 10**6), st.integers(0, 2**32))
def test_jitter_and_loss_are_within_their_bounds_and_repeat(jitter_s: float, size: int, seed: int) -> None:
    sent = [Sent(0.0, size, 2)] * 3
    plain = carry(Shape(latency_s=0.1, seed=seed), sent)
    shaken = carry(Shape(latency_s=0.1, jitter_s=jitter_s, seed=seed), sent)
    for a, b in zip(plain, shaken, strict=True):
        assert a.arrival_s <= b.arrival_s <= a.arrival_s + 2 * jitter_s + 1e-9
    assert shaken == carry(Shape(latency_s=0.1, jitter_s=jitter_s, seed=seed), sent)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.5])
def test_resent_packets_use_up_the_rate(loss: float) -> None:
    sent = LineClock(Shape(bits_per_s=8e3, loss=loss)).carry(1.0, 500, 1, random.Random(0))
    assert sent.free_s == pytest.approx(1 + 0.5 / (1 - loss))


@pytest.mark.parametrize("loss", [0.02, 0.5])
@pytest.mark.parametrize("packets", [1, 40])
def test_losses_come_as_often_as_packets_are_drawn_one_by_one(loss: float, packets: int) -> None:
    """Every repair takes a round trip; the slow way draws every packet until it gets through."""
    shape, rng, tries = Shape(latency_s=0.5, loss=loss), random.Random(1), 4000

    def one_by_one() -> int:
        return max(next(k for k in range(10**6) if rng.random() >= loss) for _ in range(packets))

    slow = sum(one_by_one() for _ in range(tries)) / tries
    arrivals = [LineClock(shape).carry(0.0, packets * PACKET_BYTES, 1, rng).arrival_s for _ in range(tries)]
    assert sum(arrivals) / tries - 0.5 == pytest.approx(slow, rel=0.1, abs=0.01)
