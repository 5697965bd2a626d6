"""Links in words, the bytes of a round, and run times that can be checked by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from atoll import Lockstep
from atoll.core.allreduce import sent_bytes
from atoll.errors import ConfigError
from atoll.outer.presets import DataParallel, Gradients, Sync
from atoll.plan.cost import transfer_s
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Job
from atoll.plan.simulate import RunTime, stops, time_of
from harness import PRESETS, Problem, train, train_data_parallel


@pytest.mark.parametrize(
    ("text", "bits_per_s", "latency_s"),
    [
        ("100Mbit/s", 1e8, 0.0),
        ("1 Gbit/s,50ms", 1e9, 0.05),
        ("20 MB/s", 1.6e8, 0.0),
        ("0.5 gbit/s , 0.2 s", 5e8, 0.2),
        ("64 kbit/s", 64e3, 0.0),
        ("1e6 bit/s, 300 us", 1e6, 300e-6),
        ("1.5 Gbps", 1.5e9, 0.0),
        ("3 TBps", 24e12, 0.0),
        ("100Mbit", 1e8, 0.0),  # no rate, but nothing else can be meant
    ],
)
def test_links_in_words(text: str, bits_per_s: float, latency_s: float) -> None:
    link = parse_line(text)
    assert link.bits_per_s == pytest.approx(bits_per_s)
    assert link.latency_s == pytest.approx(latency_s)
    assert parse_line(str(link)) == link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 Gb", r"link '10 Gb': 'Gb' is ambiguous; say Gbit/s \(bits\) or GB/s \(bytes\)"),
        ("10 kb/s", "'kb/s' is ambiguous; say kbit/s"),
        ("5 MB", "'MB' is ambiguous; say Mbit/s"),
        ("10 parsec", "unknown unit 'parsec' of the rate; write it like '100 Mbit/s'"),
        ("10", "unknown unit '' of the rate"),
        ("\u0661 Mbit/s", "is not a rate"),
        ("0 Mbit/s", "link '0 Mbit/s': a link needs a rate above 0 bit/s, got 0"),
        ("-5 Mbit/s", "a link needs a rate above 0 bit/s"),
        ("1e999 Mbit/s", "too large"),
        ("fast", "'fast' is not a rate"),
        ("", "'' is not a rate"),
        ("1 Gbit/s, 50", "'50' is not a latency; write it like '50 ms' or '0.05 s', one way: half of ping"),
        ("1 Gbit/s, 50 MB", "'50 MB' is not a latency"),
        ("1 Gbit/s, -50 ms", "a link's latency must be from 0 to"),
        ("1 Gbit/s, 50 ms, 3", "is not a latency"),
    ],
)
def test_refused_links(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_line(text)


def test_bytes_of_a_round() -> None:
    assert [sent_bytes(1000, workers) for workers in (1, 2, 3, 4, 8)] == [0, 1000, 2000, 1500, 1750]
    assert sent_bytes(999, 4) == 1499  # 1498.5: a link carries whole bytes


def test_seconds_of_a_round() -> None:
    link = Line(8e3, latency_s=0.25)
    assert transfer_s(1000, 1, link) == 0
    assert transfer_s(1000, 2, link) == 1 + 0.25
    assert transfer_s(1000, 4, link) == 1.5 + 2 * 0.25  # two shots travel twice


TWENTY = Job(steps=20, step_s=1.0, period=10, payload_bytes=(500,), delay=0, workers=2)


def taken(**changes: Any) -> RunTime:
    """20 steps of 1 s, a round of 4 s after each 10, but for some changes."""
    return time_of(replace(TWENTY, **changes), Line(1e3))


def test_diloco_waits_for_the_whole_round() -> None:
    """Nothing of it is hidden."""
    assert taken() == (28.0, 20.0, 8.0, 1000, 20 / 28)


def test_data_parallel_waits_on_every_step() -> None:
    assert taken(gradients=True) == (100.0, 20.0, 80.0, 10_000, 0.2)


def test_a_delay_hides_what_fits_into_it() -> None:
    """A round of 4 s with 3 steps of 1 s to hide in shows 1 s; the last one, at the very end, shows all."""
    assert taken(delay=3).exposed_s == 1 + 4
    assert taken(delay=4).exposed_s == 0 + 4


def test_rounds_queue_on_the_link() -> None:
    """Fragments of 3 s leave 2 steps apart: the second begins when the link is free, 1 s late."""
    job = Job(steps=4, step_s=1.0, period=4, payload_bytes=(375, 375), delay=0, workers=2, finish=False)
    blocking = list(stops(job, Line(1e3)))
    assert [(stop.step, stop.left_s) for stop in blocking] == [(4, (7.0,))]
    streaming = Job(steps=8, step_s=1.0, period=4, payload_bytes=(375, 375), delay=4, workers=2, finish=False)
    carried = [(stop.sent, *stop.carried_s) for stop in stops(streaming, Line(1e3)) if stop.sent]
    assert carried == [((0,), (4.0, 7.0)), ((1,), (7.0, 10.0)), ((0,), (10.0, 13.0))]


def test_what_was_not_sent_is_exchanged_at_the_end() -> None:
    job = Job(steps=15, step_s=1.0, period=10, payload_bytes=(500,), delay=0, workers=2)
    assert time_of(job, Line(1e3)).bytes_per_worker == 1000
    unfinished = Job(steps=15, step_s=1.0, period=10, payload_bytes=(500,), delay=0, workers=2, finish=False)
    assert time_of(unfinished, Line(1e3)).bytes_per_worker == 500


def test_latency_delays_a_round_but_does_not_occupy_the_link() -> None:
    """Two fragments sent together, 1 s each: the second arrives after 2 s and one latency, not two."""
    job = Job(steps=1, step_s=1.0, period=1, payload_bytes=(125, 125), delay=0, workers=2)
    assert time_of(job, Line(1e3, latency_s=5.0)).total_s == 1 + 2 + 5


def test_a_patient_worker_is_not_held_up_by_its_own_delay() -> None:
    """Worker 0 blocks on its rounds, worker 1 has 4 steps for each: it goes on, and they meet at the end."""
    job = Job(steps=8, step_s=1.0, period=4, payload_bytes=(500,), delay=(0, 4), workers=2)
    assert job.lanes() == ((0,), (1,))
    moments = [(stop.step, stop.reached_s, stop.left_s) for stop in stops(job, Line(1e3))]
    assert moments[0] == (4, (4.0, 4.0), (8.0, 4.0))
    # Worker 1 sends its second round at 8 s and worker 0 at 12 s: it is complete at 16 s.
    assert moments[1] == (8, (12.0, 8.0), (16.0, 8.0))
    assert moments[-1][2] == (16.0, 16.0)


def test_one_worker_or_no_rounds_cost_nothing() -> None:
    assert taken(workers=1) == (20.0, 20.0, 0.0, 0, 1.0)
    assert taken(payload_bytes=()) == (20.0, 20.0, 0.0, 0, 1.0)
    assert taken(steps=0) == (0.0, 0.0, 0.0, 0, 1.0)


@pytest.mark.parametrize("steps", [12, 13, 20])
@pytest.mark.parametrize("sync", [*PRESETS.values(), DataParallel()], ids=[*PRESETS, "data-parallel"])
def test_bytes_are_those_that_the_loop_sends(sync: Sync | Gradients, steps: int) -> None:
    """At two workers a round puts one payload on the link, which is what the loop counts."""
    if isinstance(sync, Sync) and len(sync.delays) > 2:
        sync = replace(sync, delay=sync.delays[1:])
    loops = Problem(workers=2, steps=steps).loops(sync)
    (train if isinstance(sync, Sync) else train_data_parallel)(loops, steps, 0.07)
    Lockstep(loops).finish()
    payloads = tuple(sync.codec.payload_bytes(fragment.numel) for fragment in loops[0].fragments)
    period, delay = (sync.period, sync.delay) if isinstance(sync, Sync) else (1, 0)
    gradients = isinstance(sync, Gradients)
    time = taken(steps=steps, period=period, payload_bytes=payloads, delay=delay, gradients=gradients)
    assert time.bytes_per_worker == loops[0].counters.bytes_sent > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "steps must be a whole number of at least 0, got -1"),
        ({"step_s": math.nan}, "step_s must be a number of seconds"),
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"payload_bytes": (5, -1)}, "payload_bytes must be a whole number of at least 0, got -1"),
        ({"delay": 11}, r"delay must be between 0 and period \(10\), got 11"),
        ({"delay": (1, 2, 3)}, "delay has 3 entries for 2 workers"),
    ],
)
def test_refused_jobs(changes: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {
        "steps": 10, "step_s": 1.0, "period": 10, "payload_bytes": (1,), "delay": 0, "workers": 2
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        Job(**settings | changes)  # type: ignore[arg-type]
