"""Advice for lines that people have."""

import numpy as np
import pytest

from atoll.config import parse
from atoll.core.codec import Codec
from atoll.core.fragments import Blocks, Whole
from atoll.core.outer import Blend
from atoll.errors import ConfigError
from atoll.plan.advise import advise, candidates, in_words, reaching, sweep
from atoll.plan.link import Link, parse_link
from atoll.plan.method import METHODS, Method, Model
from atoll.plan.outlook import outlook
from atoll.sync import Gradients, Sync

MODEL = Model(parameters=10**9, layers=24, step_s=0.1)


def test_a_fast_line_needs_nothing_special() -> None:
    found = advise(MODEL, 2, Link(1e13))
    assert found.reached
    assert found.choices[0].outlook.method.gradients
    assert found.choices[0].loss_penalty == 0
    assert "on every step" in found.choices[0].why


def test_a_home_line_takes_four_bits_and_a_delay() -> None:
    found = advise(MODEL, 2, Link(1e9, 0.02))
    best = found.choices[0]
    assert found.reached
    assert best.outlook.method.codec == Codec("e3m0") and best.outlook.method.delay > 0
    assert not best.outlook.method.eager
    assert best.loss_penalty is not None and abs(best.loss_penalty) < 0.02
    assert best.source
    assert [choice.outlook.method.period for choice in found.choices] == sorted(
        choice.outlook.method.period for choice in found.choices
    )


def test_one_worker_has_nothing_to_exchange() -> None:
    found = advise(MODEL, 1, Link(1e3))
    assert found.reached and not found.choices
    assert found.next_level == "One worker has nothing to exchange."


def test_what_another_choice_beats_is_not_offered() -> None:
    """Up to 30 steps the papers' loss is the same: 30 send less than 5, 10 and 20, and wait less."""
    fast = Link(1e12)
    found = [choice.outlook for choice in advise(MODEL, 2, fast, 0.9).choices]
    options = list(candidates(MODEL))
    reached = [m.period for m in reaching(MODEL, 2, fast, 0.9, options, sweep(MODEL, 2, fast, options))]
    assert reached[:4] == [5, 10, 20, 30]
    assert [ahead.method.period for ahead in found] == [30, 50, 100]


def test_a_run_of_so_many_steps() -> None:
    first = advise(MODEL, 2, Link(1e9, 0.02), steps=1000).choices[0].outlook
    assert first == outlook(MODEL, first.method, 2, Link(1e9, 0.02), 1000)
    assert first.bytes_of_run > 0 and first.run_s >= 1000 * MODEL.step_s


def test_one_bit_a_second() -> None:
    found = advise(MODEL, 2, Link(1.0))
    assert not found.reached
    assert len(found.choices) == 3
    assert found.next_level.startswith("50 % takes 46.7 Mbit/s")
    assert "no settings reach it" in found.next_level


def test_the_next_level_holds() -> None:
    found = advise(MODEL, 2, Link(1e9, 0.05), target=0.5)
    first = found.choices[0].outlook
    assert 0.5 <= first.utilisation_with_atoll < 0.8
    assert found.next_level.startswith("80 % takes ")
    rate = parse_link(found.next_level.removeprefix("80 % takes ").partition(" with")[0])
    assert outlook(MODEL, first.method, 2, Link(rate.bits_per_s, 0.05)).utilisation_with_atoll >= 0.8, "it is enough"
    assert "On this link it takes other settings: " in found.next_level
    assert advise(MODEL, 2, Link(1e15)).next_level.startswith("Nothing is left to gain")


def test_latency_alone_can_be_too_much() -> None:
    found = advise(MODEL, 2, Link(1e15, latency_s=1e4), target=0.9)
    assert not found.reached
    assert "at any bandwidth" in found.next_level


def test_little_memory() -> None:
    roomy = advise(MODEL, 2, Link(1e9, 0.05)).choices[0].outlook
    limit = roomy.memory_bytes - 1
    tight = advise(MODEL, 2, Link(1e9, 0.05), memory_limit_bytes=limit)
    assert all(choice.outlook.memory_bytes <= limit for choice in tight.choices)
    with pytest.raises(ConfigError, match=r"memory_limit_bytes is 1.00 kB; the least that any choice adds is 4.00 GB"):
        advise(MODEL, 2, Link(1e9), memory_limit_bytes=1000)


def test_a_sweep_is_what_each_would_be_alone() -> None:
    options = list(candidates(MODEL))[::37]
    link = Link(2e9, 0.05)
    alone = [outlook(MODEL, method, 4, link).utilisation_with_atoll for method in options]
    assert np.allclose(sweep(MODEL, 4, link, options), alone, atol=1e-3)


def test_small_models_have_few_fragments() -> None:
    tiny = Model(parameters=1000, layers=2, step_s=0.1)
    assert {method.each for method in candidates(tiny)} == {None, 1}
    assert advise(Model(parameters=10, layers=1, step_s=0.1), 2, Link(1e9)).reached


@pytest.mark.parametrize("method", list(candidates(MODEL))[::19], ids=in_words)
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
    assert in_words(method) == words


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
        advise(MODEL, workers, Link(1e9), target, most=most)
    assert "\n" not in str(refused.value)


def test_nearly_is_not_reached() -> None:
    """A sweep is good to a thousandth; what is said is exact."""
    first = advise(MODEL, 2, Link(1e9, 0.05), 0.9, most=1).choices[0].outlook.utilisation_with_atoll
    more = advise(MODEL, 2, Link(1e9, 0.05), first + 5e-4, most=1)
    assert more.reached and more.choices[0].outlook.utilisation_with_atoll >= first + 5e-4
