"""The event model on runs that can be followed with a pencil."""

from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import ConfigError
from atoll.plan.job import Job
from atoll.plan.lines import Exchange, Place
from atoll.plan.simulate import Luck, simulate, strided

LINE = Place(up_bits_per_s=1000, down_bits_per_s=1000)
# Two workers, steps of 1 s, 500 bytes after every fourth: 4 s on the line.
JOB = Job(steps=8, step_s=1.0, period=4, payload_bytes=(500,), delay=0, workers=2)


def ends(*places: Place, job: Job = JOB, **how: object) -> list[list[float]]:
    """Per worker: when steps 4, 5 and 8 were over."""
    run = simulate(job, places, **how)  # type: ignore[arg-type]
    found: list[list[float]] = run.ends_s[[4, 5, 8], :, 0].T.round(9).tolist()
    return found


def test_waiting_after_the_step() -> None:
    assert ends(LINE) == [[8, 9, 16]]
    assert ends(replace(LINE, latency_s=0.5)) == [[8.5, 9.5, 17]]
    assert ends(LINE, job=replace(JOB, delay=1)) == [[4, 8, 11]]
    assert ends(LINE, job=replace(JOB, delay=4)) == [[4, 5, 8]]


def test_layer_by_layer() -> None:
    """Two layers are five pieces of 0.2 s: forward 1, 2; backward 2 (two pieces), 1 (one). Each has 2 s on the line.

    In step 4, from 3 s on: layer 2 is ready at 3.8 and passes until 5.8, layer 1 until 7.8; step 5 begins then.
    """
    assert ends(LINE, layers=((1, 2),)) == [[4, 8.8, 11.8]]


def test_lines_take_the_last_layers_first_whichever_fragment_they_are_in() -> None:
    """Four layers are eleven pieces of 0.1 s; 1 s each on the line, from layer 4 on, two pieces into the backward."""
    job = replace(JOB, period=1, steps=2, payload_bytes=(250, 250), step_s=1.1)
    run = simulate(job, [LINE], layers=((1, 3), (2, 4)), record=True)
    carried = [span for span in run.spans if span.kind == "carrying" and span.begin_s < 4.6]
    assert [span.fragment for span in carried] == [1, 0, 1, 0]
    assert np.allclose([span.begin_s for span in carried], [0.6, 1.6, 2.6, 3.6])


def test_the_slower_way_counts() -> None:
    assert ends(replace(LINE, up_bits_per_s=500)) == [[12, 13, 24]]
    assert ends(replace(LINE, down_bits_per_s=500)) == [[12, 13, 24]]
    # One slow line: its own part leaves late, and everybody waits for it.
    assert ends(replace(LINE, up_bits_per_s=500), LINE) == [[12, 13, 24], [12, 13, 24]]
    # One that receives slowly keeps the other waiting once it comes late itself; what came in meanwhile is there.
    assert ends(replace(LINE, down_bits_per_s=500), LINE) == [[12, 13, 20], [8, 9, 20]]


def test_a_slow_machine_keeps_all_waiting() -> None:
    assert ends(replace(LINE, pace=2.0), LINE) == [[12, 14, 24], [12, 13, 24]]


def test_an_outage_while_the_line_works() -> None:
    assert ends(replace(LINE, outages=((5.0, 7.0),))) == [[10, 11, 18], [10, 11, 18]]
    assert ends(replace(LINE, outages=((3.0, 7.0), (8.0, 9.0)))) == [[12, 13, 20], [12, 13, 20]]
    assert ends(replace(LINE, outages=((1.0, 3.0),))) == [[8, 9, 16], [8, 9, 16]]


def test_one_alone_needs_no_line() -> None:
    place = replace(LINE, latency_s=9.0, jitter_s=9.0, outages=((0.0, 99.0),))
    assert ends(place, job=replace(JOB, workers=1)) == [[4, 5, 8]]


@pytest.mark.parametrize(
    ("exchange", "workers", "copies", "crossings"),
    [
        ("shots", 3, 2, 1),
        ("shots", 4, 1.5, 2),
        ("ring", 4, 1.5, 6),
        ("all-to-all", 4, 3, 1),
        ("ring", 2, 1, 2),
    ],
)
def test_ways_to_exchange(exchange: Exchange, workers: int, copies: float, crossings: int) -> None:
    place = replace(LINE, latency_s=0.125)
    run = simulate(replace(JOB, workers=workers, steps=4), [place], exchange=exchange)
    assert run.sent_bytes.tolist() == [copies * 500]
    assert run.ends_s[4, 0, 0] == 4 + 4 * copies + crossings * 0.125


def test_what_is_lost_is_not_waited_for() -> None:
    slow = replace(LINE, up_bits_per_s=10)
    lost = simulate(replace(JOB, steps=4), [slow, LINE], luck=Luck(drop=1.0))
    assert lost.ends_s[4, :, 0].tolist() == [404, 8]  # its own line is still busy with it


def test_stragglers_and_jitter_by_their_size() -> None:
    slow = simulate(JOB, [LINE], luck=Luck(straggle=1.0, straggle_pace=3.0))
    assert slow.ends_s[[4, 8], 0, 0].tolist() == [16, 32]
    late = simulate(replace(JOB, steps=4), [replace(LINE, jitter_s=0.5)]).ends_s[4, :, 0]
    assert ((late >= 8) & (late <= 8.5)).all() and late[0] != late[1]


def test_spans() -> None:
    run = simulate(replace(JOB, steps=5), [LINE], record=True)
    assert sorted(run.spans) == [
        (0, "carrying", 4.0, 8.0, 0),
        (0, "computing", 0.0, 4.0, None),
        (0, "computing", 8.0, 9.0, None),
        (0, "waiting", 4.0, 8.0, None),
    ]
    assert simulate(JOB, [LINE]).spans == ()


def test_strided_fragments() -> None:
    assert strided(7, 3) == ((1, 4, 7), (2, 5), (3, 6))
    assert strided(4, 4) == ((1, 2, 3, 4),)
    with pytest.raises(ConfigError, match=r"a fragment of 5 layers is more than the model has \(4\)"):
        strided(4, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"up_bits_per_s": 0}, "up_bits_per_s must be above 0, got 0: nothing would ever arrive"),
        ({"down_bits_per_s": float("nan")}, "down_bits_per_s must be above 0"),
        ({"latency_s": -1.0}, "latency_s must be a finite number of at least 0"),
        ({"pace": 0.0}, "pace must be a finite number above 0"),
        ({"outages": ((3.0, 1.0),)}, r"outages must be \(from, to\) in seconds, apart and in order"),
        ({"outages": ((1.0, 3.0), (2.0, 4.0))}, "outages must be"),
    ],
)
def test_refused_places(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LINE, **settings)  # type: ignore[arg-type]


def test_refused_runs() -> None:
    with pytest.raises(ConfigError, match="3 places for 2 workers: give one, or one each"):
        simulate(JOB, [LINE] * 3)
    with pytest.raises(ConfigError, match="2 groups of layers for 1 fragments: give one each"):
        simulate(JOB, [LINE], layers=((1,), (2,)))
    with pytest.raises(ConfigError, match="exchange must be shots, ring or all-to-all, got 'mail'"):
        simulate(JOB, [LINE], exchange="mail")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"drop must be a chance between 0 and 1, got 1\.1"):
        Luck(drop=1.1)
