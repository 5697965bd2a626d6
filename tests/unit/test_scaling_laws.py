"""Defaults by size and workers, against what the Scaling Laws paper prints."""

import math

import pytest

from atoll.errors import ConfigError
from atoll.plan.loss_penalty import _BY_WORKERS, Penalty, penalty
from atoll.plan.method import METHODS, Method, Model, in_fragments
from atoll.plan.scaling_laws import defaults, learning_rate
from atoll.settings.model_presets import preset

BILLION = 10**9


@pytest.mark.parametrize(("size", "losses"), _BY_WORKERS.items())
def test_fitted_losses_are_those_measured(size: int, losses: tuple[float, ...]) -> None:
    near = 0.01 if size < 3 * BILLION else 0.04  # without a floor, the fits end up too low
    for workers, loss in zip((1, 2, 4, 8), losses[1:], strict=False):
        assert defaults(size, workers).loss == pytest.approx(loss, rel=near)


def test_outer_learning_rates() -> None:
    assert [defaults(BILLION, workers).outer_learning_rate for workers in (1, 2, 3, 4, 8, 64)] == [
        0.4, 0.6, 0.6, 0.6, 0.8, 0.8,
    ]  # fmt: skip
    assert 0.6 < defaults(BILLION, 6).outer_learning_rate < 0.8


def test_batches_by_hand() -> None:
    """0.00769 * (10 ** 10) ** 0.479 = 0.00769 * 10 ** 4.79."""
    chosen = defaults(10 * BILLION, 2)
    assert chosen.batch_sequences == round(0.00769 * 10**4.79) == 474
    assert chosen.batch_tokens == 474 * 2048
    assert chosen.tokens == 200 * BILLION


def test_learning_rates_by_hand() -> None:
    """To two digits, and never above the cap."""
    assert learning_rate(BILLION, 2) == pytest.approx(22256 * 2**0.2929 * 10 ** (9 * -0.8827), rel=0.05)
    assert learning_rate(BILLION, 8) == pytest.approx(22256 * 8**0.2929 * 10 ** (9 * -0.8827), rel=0.05)
    assert learning_rate(10**9, 2) < learning_rate(10**8, 2) < learning_rate(10**8, 8) <= learning_rate(10**6, 8)
    assert learning_rate(10**6, 8) == 3e-3


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


def test_it_says_where_the_learning_rate_is_capped() -> None:
    assert defaults(10**6, 2).doubt == "the learning rate is capped at 0.003, the fit has 0.14"
    assert defaults(35 * 10**6, 2).doubt and not defaults(35 * 10**6, 2).outside
    assert not any(defaults(BILLION, workers).doubt for workers in (1, 2, 3, 4, 7, 8))


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


def expected_of(parameters: int, workers: int, method: Method) -> Penalty:
    return penalty(Model(parameters=parameters, layers=24, step_s=1.0), workers, method)


SMALL, HALF, ONE = (preset(name).parameters for name in ("35M", "500M", "1B"))


@pytest.mark.parametrize(
    ("parameters", "workers", "method", "expected"),
    [
        (ONE, 2, streaming(30), 2.48 / 2.49 - 1),
        (ONE, 2, streaming(100), 2.50 / 2.49 - 1),
        (ONE, 4, streaming(100), 2.53 / 2.49 - 1),
        (SMALL, 4, streaming(30), 3.60 / 3.51 - 1),
        (HALF, 2, streaming(100, delay=10), 2.69 / 2.67 - 1 + 0.002),
        (1300 * 10**6, 2, Method(name="diloco", period=30), 2.464 / 2.460 - 1),
        (1300 * 10**6, 8, Method(name="diloco", period=10), 2.493 / 2.460 - 1),
        (10 * BILLION, 4, Method(name="diloco", period=30), 2.096 / 2.090 - 1),
        (HALF, 2, eager(30, 3), 2.71 / 2.67 - 1),
        (ONE, 2, eager(100, 3), 2.52 / 2.49 - 1),
        (ONE, 2, METHODS["data-parallel"], 0.0),
    ],
)
def test_penalties_as_printed(parameters: int, workers: int, method: Method, expected: float) -> None:
    found = expected_of(parameters, workers, method)
    assert found.loss == pytest.approx(expected, abs=1e-12)
    assert found.source and "beyond" not in found.source


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        (16, streaming(100)),
        (2, streaming(100, delay=20)),
        (2, streaming(2000)),
        (4, eager(30, 3)),
        (4, eager(30, None)),
    ],
)
def test_what_nobody_measured_is_not_known(workers: int, method: Method) -> None:
    found = expected_of(ONE, workers, method)
    assert found.loss is None
    assert found.source


@pytest.mark.parametrize(
    ("end", "further", "workers", "method", "words"),
    [
        (ONE, 1, 2, streaming(100), "Streaming, tables 5 and 6; beyond its sizes, as at its largest, 1.27 billion"),
        (ONE, 10**12, 3, streaming(30), "Streaming, tables 5 and 6; beyond its sizes, as at its largest"),
        (SMALL, -1, 4, streaming(100), "Streaming, tables 5 and 6; beyond its sizes, as at its smallest, 35.3 million"),
        (ONE, 1, 2, eager(30, 3), "Eager Updates, table 6; beyond its sizes, as at its largest, 1.27 billion"),
        (10 * BILLION, 1, 2, eager(30, None), "Eager's table 3; beyond its sizes, as at its largest, 10.0 billion"),
        (2400 * 10**6, 1, 8, streaming(30), "at 30; beyond its sizes, as at its largest, 2.40 billion"),
    ],
)
def test_beyond_a_table_its_end_counts_and_it_says_so(
    end: int, further: int, workers: int, method: Method, words: str
) -> None:
    inside, outside = expected_of(end, workers, method), expected_of(end + further, workers, method)
    assert outside.loss == pytest.approx(inside.loss)
    assert words in outside.source and outside.source.startswith(inside.source)


def test_fragments_are_counted_and_not_guessed() -> None:
    """A run file's method has no layers for each fragment, but fragments; and one of all layers is the whole model."""
    model = Model(parameters=ONE, layers=24, step_s=1.0)
    own = in_fragments(Method(name="run", period=100, delay=1), model, 8)
    assert own.each is None and penalty(model, 2, own) == penalty(model, 2, streaming(100))
    everything = Method(name="one", period=100, each=24, delay=1)
    assert penalty(model, 2, everything) == penalty(model, 2, Method(name="one", period=100, delay=1))


def test_longer_periods_cost_more() -> None:
    for parameters in (35 * 10**6, 7 * 10**8, 5 * BILLION):
        for workers in (2, 3, 4):
            losses = [
                expected_of(parameters, workers, streaming(period)).loss for period in (10, 30, 60, 100, 300, 1000)
            ]
            known = [loss for loss in losses if loss is not None]
            assert len(known) == 6 and known == sorted(known)


def test_a_thousand_against_fifty_steps_as_diloco_has_it() -> None:
    """+2.9 % of a perplexity near 15."""
    at = [expected_of(10**8, 2, streaming(period)).loss for period in (100, 1000)]
    assert at[0] is not None and at[1] is not None
    assert at[1] - at[0] == pytest.approx(math.log(1.029) / math.log(15.02) * math.log(10) / math.log(20))
