"""One method on one link: every figure of it, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan.forecast import bandwidth_needed, forecast, utilisation
from atoll.plan.line import GOODPUT, Line
from atoll.plan.method import METHODS, Method, Model

MODEL = Model(parameters=1000, layers=10, step_s=1.0)
WHOLE = Method(name="whole", period=10, codec=Codec("fp32"))


def test_everything_that_is_said() -> None:
    """4000 bytes at 1000 bytes a second: 4 s on the line, once in 10 s; headers and pauses aside."""
    ahead = forecast(MODEL, WHOLE, 2, Line(8000 / GOODPUT), steps=100)
    assert ahead.utilisation_with_atoll == pytest.approx(10 / 14)
    assert ahead.wait_s_per_period == pytest.approx(4.0)
    assert ahead.run_s == pytest.approx(140.0)  # the last exchange is at the end
    assert (ahead.bytes_per_round, ahead.bytes_per_step, ahead.bytes_of_run) == (4000, 400, 40_000)
    assert (ahead.average_bits_per_s, ahead.peak_bits_per_s) == (3200, 32_000)
    assert ahead.memory_bytes == ahead.memory_offloaded_bytes == 8000 + 2 * 4000
    # Layer by layer, most of the backward hides it: the last layer leaves 17 pieces of 29 before the end.
    assert ahead.utilisation == pytest.approx(10 / (10 + 4 * GOODPUT - 17 / 29))


@pytest.mark.parametrize(
    ("steps", "delay", "total_s"),
    [
        (10, 0, 10 + 4),
        (5, 0, 5 + 4),  # what was not sent yet is, at the end
        (15, 0, 15 + 2 * 4),
        (15, 10, 15 + 4),  # the first is hidden
        (10, 10, 10 + 4),  # still on its way when all is computed
        (100_005, 0, 100_005 + 10_001 * 4),
        (0, 0, 0),
    ],
)
def test_a_run_ends_with_an_exchange(steps: int, delay: int, total_s: float) -> None:
    """4 s on the line for everything."""
    ahead = forecast(MODEL, replace(WHOLE, delay=delay), 2, Line(8000 / GOODPUT), steps=steps)
    assert ahead.run_s == pytest.approx(total_s)


def test_a_line_faster_than_needed_is_never_waited_for() -> None:
    ahead = forecast(MODEL, replace(WHOLE, delay=1), 2, Line(math.inf))
    assert ahead.utilisation == ahead.utilisation_with_atoll == 1
    assert ahead.wait_s_per_period == 0


def test_one_worker_needs_no_line() -> None:
    for method in METHODS.values():
        ahead = forecast(MODEL, replace(method, each=None), 1, Line(1.0, latency_s=9.0), steps=10)
        assert (ahead.utilisation, ahead.utilisation_with_atoll, ahead.bytes_of_run) == (1, 1, 0)
        assert (ahead.memory_offloaded_bytes is None) == method.gradients, "nothing to put away"


def test_layer_by_layer_is_never_worse_than_after_the_step() -> None:
    rates = np.geomspace(1e2, 1e6, 20)
    for method in METHODS.values():
        layered, after = (utilisation(MODEL, method, 2, rates, layered=layered) for layered in (True, False))
        assert (layered >= after - 1e-9).all()


def test_bandwidth_for_a_level() -> None:
    """90 % of 10 s computing: 10/9 s may be waited, for 32,000 bits."""
    assert bandwidth_needed(MODEL, WHOLE, 2, 0.9) == pytest.approx(32_000 * 0.9 / GOODPUT, rel=0.011)
    late = bandwidth_needed(MODEL, WHOLE, 2, 0.9, Line(math.inf, 2.0))
    assert late == math.inf  # 2 s in 10 are too long, however fast the line
    assert bandwidth_needed(MODEL, WHOLE, 1, 0.9) == 0  # nobody to send to


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_bandwidth_found_is_enough(method: Method) -> None:
    for level in (0.5, 0.95):
        needed = bandwidth_needed(MODEL, method, 2, level)
        assert forecast(MODEL, method, 2, Line(needed)).utilisation_with_atoll >= level
        if needed > 1e3:
            assert forecast(MODEL, method, 2, Line(needed / 1.03)).utilisation_with_atoll < level


def test_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be a whole number of at least 1, got 0"):
        forecast(MODEL, WHOLE, 0, Line(1e3))
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 0, got -1"):
        forecast(MODEL, WHOLE, 2, Line(1e3), steps=-1)


def test_a_line_a_little_too_slow_is_waited_for_in_the_end() -> None:
    """With all of the period to hide in, no run of a few periods would notice that 3 % are missing."""
    eager = replace(WHOLE, delay=10, each=5, eager=True)
    assert forecast(MODEL, eager, 2, Line(0.97 * 3200 / GOODPUT)).utilisation_with_atoll == pytest.approx(0.97)


def test_a_longer_period_that_is_no_multiple_may_lower_utilisation() -> None:
    """The page about it says so: eight fragments, spread over ten steps and over eleven."""
    model = Model(parameters=10**9, layers=24, step_s=0.1)
    shares = [
        forecast(model, replace(METHODS["streaming"], period=period), 2, Line(6.3e9, 0.05)).utilisation_with_atoll
        for period in (10, 11, 20)
    ]
    assert shares[:2] == pytest.approx([0.854, 0.838], abs=5e-4)
    assert shares[2] > shares[0]
