"""What must hold for every period, number of fragments and delay."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.schedule import Schedule
from atoll.errors import ConfigError

schedules = st.integers(1, 60).flatmap(
    lambda period: st.builds(Schedule, st.just(period), st.integers(1, 12), st.integers(0, period))
)


@given(schedules)
def test_every_fragment_is_sent_once_a_period_after_a_full_first_one(schedule: Schedule) -> None:
    horizon = 4 * schedule.period + 2
    for fragment in range(schedule.fragments):
        sends = [t for t in range(1, horizon) if fragment in schedule.due(t).send]
        assert sends[0] == schedule.period + schedule.offset(fragment)
        assert all(b - a == schedule.period for a, b in pairwise(sends))


@given(schedules)
def test_every_send_is_applied_exactly_delay_steps_later(schedule: Schedule) -> None:
    horizon = 4 * schedule.period
    for fragment in range(schedule.fragments):
        sends = [t for t in range(1, horizon) if fragment in schedule.due(t).send]
        applies = [t for t in range(1, horizon + schedule.delay) if fragment in schedule.due(t).apply]
        assert applies == [t + schedule.delay for t in sends]


@given(schedules)
def test_sends_are_spread_evenly(schedule: Schedule) -> None:
    offsets = [schedule.offset(f) for f in range(schedule.fragments)] + [schedule.period]
    gaps = {b - a for a, b in pairwise(offsets)}
    assert offsets[0] == 0
    assert max(gaps) - min(gaps) <= 1


@given(schedules)
def test_a_fragment_is_never_sent_while_in_flight(schedule: Schedule) -> None:
    """At delay == period the next send and the apply fall on the same step, which is as close as it gets."""
    for fragment in range(schedule.fragments):
        in_flight = 0
        for t in range(1, 5 * schedule.period):
            due = schedule.due(t)
            if fragment in due.send:
                assert in_flight == 0 or (in_flight == 1 and fragment in due.apply)
                in_flight += 1
            in_flight -= fragment in due.apply
            assert in_flight in (0, 1)


def test_the_papers_example() -> None:
    schedule = Schedule(period=100, fragments=2, delay=1)
    assert [t for t in range(1, 351) if 0 in schedule.due(t).send] == [100, 200, 300]
    assert [t for t in range(1, 351) if 1 in schedule.due(t).send] == [150, 250, 350]
    assert schedule.due(101).apply == (0,)


@pytest.mark.parametrize(
    ("period", "fragments", "delay", "message"),
    [
        (0, 1, 0, "period must be a whole number of at least 1, got 0"),
        (5, 0, 0, "fragments must be a whole number of at least 1"),
        (5, 1, 6, r"delay must be between 0 and period \(5\), got 6"),
        (5, 1, -1, "delay must be a whole number of at least 0, got -1"),
    ],
)
def test_refusals(period: int, fragments: int, delay: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(period, fragments, delay)
