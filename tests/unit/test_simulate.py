"""The simulator on runs that can be followed with a pencil."""

from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import ConfigError
from atoll.plan.line import Line
from atoll.plan.method import Job, Layers, Method, Model
from atoll.plan.simulate import steady_wait_s, stops

LINE = Line(1000)
# Two workers, steps of 1 s, 500 bytes after every fourth: 4 s on the line.
JOB = Job(steps=8, step_s=1.0, period=4, payload_bytes=(500,), delay=0, workers=2, finish=False)


def left(job: Job, link: Line = LINE) -> dict[int, float]:
    """By step: when the first lane went on after it."""
    return {stop.step: stop.left_s[0] for stop in stops(job, link)}


def waits(job: Job, layers: Layers | None = None, rate: float = 1000.0, latency_s: float = 0.0) -> float:
    """Seconds of a period, once the run is under way."""
    depth = max((layer for group in layers or () for layer in group), default=1)
    return float(steady_wait_s(job, np.array([rate]), latency_s=latency_s, layers=layers, layer_count=depth)[0])


def test_waiting_after_the_step() -> None:
    assert left(JOB) == {4: 8, 8: 16}
    assert left(JOB, Line(1000, 0.5)) == {4: 8.5, 8: 17}
    assert left(replace(JOB, delay=1)) == {4: 4, 5: 8, 8: 11}
    assert left(replace(JOB, delay=4)) == {4: 4, 8: 8}


def test_layer_by_layer() -> None:
    """Two layers are five pieces of 0.2 s: forward 1, 2; backward 2 (two pieces), 1 (one). Each has 2 s on the line.

    In step 4, from 3 s on: layer 2 is ready at 3.8 and passes until 5.8, layer 1 until 7.8; step 5 begins then.
    """
    assert waits(JOB, ((1, 2),)) == pytest.approx(3.8)
    assert waits(JOB, ((1, 2),), latency_s=0.5) == pytest.approx(4.3)


def test_lines_take_the_last_layers_first_whichever_fragment_they_are_in() -> None:
    """Four layers are eleven pieces of 0.1 s; 1 s each on the line, from layer 4 on, two pieces into the backward.

    The first layer is there at 0.6 + 4 s, where the next step could have begun at 1.1 s; in fragments of neighbours
    as well, although one of them has both of the last layers.
    """
    job = replace(JOB, period=1, payload_bytes=(250, 250), step_s=1.1)
    for layers in (((1, 3), (2, 4)), ((1, 2), (3, 4)), ((3, 4), (1, 2))):
        assert waits(job, layers) == pytest.approx(0.6 + 4 - 1.1)


def test_latency_is_paid_once_a_shot() -> None:
    """One shot sends to the two others; from four workers on two shots send half as much each, one after the other."""
    assert waits(replace(JOB, workers=3), latency_s=0.125) == 4 * 2 + 0.125
    assert waits(replace(JOB, workers=4), latency_s=0.125) == 4 * 1.5 + 2 * 0.125


def test_one_alone_needs_no_line() -> None:
    assert waits(replace(JOB, workers=1), latency_s=9.0) == 0


def test_line_times() -> None:
    (first, second) = stops(replace(JOB, delay=1, steps=5), LINE)
    assert (first.sent, first.carried_s) == ((0,), ((4.0, 8.0),))
    assert (second.sent, second.carried_s) == ((), ())
    assert (second.reached_s, second.left_s) == ((5.0,), (8.0,))


def test_strided_fragments() -> None:
    def layers(count: int, each: int) -> Layers:
        model = Model(parameters=count, layers=count, step_s=1.0)
        return Method(name="any", period=1, each=each).layers(model)

    assert layers(7, 3) == ((1, 4, 7), (2, 5), (3, 6))
    assert layers(4, 4) == ((1, 2, 3, 4),)
    with pytest.raises(ConfigError, match=r"a fragment of 5 layers is more than the model has \(4\)"):
        layers(4, 5)
