"""The simulator against a slow one that follows every layer, and what must hold for every run."""

from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.core.allreduce import sent_bytes, shots
from atoll.core.codec import Codec
from atoll.plan import cost
from atoll.plan.forecast import utilisation
from atoll.plan.line import GOODPUT, Line
from atoll.plan.method import Job, Layers, Method, Model
from atoll.plan.simulate import run_s, steady_wait_s, stops, time_of
from example_counts import examples
from oracle import layers as oracle

few = examples(25)

rates = st.sampled_from([400.0, 1e3, 3.3e3, 2e4, 1e6])
links = st.builds(Line, rates, st.sampled_from([0.0, 0.25, 3.0]))


@st.composite
def jobs(draw: st.DrawFn, *, same_delay: bool = False) -> Job:
    period, workers = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    delay = st.integers(0, period)
    whole_copies = st.integers(0, 200).map(lambda n: n * workers)  # so that no round's bytes are rounded up
    return Job(
        steps=draw(st.integers(0, 30)),
        step_s=draw(st.sampled_from([0.25, 1.0, 2.5])),
        period=period,
        payload_bytes=tuple(draw(st.lists(whole_copies, min_size=1, max_size=5))),
        delay=draw(delay if same_delay else delay | st.tuples(*[delay] * workers)),
        workers=workers,
        gradients=draw(st.sampled_from([False, False, False, True])),
        finish=False,
    )


def by_the_oracle(job: Job, link: Line) -> Any:
    """[steps + 1][workers], in exact numbers."""
    workers = job.workers
    delays = job.delay if isinstance(job.delay, tuple) else (job.delay,) * workers
    return oracle.ends(
        job.steps,
        Fraction(job.step_s),
        1 if job.gradients else job.period,
        (0,) * workers if job.gradients else delays,
        job.payload_bytes,
        Fraction(link.bits_per_s),
        Fraction(link.latency_s),
        copies=Fraction(sent_bytes(workers, workers), workers),
        crossings=shots(workers),
    )


def settled(
    job: Job, link: Line, layers: Layers | None = None, depth: int = 1, periods: tuple[int, int] = (100, 160)
) -> float:
    """Seconds of waiting in a period of a long run by the slow simulator; workers are alike, so that one is enough."""
    since, until = (n * job.period for n in periods)
    copies, delay = sent_bytes(job.workers, job.workers) / job.workers, 0 if job.gradients else job.delay
    ends: Any = oracle.ends(
        until, job.step_s, job.period, (delay,), job.payload_bytes, link.bits_per_s, link.latency_s, layers, depth,
        copies, shots(job.workers),
    )  # fmt: skip
    return float(ends[until][0] - ends[since][0]) / (periods[1] - periods[0]) - job.period * job.step_s


# ---------------------------------------------------------------------- the same as the slow way


@given(jobs(), links)
def test_every_stop_is_where_the_slow_way_has_it(job: Job, link: Line) -> None:
    expected = by_the_oracle(job, link)
    lane_of = {worker: lane for lane, workers in enumerate(job.lanes()) for worker in workers}
    waited = [0.0] * len(job.lanes())
    for stop in stops(job, link):
        for worker, lane in lane_of.items():
            assert stop.left_s[lane] == pytest.approx(float(expected[stop.step][worker]), rel=1e-9)
            assert stop.reached_s[lane] == pytest.approx(stop.step * job.step_s + waited[lane], rel=1e-9)
        waited = [left - stop.step * job.step_s for left in stop.left_s]
    assert time_of(job, link).total_s == pytest.approx(float(max(expected[-1])), rel=1e-9)


@given(jobs(), links)
def test_a_line_carries_one_thing_after_the_other(job: Job, link: Line) -> None:
    found = list(stops(job, link))
    assert [stop.step for stop in found] == sorted(stop.step for stop in found)
    for lane in range(len(job.lanes())):
        line = [stop.carried_s[lane] for stop in found if stop.sent]
        assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(line))
        assert all(stop.reached_s[lane] <= stop.left_s[lane] for stop in found)
        assert all(stop.carried_s[lane][0] >= stop.reached_s[lane] for stop in found if stop.sent)


@given(jobs(same_delay=True), links, st.lists(rates, min_size=1, max_size=3))
def test_many_rates_at_once_are_each_rate_alone(job: Job, link: Line, several: list[float]) -> None:
    for simulated in (steady_wait_s, run_s):
        together = simulated(job, np.array(several), latency_s=link.latency_s)
        for n, rate in enumerate(several):
            alone = simulated(job, np.array([rate]), latency_s=link.latency_s)
            assert together[n] == pytest.approx(alone[0], rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------------- once a run is under way


@st.composite
def choices(draw: st.DrawFn) -> tuple[Model, Method, int, float, float]:
    """A model, a method, workers, a rate around that which the line must carry, and a latency."""
    layers, gradients = draw(st.integers(1, 9)), draw(st.sampled_from([False, False, False, True]))
    period = 1 if gradients else draw(st.integers(1, 9))
    model = Model(parameters=draw(st.integers(1, 50)) * 4 * layers, layers=layers, step_s=1.0)
    method = Method(
        name="any",
        period=period,
        each=draw(st.none() | st.integers(1, min(3, layers))),
        delay=0 if gradients else draw(st.integers(0, period)),
        codec=Codec(draw(st.sampled_from(["fp32", "bf16"]))),
        gradients=gradients,
    )
    workers = draw(st.integers(2, 4))
    rate = cost.average_bits_per_s(model, method, workers) * draw(
        st.sampled_from([0.3, 0.9, 0.99, 1.0, 1.01, 1.3, 5.0])
    )
    return model, method, workers, rate, draw(st.sampled_from([0.0, 0.0, 0.3, 2.0]))


def busy(model: Model, method: Method, workers: int, rate: float, latency_s: float, layered: bool = False) -> float:
    return float(utilisation(model, method, workers, np.array([rate]), Line(rate, latency_s), layered=layered)[0])


@few
@given(choices(), st.booleans())
def test_steady_is_what_a_long_run_comes_to(choice: tuple[Model, Method, int, float, float], layered: bool) -> None:
    model, method, workers, rate, latency_s = choice
    layers = method.layers(model) if layered else None
    waited_s = settled(method.job(model, workers, 0), Line(rate, latency_s), layers, model.layers if layered else 1)
    rate = rate if layered else rate / GOODPUT
    at_last = method.period / (method.period + waited_s)
    assert busy(model, method, workers, rate, latency_s, layered) == pytest.approx(at_last, rel=2e-3)


def test_steady_is_exact_where_rounds_stay_away_for_several_periods() -> None:
    """Eager in four fragments repeats with five periods, and latency is more than one of them."""
    model = Model(parameters=10**9, layers=4, step_s=0.05)
    method = Method(name="eager", period=5, each=1, delay=5, codec=Codec("bf16"), eager=True)
    rate = 7.0767346529749195 * cost.average_bits_per_s(model, method, 4)
    for layered in (False, True):
        groups, depth = (method.layers(model), 4) if layered else (None, 1)
        waited_s = settled(method.job(model, 4, 0), Line(rate, 0.3), groups, depth)
        assert busy(model, method, 4, rate if layered else rate / GOODPUT, 0.3, layered) == pytest.approx(
            0.25 / (0.25 + waited_s), rel=1e-6
        )


@given(choices(), st.booleans())
def test_layer_by_layer_is_never_worse_than_after_the_step(
    choice: tuple[Model, Method, int, float, float], slow: bool
) -> None:
    model, method, workers, rate, latency_s = choice
    far = latency_s + (1.1 * method.period if slow else 0.0)
    assert busy(model, method, workers, rate, far, True) >= busy(model, method, workers, rate, far) - 1e-6


@given(choices(), st.integers(0, 300))
def test_a_run_at_many_rates_is_as_long_as_it_is_stop_by_stop(
    choice: tuple[Model, Method, int, float, float], steps: int
) -> None:
    """To less than a period: a line a little too slow is hidden by the delay for a while."""
    model, method, workers, rate, latency_s = choice
    job = method.job(model, workers, steps)
    exact = time_of(job, Line(rate, latency_s)).total_s
    ours = float(run_s(job, np.array([rate]), latency_s=latency_s)[0])
    if steps < 17 * method.period:
        assert ours == pytest.approx(exact, rel=1e-9)
    assert abs(ours - exact) <= (method.period + 2 * latency_s) * model.step_s + 1e-6


@few
@given(choices())
def test_the_closed_form_is_exact_for_rounds_apart_and_never_too_much(
    choice: tuple[Model, Method, int, float, float],
) -> None:
    model, method, workers, rate, latency_s = choice
    job, period, delay = method.job(model, workers, 0), method.period, method.delay
    together = [offset for offset, _ in groupby(job.schedules()[0].offset(f) for f in range(len(job.payload_bytes)))]
    found = float(steady_wait_s(job, np.array([rate]), latency_s=latency_s)[0])
    seen = settled(job, Line(rate, latency_s), periods=(4, 40))
    if cost.rounds_apart(period, delay, together):
        assert seen == pytest.approx(found, abs=1e-6)
    else:  # what is waited for in the end may be hidden by the delay for many periods: at most by all of it
        assert found <= seen + (delay + latency_s + period) / 36 + 1e-6


@given(choices(), st.floats(1.0, 30.0), st.booleans())
def test_bandwidth_never_lowers_utilisation(
    choice: tuple[Model, Method, int, float, float], faster: float, layered: bool
) -> None:
    model, method, workers, rate, latency_s = choice
    better = busy(model, method, workers, rate * faster, latency_s, layered)
    assert better >= busy(*choice, layered) - 1e-6


@given(choices(), st.integers(1, 9), st.booleans())
def test_delay_never_lowers_utilisation(
    choice: tuple[Model, Method, int, float, float], more: int, layered: bool
) -> None:
    model, method, workers, rate, latency_s = choice
    assume(not method.gradients)
    longer = replace(method, delay=min(method.delay + more, method.period))
    assert busy(model, longer, workers, rate, latency_s, layered) >= busy(*choice, layered) - 1e-6


@given(choices(), st.booleans())
def test_fewer_bits_never_lower_utilisation(choice: tuple[Model, Method, int, float, float], layered: bool) -> None:
    model, method, workers, rate, latency_s = choice
    smaller = replace(method, codec=Codec("e3m0"))
    assert busy(model, smaller, workers, rate, latency_s, layered) >= busy(*choice, layered) - 1e-6


@given(choices(), st.integers(2, 4), st.booleans())
def test_a_multiple_of_the_period_never_lowers_utilisation(
    choice: tuple[Model, Method, int, float, float], times: int, layered: bool
) -> None:
    """Sends are then further apart, every two of them; of other longer periods that is not true, as the next has it."""
    model, method, workers, rate, latency_s = choice
    assume(not method.gradients)
    longer = replace(method, period=times * method.period)
    assert busy(model, longer, workers, rate, latency_s, layered) >= busy(*choice, layered) - 1e-6


def test_a_longer_period_may_bring_two_large_fragments_together() -> None:
    """Seven fragments in four steps: 01 23 45 6; in five: 01 2 34 5 6."""
    payloads = (1, 1, 1, 125, 125, 1, 1)
    waits = []
    for period in (4, 5):
        job = Job(steps=0, step_s=1.1, period=period, payload_bytes=payloads, delay=1, workers=2)
        waits.append(float(steady_wait_s(job, np.array([1e3]))[0]))
    assert waits[0] == 0 < waits[1]
