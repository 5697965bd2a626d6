"""Defaults by size and workers, against what the Scaling Laws paper prints."""

import math

import pytest

from atoll.errors import ConfigError
from atoll.plan.laws import defaults
from atoll.plan.measured import _BY_WORKERS, penalty
from atoll.plan.method import METHODS, Method

BILLION = 10**9


@pytest.mark.parametrize(("size", "losses"), _BY_WORKERS.items())
def test_fitted_losses_are_those_measured(size: int, losses: tuple[float, ...]) -> None:
    near = 0.01 if size < 3 * BILLION else 0.04  # without a floor, the fits end up too low
    assert defaults(size, 1, data_parallel=True).loss == pytest.approx(losses[0], rel=near)
    for workers, loss in zip((1, 2, 4, 8), losses[1:], strict=False):
        assert defaults(size, workers).loss == pytest.approx(loss, rel=near)


def test_outer_learning_rates() -> None:
    assert [defaults(BILLION, workers).outer_learning_rate for workers in (1, 2, 3, 4, 8, 64)] == [
        0.4, 0.6, 0.6, 0.6, 0.8, 0.8,
    ]  # fmt: skip
    between = defaults(BILLION, 6).outer_learning_rate
    assert between is not None and 0.6 < between < 0.8
    assert defaults(BILLION, 2, data_parallel=True).outer_learning_rate is None


def test_batches_by_hand() -> None:
    """0.00769 * (10 ** 10) ** 0.479 = 0.00769 * 10 ** 4.79."""
    chosen = defaults(10 * BILLION, 2)
    assert chosen.batch_sequences == round(0.00769 * 10**4.79) == 474
    assert chosen.batch_tokens == 474 * 2048
    assert chosen.tokens == 200 * BILLION


def test_learning_rates_by_hand() -> None:
    assert defaults(BILLION, 2).learning_rate == pytest.approx(3978.82 * 10 ** (9 * -0.780))
    assert defaults(BILLION, 1, data_parallel=True).learning_rate == pytest.approx(16319.2 * 10 ** (9 * -0.819))


def test_the_joint_fit_is_near_the_single_ones() -> None:
    for size in (10**8, BILLION, 10 * BILLION):
        for workers in (3, 5, 6, 7):
            chosen, below, above = (defaults(size, w) for w in (workers, workers & 4 or 2, 8 if workers > 4 else 4))
            assert 0.98 * below.loss < chosen.loss < 1.02 * above.loss
            assert chosen.learning_rate == pytest.approx(below.learning_rate, rel=0.6)
            assert 0.7 * below.batch_sequences < chosen.batch_sequences < 1.4 * above.batch_sequences
    ten = 0.00709 * (10 * BILLION) ** 0.4695 * 3**0.3399
    assert defaults(10 * BILLION, 3).batch_sequences == round(ten)


@pytest.mark.parametrize(
    ("parameters", "workers", "words"),
    [
        (35_000_000, 2, ""),
        (10 * BILLION, 4, ""),
        (10 * BILLION, 8, ""),
        (10**6, 2, "1,000,000 parameters are outside the 35 million to 10 billion"),
        (100 * BILLION, 2, "100,000,000,000 parameters are outside"),
        (BILLION, 16, "16 workers are more than the 8"),
    ],
)
def test_it_says_where_it_was_not_measured(parameters: int, workers: int, words: str) -> None:
    assert defaults(parameters, workers).outside.startswith(words)
    assert bool(defaults(parameters, workers).outside) == bool(words)


def test_it_says_where_the_fits_disagree() -> None:
    unsure = defaults(BILLION, 8)
    assert unsure.doubt == "the learning rate is that of the joint fit; the one for 8 workers alone has 7.5e-05"
    assert unsure.learning_rate == pytest.approx(22256 * 10 ** (9 * -0.8827) * 8**0.2929)
    assert not any(defaults(BILLION, workers).doubt for workers in (1, 2, 3, 4, 7))
    assert not defaults(BILLION, 8, data_parallel=True).doubt


def test_refused() -> None:
    with pytest.raises(ConfigError, match="parameters must be a whole number of at least 1, got 0"):
        defaults(0, 2)
    with pytest.raises(ConfigError, match="workers must be a whole number of at least 1, got 0"):
        defaults(BILLION, 0)


# ---------------------------------------------------------------------- measured penalties


def streaming(period: int, delay: int = 1) -> Method:
    return Method(name="streaming", period=period, each=3, delay=delay)


def eager(period: int, each: int | None) -> Method:
    return Method(name="eager", period=period, each=each, delay=period, eager=True)


@pytest.mark.parametrize(
    ("parameters", "workers", "method", "expected"),
    [
        (BILLION, 2, streaming(30), 2.48 / 2.49 - 1),
        (BILLION, 2, streaming(100), 2.50 / 2.49 - 1),
        (BILLION, 4, streaming(100), 2.53 / 2.49 - 1),
        (35 * 10**6, 4, streaming(30), 3.60 / 3.51 - 1),
        (500 * 10**6, 2, streaming(100, delay=10), 2.69 / 2.67 - 1 + 0.002),
        (1300 * 10**6, 2, Method(name="diloco", period=30), 2.464 / 2.460 - 1),
        (1300 * 10**6, 8, Method(name="diloco", period=10), 2.493 / 2.460 - 1),
        (10 * BILLION, 4, streaming(30), 2.096 / 2.090 - 1),
        (500 * 10**6, 2, eager(30, 3), 2.71 / 2.67 - 1),
        (BILLION, 2, eager(100, 3), 2.52 / 2.49 - 1),
        (BILLION, 2, METHODS["data-parallel"], 0.0),
    ],
)
def test_penalties_as_printed(parameters: int, workers: int, method: Method, expected: float) -> None:
    found = penalty(parameters, workers, method)
    assert found.loss == pytest.approx(expected, abs=1e-12)
    assert found.source


@pytest.mark.parametrize(
    ("parameters", "workers", "method"),
    [
        (100 * BILLION, 2, streaming(100)),
        (10**6, 2, streaming(100)),
        (BILLION, 16, streaming(100)),
        (10 * BILLION, 8, streaming(100)),
        (BILLION, 2, streaming(100, delay=20)),
        (BILLION, 2, streaming(2000)),
        (BILLION, 4, eager(30, 3)),
        (2 * BILLION, 2, eager(30, 3)),
    ],
)
def test_what_nobody_measured_is_not_known(parameters: int, workers: int, method: Method) -> None:
    found = penalty(parameters, workers, method)
    assert found.loss is None
    assert found.source


def test_longer_periods_cost_more() -> None:
    for parameters in (35 * 10**6, 7 * 10**8, 5 * BILLION):
        for workers in (2, 3, 4):
            losses = [penalty(parameters, workers, streaming(period)).loss for period in (10, 30, 60, 100, 300, 1000)]
            known = [loss for loss in losses if loss is not None]
            assert len(known) == 6 and known == sorted(known)


def test_a_thousand_against_fifty_steps_as_diloco_has_it() -> None:
    """+2.9 % of a perplexity near 15."""
    at = [penalty(10**8, 2, streaming(period)).loss for period in (100, 1000)]
    assert at[0] is not None and at[1] is not None
    assert at[1] - at[0] == pytest.approx(math.log(1.029) / math.log(15.02) * math.log(10) / math.log(20))
