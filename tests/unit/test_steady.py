"""Waiting once a run is under way, against the simulation of a long one: where rounds touch, queue and hide."""

from itertools import pairwise

import numpy as np
import pytest

from atoll.core.codec import Codec
from atoll.plan import cost, steady
from atoll.plan.job import time_of
from atoll.plan.lines import Place
from atoll.plan.link import Link
from atoll.plan.method import Method, Model
from atoll.plan.simulate import simulate

FACTORS = np.array([0.4, 0.8, 1.0, 1.2, 2.5, 20.0])
SHAPES = [(4, 6, None, 0), (7, 12, 1, 0), (6, 12, 1, 100), (9, 10, 3, 300)]
"""Layers, period, layers of a fragment, parameters outside layers."""


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(("layers", "period", "each", "rest"), SHAPES)
def test_steady_is_what_a_long_run_comes_to(
    layers: int, period: int, each: int | None, rest: int, layered: bool
) -> None:
    model = Model(parameters=1200, layers=layers, step_s=1.0, rest=rest)
    plain = Method(name="any", period=period, each=each, codec=Codec("fp32"))
    sends = list(cost.sent_together(model, plain, 2))
    gap = min(later - step for step, later in pairwise([*sends, sends[0] + period]))
    for delay in sorted({0, 1, gap, min(gap + 1, period), period}):
        method = Method(name="any", period=period, each=each, delay=delay, codec=Codec("fp32"))
        for workers, latency_s in ((2, 0.0), (2, 0.4 * period), (4, 0.7)):
            rates = FACTORS * cost.average_bits_per_s(model, method, workers)
            place = Place(up_bits_per_s=1.0, down_bits_per_s=1.0, latency_s=latency_s)
            groups = method.layers(model) if layered else None
            job = method.job(model, workers, 90 * period)
            run = simulate(job, [place], layers=groups, layer_count=layers, rates=rates)
            seen = (run.ends_s[-1, 0] - run.ends_s[50 * period, 0]) / 40 - period
            found = steady.waited_s(model, method, workers, rates, latency_s=latency_s, layered=layered)
            np.testing.assert_allclose(
                period / (period + found), period / (period + seen), rtol=3e-3, err_msg=f"{method}"
            )


@pytest.mark.parametrize(("layers", "period", "each", "rest"), SHAPES)
def test_a_short_run_with_its_beginning_and_its_end(layers: int, period: int, each: int | None, rest: int) -> None:
    """Of whole periods and of others, on lines that keep up and that do not."""
    model = Model(parameters=1200, layers=layers, step_s=1.0, rest=rest)
    for delay, steps in ((0, 3 * period), (1, 3 * period + 1), (period, 5 * period - 1), (period, period - 1)):
        method = Method(name="any", period=period, each=each, delay=delay, codec=Codec("fp32"))
        rates = FACTORS * cost.average_bits_per_s(model, method, 2)
        found = steady.run_s(model, method, 2, rates, steps, latency_s=0.3)
        exact = [time_of(method.job(model, 2, steps), Link(rate, 0.3)).total_s for rate in rates]
        np.testing.assert_allclose(found, exact, rtol=1e-9)
