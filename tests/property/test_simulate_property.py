"""The event model against a slow one in exact numbers, and what must hold for every run."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from amount import examples
from atoll.core.allreduce import sent_bytes
from atoll.core.codec import Codec
from atoll.plan import cost, steady
from atoll.plan.job import Job, stops, time_of
from atoll.plan.lines import Array, Place
from atoll.plan.link import GOODPUT, Link
from atoll.plan.method import Method, Model
from atoll.plan.outlook import steady_utilisation
from atoll.plan.simulate import Layers, Luck, Simulated, simulate
from oracle import layers as oracle

few = examples(25)

# Odd, so that nothing begins at the very moment of an outage: there the exact oracle and floats may disagree.
times = st.integers(0, 40).map(lambda quarters: quarters / 4 + 0.0712345)
rates = st.sampled_from([400.0, 1e3, 3.3e3, 2e4, 1e6])
latencies = st.sampled_from([0.0, 0.25, 3.0])


@st.composite
def outages(draw: st.DrawFn) -> tuple[tuple[float, float], ...]:
    edges = sorted(draw(st.lists(times, max_size=4, unique=True)))
    return tuple(zip(edges[0::2], edges[1::2], strict=False))


places = st.builds(
    Place,
    up_bits_per_s=rates,
    down_bits_per_s=rates,
    latency_s=latencies,
    pace=st.sampled_from([0.5, 1.0, 1.7]),
    outages=outages(),
)
even_places = st.builds(lambda rate, s: Place(up_bits_per_s=rate, down_bits_per_s=rate, latency_s=s), rates, latencies)


@st.composite
def jobs(draw: st.DrawFn, *, same_delay: bool = False, alone: bool = True) -> Job:
    period, workers = draw(st.integers(1, 7)), draw(st.integers(1 if alone else 2, 5))
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


@st.composite
def layered(draw: st.DrawFn, job: Job) -> Layers | None:
    """Every layer to one of the fragments, in any order; or none: after the step."""
    if draw(st.booleans()):
        return None
    order = draw(st.permutations(range(1, len(job.payload_bytes) + draw(st.integers(0, 3)) + 1)))
    return tuple(tuple(order[f :: len(job.payload_bytes)]) for f in range(len(job.payload_bytes)))


@st.composite
def runs(draw: st.DrawFn, place: st.SearchStrategy[Place] = places) -> tuple[Job, list[Place], Layers | None]:
    job = draw(jobs())
    return job, draw(st.lists(place, min_size=job.workers, max_size=job.workers)), draw(layered(job))


def by_the_oracle(job: Job, places: list[Place], layers: Layers | None) -> Array:
    """[steps + 1, workers]."""
    workers = job.workers
    delays = job.delay if isinstance(job.delay, tuple) else (job.delay,) * workers
    found: Any = oracle.ends(
        job.steps,
        job.step_s,
        1 if job.gradients else job.period,
        (0,) * workers if job.gradients else delays,
        job.payload_bytes,
        [(p.up_bits_per_s, p.down_bits_per_s, p.latency_s, p.pace, p.outages if workers > 1 else ()) for p in places],
        layers,
        max(layer for group in layers for layer in group) if layers else 1,
        Fraction(sent_bytes(workers, workers), workers),  # copies of a payload that a worker sends
        0 if workers == 1 else 1 if workers <= 3 else 2,
    )
    return np.array([[float(at) for at in step] for step in found])


def close(run: Simulated, expected: Array) -> bool:
    return bool(np.allclose(run.ends_s[:, :, 0], expected, rtol=1e-9, atol=1e-9))


# ---------------------------------------------------------------------- the same as the slow way


@given(runs())
def test_unequal_workers_as_the_slow_way_has_them(run: tuple[Job, list[Place], Layers | None]) -> None:
    job, places, layers = run
    assert close(simulate(job, places, layers=layers), by_the_oracle(job, places, layers))


@given(jobs(), even_places, st.data())
def test_equal_workers_as_the_slow_way_has_them(job: Job, place: Place, data: st.DataObject) -> None:
    layers = data.draw(layered(job))
    assert close(simulate(job, [place], layers=layers), by_the_oracle(job, [place] * job.workers, layers))


@given(jobs(same_delay=True), even_places, st.lists(rates, min_size=1, max_size=3), st.data())
def test_many_rates_at_once_are_each_rate_alone(
    job: Job, place: Place, several: list[float], data: st.DataObject
) -> None:
    layers = data.draw(layered(job))
    together = simulate(job, [place], layers=layers, rates=several)
    for n, rate in enumerate(several):
        alone = simulate(job, [replace(place, up_bits_per_s=rate, down_bits_per_s=rate)], layers=layers)
        assert np.array_equal(together.ends_s[:, :, n], alone.ends_s[:, :, 0])


@given(jobs(), even_places)
def test_after_the_step_it_is_the_report_s_own_model(job: Job, place: Place) -> None:
    link = Link(place.up_bits_per_s, place.latency_s)
    run = simulate(job, [place])
    assert run.ends_s[-1].max() == pytest.approx(time_of(job, link).total_s, rel=1e-9)
    assert run.sent_bytes[0] == pytest.approx(time_of(job, link).bytes_per_worker)
    lane_of = {worker: lane for lane, workers in enumerate(job.lanes()) for worker in workers}
    for stop in stops(job, link):
        for row in range(run.ends_s.shape[1]):
            assert run.ends_s[stop.step, row, 0] == pytest.approx(stop.left_s[lane_of[row]], rel=1e-9)


@given(runs())
def test_spans_fill_a_worker_s_time(run: tuple[Job, list[Place], Layers | None]) -> None:
    job, places, layers = run
    result = simulate(job, places, layers=layers, record=True)
    for worker in range(result.ends_s.shape[1]):
        mine = sorted(s for s in result.spans if s.worker == worker and s.kind != "carrying")
        assert sum(s.end_s - s.begin_s for s in mine) == pytest.approx(result.ends_s[-1, worker, 0], abs=1e-9)
        line = sorted((s.begin_s, s.end_s) for s in result.spans if s.worker == worker and s.kind == "carrying")
        assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(line))


# ---------------------------------------------------------------------- bounds


@given(runs())
def test_never_faster_than_computing_or_than_the_line(run: tuple[Job, list[Place], Layers | None]) -> None:
    job, places, layers = run
    result = simulate(job, places, layers=layers)
    assert (result.ends_s[-1, :, 0] >= result.computed_s[-1] - 1e-9).all()
    for worker in range(result.ends_s.shape[1]):
        delay = job.delay if isinstance(job.delay, int) else job.delay[worker]
        back = job.steps - (1 if layers else 0) - (0 if job.gradients else delay)  # what was sent by then is there
        arrived = simulate(replace(job, steps=max(back, 0)), places, layers=layers).sent_bytes
        here = worker if len(arrived) > 1 else 0
        assert 8 * arrived[here] / places[worker].up_bits_per_s <= result.ends_s[-1, worker, 0] + 1e-6


# ---------------------------------------------------------------------- what helps never harms


@given(runs(), st.floats(1.0, 50.0))
def test_more_bandwidth_never_delays(run: tuple[Job, list[Place], Layers | None], faster: float) -> None:
    job, places, layers = run
    better = [
        replace(p, up_bits_per_s=p.up_bits_per_s * faster, down_bits_per_s=p.down_bits_per_s * faster) for p in places
    ]
    before, after = (simulate(job, lines, layers=layers).ends_s for lines in (places, better))
    assert (after[..., 0] <= np.broadcast_to(before[..., 0], after[..., 0].shape) + 1e-9).all()


@given(runs(), st.floats(0.0, 1.0))
def test_fewer_bits_and_less_latency_never_delay(run: tuple[Job, list[Place], Layers | None], part: float) -> None:
    job, places, layers = run
    smaller = replace(job, payload_bytes=tuple(int(size * part) for size in job.payload_bytes))
    nearer = [replace(p, latency_s=p.latency_s * part) for p in places]
    before = simulate(job, places, layers=layers).ends_s[-1, :, 0]
    assert (simulate(smaller, places, layers=layers).ends_s[-1, :, 0] <= before + 1e-9).all()
    assert (simulate(job, nearer, layers=layers).ends_s[-1, :, 0] <= before + 1e-9).all()


@given(runs(), st.integers(1, 6))
def test_more_delay_never_delays(run: tuple[Job, list[Place], Layers | None], more: int) -> None:
    job, places, layers = run
    delays = job.delay if isinstance(job.delay, tuple) else (job.delay,) * job.workers
    later = replace(job, delay=tuple(min(d + more, job.period) for d in delays))
    before, after = (simulate(j, places, layers=layers).ends_s[-1, :, 0] for j in (job, later))
    assert (after <= before + 1e-9).all()


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
    return float(steady_utilisation(model, method, workers, np.array([rate]), latency_s=latency_s, layered=layered)[0])


@few
@given(choices(), st.booleans())
def test_steady_is_what_a_long_run_comes_to(choice: tuple[Model, Method, int, float, float], layered: bool) -> None:
    model, method, workers, rate, latency_s = choice
    long = simulate(
        method.job(model, workers, 160 * method.period),
        [Place(up_bits_per_s=rate, down_bits_per_s=rate, latency_s=latency_s)],
        layers=method.layers(model) if layered else None,
        layer_count=model.layers,
    )
    rate = rate if layered else rate / GOODPUT
    at_last = long.utilisation(since=100 * method.period)[0]
    assert busy(model, method, workers, rate, latency_s, layered) == pytest.approx(at_last, rel=2e-3)


def test_steady_is_exact_where_rounds_stay_away_for_several_periods() -> None:
    """Eager in four fragments repeats with five periods, and latency is more than one of them."""
    model = Model(parameters=10**9, layers=4, step_s=0.05)
    method = Method(name="eager", period=5, each=1, delay=5, codec=Codec("bf16"), eager=True)
    rate = 7.0767346529749195 * cost.average_bits_per_s(model, method, 4)
    place = Place(up_bits_per_s=rate, down_bits_per_s=rate, latency_s=0.3)
    for layered in (False, True):
        groups = method.layers(model) if layered else None
        run = simulate(method.job(model, 4, 5 * 160), [place], layers=groups, layer_count=4)
        seen = run.utilisation(since=5 * 100)[0]
        assert busy(model, method, 4, rate if layered else rate / GOODPUT, 0.3, layered) == pytest.approx(
            seen, rel=1e-6
        )


@given(choices(), st.booleans())
def test_layer_by_layer_is_never_worse_than_after_the_step(
    choice: tuple[Model, Method, int, float, float], slow: bool
) -> None:
    model, method, workers, rate, latency_s = choice
    far = latency_s + (1.1 * method.period if slow else 0.0)
    assert busy(model, method, workers, rate, far, True) >= busy(model, method, workers, rate, far) - 1e-6


@given(choices(), st.integers(0, 300))
def test_a_run_is_as_long_as_the_report_s_own_model_has_it(
    choice: tuple[Model, Method, int, float, float], steps: int
) -> None:
    """To less than a period: a line a little too slow is hidden by the delay for a while."""
    model, method, workers, rate, latency_s = choice
    exact = time_of(method.job(model, workers, steps), Link(rate, latency_s)).total_s
    ours = float(steady.run_s(model, method, workers, np.array([rate]), steps, latency_s=latency_s)[0])
    if steps < 17 * method.period:
        assert ours == pytest.approx(exact, rel=1e-9)
    assert abs(ours - exact) <= (method.period + 2 * latency_s) * model.step_s + 1e-6


@given(choices())
def test_the_closed_form_is_exact_for_rounds_apart_and_never_too_much(
    choice: tuple[Model, Method, int, float, float],
) -> None:
    model, method, workers, rate, latency_s = choice
    period = method.period
    waits = float(cost.exposed_at(model, method, workers, np.array([rate]), latency_s=latency_s)[0])
    place = Place(up_bits_per_s=rate, down_bits_per_s=rate, latency_s=latency_s)
    run = simulate(method.job(model, workers, 40 * period), [place])
    seen = (run.ends_s[-1, 0, 0] - run.ends_s[4 * period, 0, 0]) / 36 - period
    if cost.rounds_apart(model, method):
        assert seen == pytest.approx(waits, abs=1e-6)
    else:  # what is waited for in the end may be hidden by the delay for many periods: at most by all of it
        assert waits <= seen + (method.delay + latency_s + period) / 36 + 1e-6


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
    place = Place(up_bits_per_s=1e3, down_bits_per_s=1e3)
    waits = []
    for period in (4, 5):
        job = Job(steps=40, step_s=1.1, period=period, payload_bytes=payloads, delay=1, workers=2)
        waits.append(float((1 - simulate(job, [place]).utilisation(since=20))[0]))
    assert waits[0] == 0 < waits[1]


# ---------------------------------------------------------------------- chance


lucks = st.builds(
    Luck,
    straggle=st.sampled_from([0.0, 0.3]),
    straggle_pace=st.sampled_from([1.0, 5.0]),
    drop=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 9),
)


@given(runs(), lucks, st.sampled_from([0.0, 2.0]))
def test_the_same_seed_is_the_same_run(
    run: tuple[Job, list[Place], Layers | None], luck: Luck, jitter_s: float
) -> None:
    job, places, layers = run
    shaky = [replace(place, jitter_s=jitter_s) for place in places]
    one, two = (simulate(job, shaky, layers=layers, luck=luck) for _ in range(2))
    assert np.array_equal(one.ends_s, two.ends_s)
    assert one.sent_bytes.tolist() == two.sent_bytes.tolist()


@given(runs(), st.floats(0.0, 1.0), st.integers(0, 9))
def test_what_is_lost_delays_nobody(run: tuple[Job, list[Place], Layers | None], drop: float, seed: int) -> None:
    job, places, layers = run
    whole, lossy = (
        simulate(job, places, layers=layers, luck=luck).ends_s[-1, :, 0]
        for luck in (Luck(), Luck(drop=drop, seed=seed))
    )
    assert (lossy <= whole + 1e-9).all()


@given(jobs(alone=False), even_places, st.floats(1.1, 9.0))
def test_a_straggler_delays_all_who_wait_for_it(job: Job, place: Place, pace: float) -> None:
    assume(job.steps >= 2 * job.period)
    slow = [replace(place, pace=pace)] + [place] * (job.workers - 1)
    blocking, hidden = (replace(job, delay=delay, gradients=False) for delay in (0, min(1, job.period)))
    waiting = simulate(blocking, slow)
    last_send = max(stop.step for stop in stops(blocking, Link(1.0)))
    ends = waiting.ends_s[last_send, :, 0]
    assert np.allclose(ends, ends[0])  # nobody leaves before the straggler's part is there
    assert (simulate(hidden, slow).ends_s[-1, :, 0] <= waiting.ends_s[-1, :, 0] + 1e-9).all()
