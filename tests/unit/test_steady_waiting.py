"""Waiting once a run is under way, against a long one step by step: where rounds touch, queue and hide."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atoll.core.allreduce import sent_bytes, shots
from atoll.core.codec import Codec
from atoll.plan import cost
from atoll.plan.line import Line
from atoll.plan.method import Method, Model
from atoll.plan.simulate import run_s, steady_wait_s, time_of
from oracle import layers as oracle

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
    schedule = plain.job(model, 2, 0).schedules()[0]
    sends = sorted({schedule.offset(fragment) for fragment in range(schedule.fragments)})
    gap = min(later - step for step, later in pairwise([*sends, sends[0] + period]))
    for delay in sorted({0, 1, gap, min(gap + 1, period), period}):
        method = Method(name="any", period=period, each=each, delay=delay, codec=Codec("fp32"))
        for workers, latency_s in ((2, 0.0), (2, 0.4 * period), (4, 0.7)):
            rates = FACTORS * cost.average_bits_per_s(model, method, workers)
            groups = method.layers(model) if layered else None
            job = method.job(model, workers, 0)
            copies = sent_bytes(workers, workers) / workers
            ends: Any = [
                oracle.ends(
                    90 * period, 1.0, period, (delay,), job.payload_bytes, rate, latency_s, groups,
                    layers if layered else 1, copies, shots(workers),
                )
                for rate in rates
            ]  # fmt: skip
            seen = np.array([(end[-1][0] - end[50 * period][0]) / 40 - period for end in ends])
            found = steady_wait_s(job, rates, latency_s=latency_s, layers=groups, layer_count=layers)
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
        job = method.job(model, 2, steps)
        found = run_s(job, rates, latency_s=0.3)
        exact = [time_of(job, Line(rate, 0.3)).total_s for rate in rates]
        np.testing.assert_allclose(found, exact, rtol=1e-9)
