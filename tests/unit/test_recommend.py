"""Advice for lines that people have."""

import math
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.codec import Codec
from atoll.core.fragments import Blocks, Whole
from atoll.core.outer_step import Blend
from atoll.errors import ConfigError
from atoll.outer.presets import Gradients, Sync
from atoll.plan import cost
from atoll.plan.forecast import forecast
from atoll.plan.line import Line, parse_line
from atoll.plan.method import METHODS, Method, Model
from atoll.plan.recommend import PERIODS, candidates, describe, explain, recommend, sweep
from atoll.settings.config import parse

MODEL = Model(parameters=10**9, layers=24, step_s=0.1)


def test_a_fast_line_needs_nothing_special() -> None:
    found = recommend(MODEL, 2, Line(1e13))
    assert found.reached
    assert found.choices[0].method.gradients
    assert found.choices[0].penalty.loss == 0
    assert "on every step" in explain(found.choices[0], of_run=False)


def test_a_home_line_takes_four_bits_and_a_delay() -> None:
    found = recommend(MODEL, 2, Line(1e9, 0.02))
    best = found.choices[0]
    assert found.reached
    assert best.method.codec == Codec("e3m0") and best.method.delay > 0
    assert not best.method.eager
    assert best.penalty.loss is not None and abs(best.penalty.loss) < 0.02
    assert best.penalty.source
    assert [choice.method.period for choice in found.choices] == sorted(
        choice.method.period for choice in found.choices
    )


def test_one_worker_has_nothing_to_exchange() -> None:
    found = recommend(MODEL, 1, Line(1e3))
    assert found.reached and not found.choices
    assert found.next_level == "One worker has nothing to exchange."


@pytest.mark.parametrize("workers", [2, 8, 9, 16, 64])
def test_the_first_choice_is_the_least_risky_whether_losses_are_known_or_not(workers: int) -> None:
    """Nobody has measured more than 8 workers: that is no reason to prefer Eager and a period of 1000."""
    model, link = Model(parameters=10**10, layers=48, step_s=0.8), Line(100e9, 0.02)
    found = recommend(model, workers, link).choices
    methods = [choice.method for choice in found]
    assert not methods[0].eager and methods[0].period <= 20
    assert [m.period for m in methods] == sorted(m.period for m in methods)
    assert (found[0].penalty.loss is None) == (workers > 8)


def test_a_better_line_does_not_bring_a_longer_period() -> None:
    """Once it did: 5 steps from 6.8 to 16 Gbit/s, 20 at 36 and 30 from 82 on."""
    model = Model(parameters=1270 * 10**6, layers=24, step_s=1.2)
    firsts = [recommend(model, 2, Line(1e9 * rate, 0.05)).choices[0].method for rate in (6.8, 16, 36, 82, 200)]
    assert [method.period for method in firsts] == [5] * 5


def test_what_gains_nothing_over_a_less_risky_choice_is_not_offered() -> None:
    """Where nobody ever waits, Eager sends as much as the same period without it, and hides nothing."""
    found = recommend(MODEL, 8, Line(math.inf), most=99).choices
    assert [choice.method.period for choice in found] == [1, *PERIODS]
    assert not any(choice.method.eager for choice in found)


@pytest.mark.parametrize("steps", [3, 24, 25, 50, 10**6])
def test_a_run_has_a_few_of_the_periods_that_are_advised(steps: int) -> None:
    found = recommend(MODEL, 2, Line(1e8), steps=steps, most=99)
    assert found.choices
    for choice in found.choices:
        method, ahead = choice.method, choice
        assert method.gradients or 5 * method.period <= steps or method.period == 5 <= steps
        assert ahead.utilisation_of_run == pytest.approx(steps * MODEL.step_s / ahead.run_s)
        assert (ahead.utilisation_of_run >= 0.95) == found.reached


def test_a_short_run_is_judged_with_its_last_exchange() -> None:
    """5 s of computing, and 46 s for the last exchange: nothing is busy for 95 % of that, whatever its period is."""
    short = recommend(MODEL, 2, Line(1e8), steps=50)
    assert not short.reached
    assert "of the run." in explain(short.choices[0], of_run=True)
    assert recommend(MODEL, 2, Line(1e8), steps=10**6).reached


def test_what_does_not_suit_is_not_offered() -> None:
    found = recommend(MODEL, 2, Line(1e6), adapt=lambda method: None if method.eager else replace(method, velocities=2))
    assert all(not c.method.eager and c.method.velocities == 2 for c in found.choices)
    nothing = recommend(MODEL, 2, Line(1e6), adapt=lambda _: None)
    assert not nothing.choices and not nothing.reached and "No method goes with" in nothing.next_level


def test_a_run_of_so_many_steps() -> None:
    first = recommend(MODEL, 2, Line(1e9, 0.02), steps=1000).choices[0]
    assert first == forecast(MODEL, first.method, 2, Line(1e9, 0.02), 1000)
    assert first.bytes_of_run > 0 and first.run_s >= 1000 * MODEL.step_s


def test_one_bit_a_second() -> None:
    found = recommend(MODEL, 2, Line(1.0))
    assert not found.reached
    assert len(found.choices) == 3
    assert found.next_level.startswith("50 % takes 46.7 Mbit/s")
    assert "no settings reach it" in found.next_level


def test_the_next_level_holds() -> None:
    found = recommend(MODEL, 2, Line(1e9, 0.05), target=0.5)
    first = found.choices[0]
    assert 0.5 <= first.utilisation_with_atoll < 0.8
    assert found.next_level.startswith("80 % takes ")
    rate = parse_line(found.next_level.removeprefix("80 % takes ").partition(" with")[0])
    assert forecast(MODEL, first.method, 2, Line(rate.bits_per_s, 0.05)).utilisation_with_atoll >= 0.8, "it is enough"
    assert "On this link it takes other settings: " in found.next_level
    assert recommend(MODEL, 2, Line(1e15)).next_level.startswith("Nothing is left to gain")


def test_latency_alone_can_be_too_much() -> None:
    found = recommend(MODEL, 2, Line(1e15, latency_s=1e4), target=0.9)
    assert not found.reached
    assert "at any bandwidth" in found.next_level


def test_little_memory() -> None:
    """What is too large is ruled out as any other method."""

    def small(method: Method) -> Method | None:
        return method if cost.extra_bytes(MODEL, method, 2) <= limit else None

    roomy = recommend(MODEL, 2, Line(1e9, 0.05)).choices[0]
    limit = roomy.memory_bytes - 1
    tight = recommend(MODEL, 2, Line(1e9, 0.05), adapt=small)
    assert tight.choices and all(choice.memory_bytes <= limit for choice in tight.choices)


def test_a_sweep_is_what_each_would_be_alone() -> None:
    options = list(candidates(MODEL))[::37]
    link = Line(2e9, 0.05)
    alone = [forecast(MODEL, method, 4, link).utilisation_with_atoll for method in options]
    assert np.allclose(sweep(MODEL, 4, link, options), alone, atol=1e-3)


def test_small_models_have_few_fragments() -> None:
    tiny = Model(parameters=1000, layers=2, step_s=0.1)
    assert {method.each for method in candidates(tiny)} == {None, 1}
    assert recommend(Model(parameters=10, layers=1, step_s=0.1), 2, Line(1e9)).reached


@pytest.mark.parametrize(("period", "delays"), [(5, {0, 1}), (10, {0, 1, 2, 3}), (30, {0, 1, 2, 3, 5, 10})])
def test_a_round_is_blended_before_a_third_of_the_next_is_over(period: int, delays: set[int]) -> None:
    found = list(candidates(MODEL, [period]))
    assert {method.delay for method in found if not method.eager} == delays
    assert {method.delay for method in found if method.eager} == {period}


@pytest.mark.parametrize("method", list(candidates(MODEL))[::19], ids=describe)
def test_settings_are_accepted_by_run_files_and_mean_the_choice(method: Method) -> None:
    sync = parse({}, [f"{key}={value}" for key, value in method.settings().items()]).synchronisation()
    assert sync is not None and sync.codec == method.codec
    assert isinstance(sync, Gradients) == method.gradients
    if isinstance(sync, Sync):
        assert (sync.period, sync.delays, sync.eager) == (method.period, (method.delay,), method.eager)
        assert sync.fragments == (Whole() if method.each is None else Blocks(each=method.each))
        if isinstance(sync.merge, Blend):  # what comes back at once is not blended
            assert (sync.merge.alpha > 0) == (method.delay > 0)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (METHODS["streaming"], "In fragments of 3 layers every 100 steps, in e3m0, hidden behind 1 step"),
        (METHODS["diloco"], "Everything at once every 100 steps, in bf16, waiting"),
        (METHODS["eager"], "Everything at once every 100 steps, in e3m0, eagerly, behind all of them"),
        (METHODS["data-parallel"], "Gradients on every step, in bf16"),
        (
            Method(name="x", period=9, each=1, delay=3, codec=Codec("int8")),
            "In fragments of 1 layer every 9 steps, in int8, hidden behind 3 steps",
        ),
    ],
)
def test_methods_in_words(method: Method, words: str) -> None:
    assert describe(method) == words


@pytest.mark.parametrize(
    ("workers", "target", "most", "message"),
    [
        (0, 0.9, 3, "workers must be a whole number of at least 1, got 0"),
        (2, 0.0, 3, "target must be between 0 and 1, both excluded, got 0.0"),
        (2, 1.5, 3, "target must be between 0 and 1, both excluded, got 1.5"),
        (2, float("nan"), 3, "target must be between 0 and 1"),
        (2, 0.9, 0, "most must be a whole number of at least 1, got 0"),
    ],
)
def test_nonsense(workers: int, target: float, most: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        recommend(MODEL, workers, Line(1e9), target, most=most)
    assert "\n" not in str(refused.value)


def test_nearly_is_not_reached() -> None:
    """A sweep is good to a thousandth; what is said is exact."""
    first = recommend(MODEL, 2, Line(1e9, 0.05), 0.9, most=1).choices[0].utilisation_with_atoll
    more = recommend(MODEL, 2, Line(1e9, 0.05), first + 5e-4, most=1)
    assert more.reached and more.choices[0].utilisation_with_atoll >= first + 5e-4
