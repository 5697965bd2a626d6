"""What must hold for all advice."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.plan.advise import advise, candidates, reaching, sweep
from atoll.plan.link import Link
from atoll.plan.method import Method, Model

few = settings(max_examples=6)

models = st.builds(
    Model,
    parameters=st.sampled_from([10**6, 10**8, 3 * 10**9]),
    layers=st.integers(1, 16),
    step_s=st.sampled_from([0.01, 0.3, 5.0]),
)
links = st.builds(Link, st.floats(3, 12).map(lambda power: 10**power), st.sampled_from([0.0, 0.05, 0.3]))
targets = st.sampled_from([0.3, 0.8, 0.95, 0.99])


def risk(model: Model, method: Method) -> int:
    return list(candidates(model)).index(method)


@few
@given(models, st.integers(2, 5), links, targets)
def test_it_keeps_its_word(model: Model, workers: int, link: Link, target: float) -> None:
    found = advise(model, workers, link, target)
    assert 1 <= len(found.choices) <= 3
    assert found.next_level.endswith(".")
    for choice in found.choices:
        assert (choice.outlook.utilisation_with_atoll >= target) == found.reached
    if found.reached:
        ranks = [risk(model, choice.outlook.method) for choice in found.choices]
        assert ranks == sorted(ranks)
    assert advise(model, workers, link, target) == found


@few
@given(models, st.integers(2, 5), links, targets, st.floats(1.0, 100.0))
def test_on_a_better_line_nothing_riskier_is_needed(
    model: Model, workers: int, link: Link, target: float, faster: float
) -> None:
    options = list(candidates(model))
    better = Link(link.bits_per_s * faster, link.latency_s)
    before, after = (
        reaching(model, workers, line, target, options, sweep(model, workers, line, options)) for line in (link, better)
    )
    assert len(after) >= len(before)
    if before:
        assert risk(model, after[0]) <= risk(model, before[0])


@few
@given(models, st.integers(2, 5), links, targets)
def test_no_choice_is_beaten_in_everything(model: Model, workers: int, link: Link, target: float) -> None:
    """But for data-parallel, which is what losses are measured against."""
    choices = advise(model, workers, link, target).choices
    worth = [
        (
            -(math.inf if choice.loss_penalty is None else choice.loss_penalty),
            -choice.outlook.bytes_per_step,
            choice.outlook.utilisation_with_atoll,
        )
        for choice in choices
    ]
    for mine, choice in zip(worth, choices, strict=True):
        for other in worth:
            beaten = other != mine and all(o >= m for o, m in zip(other, mine, strict=True))
            assert not beaten or choice.outlook.method.gradients


@few
@given(models, st.integers(2, 5))
def test_a_hopeless_line(model: Model, workers: int) -> None:
    found = advise(model, workers, Link(1.0))
    assert not found.reached
    assert found.next_level.startswith("50 % takes ")
    assert "bit/s with the first of these choices" in found.next_level
