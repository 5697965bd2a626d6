"""What must hold for every run on every link, and a second, slower way to the same number."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.allreduce import sent_bytes
from atoll.core.schedule import Schedule
from atoll.plan.cost import transfer_s
from atoll.plan.line import Line
from atoll.plan.method import Job
from atoll.plan.simulate import time_of

links = st.builds(Line, st.floats(1e2, 1e7), st.sampled_from([0.0, 0.01, 3.0]))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    period, workers = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    delay = st.integers(0, period)
    return Job(
        steps=draw(st.integers(0, 70)),
        step_s=draw(st.floats(0.01, 2.0)),
        period=period,
        payload_bytes=tuple(draw(st.lists(st.integers(0, 5000), max_size=4))),
        delay=draw(delay | st.tuples(*[delay] * workers)),
        workers=workers,
        gradients=draw(st.booleans()),
    )


def no_more(a: float, b: float) -> bool:
    return a <= b * (1 + 1e-9)


def step_by_step(job: Job, link: Line) -> Fraction:
    """The same run one step and one worker at a time, in exact numbers: the last one's end."""
    fragments = range(len(job.payload_bytes))
    delays = job.delay if isinstance(job.delay, tuple) else (job.delay,) * job.workers
    period = 1 if job.gradients else job.period
    schedules = [Schedule(period, max(len(fragments), 1), 0 if job.gradients else d) for d in delays]
    now, free = [Fraction(0)] * job.workers, [Fraction(0)] * job.workers
    arrival: dict[tuple[int, int], Fraction] = {}
    latency = Fraction(transfer_s(0, job.workers, link))

    def send(step: int, fragment: int) -> None:
        carry = Fraction(8 * sent_bytes(job.payload_bytes[fragment], job.workers)) / Fraction(link.bits_per_s)
        for worker in range(job.workers):
            free[worker] = max(now[worker], free[worker]) + carry
        arrival[step, fragment] = max(free) + latency

    for step in range(1, job.steps + 1):
        now = [t + Fraction(job.step_s) for t in now]
        for fragment in fragments:
            if schedules[0].is_send(fragment, step):
                send(step, fragment)
        for worker, schedule in enumerate(schedules):
            due = [arrival[step - schedule.delay, f] for f in fragments if f in schedule.due(step).apply]
            now[worker] = max([now[worker], *due])
    end = max([*now, *arrival.values()])
    now = [end] * job.workers
    for fragment in fragments:
        if job.steps and not schedules[0].is_send(fragment, job.steps):
            send(job.steps, fragment)
    return max([end, *arrival.values()])


@given(jobs(), links)
def test_agrees_with_the_slow_way(job: Job, link: Line) -> None:
    assert time_of(job, link).total_s == pytest.approx(float(step_by_step(job, link)), rel=1e-9)


@given(jobs(), links)
def test_never_faster_than_compute_or_than_the_line(job: Job, link: Line) -> None:
    time = time_of(job, link)
    assert time.compute_s == job.steps * job.step_s
    assert time.total_s >= time.compute_s
    assert no_more(8 * time.bytes_per_worker / link.bits_per_s, time.total_s)
    assert time.total_s == time.compute_s + time.exposed_s
    assert 0 <= time.utilisation <= 1


@given(jobs(), links, st.floats(1.0, 1e3), st.floats(0.0, 1.0))
def test_a_better_link_is_never_slower(job: Job, link: Line, faster: float, nearer: float) -> None:
    better = Line(link.bits_per_s * faster, link.latency_s * nearer)
    assert no_more(time_of(job, better).total_s, time_of(job, link).total_s)
    assert time_of(job, better).bytes_per_worker == time_of(job, link).bytes_per_worker


@given(jobs(), links, st.integers(0, 12))
def test_a_longer_delay_is_never_slower(job: Job, link: Line, longer: int) -> None:
    delays = job.delay if isinstance(job.delay, tuple) else (job.delay,) * job.workers
    patient = replace(job, delay=tuple(min(delay + longer, job.period) for delay in delays))
    assert no_more(time_of(patient, link).total_s, time_of(job, link).total_s)
    assert time_of(patient, link).bytes_per_worker == time_of(job, link).bytes_per_worker


@given(jobs(), links)
def test_a_run_that_sends_gradients_hides_nothing(job: Job, link: Line) -> None:
    if not job.payload_bytes:
        return
    job = replace(job, gradients=True)
    alone = sum(transfer_s(size, job.workers, link) for size in job.payload_bytes)
    latencies = (len(job.payload_bytes) - 1) * transfer_s(0, job.workers, link)  # they travel at the same time
    assert time_of(job, link).exposed_s == pytest.approx(job.steps * (alone - latencies), rel=1e-9, abs=1e-9)
