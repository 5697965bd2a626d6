"""What must hold for all advice."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from atoll.plan.line import Line
from atoll.plan.method import Method, Model
from atoll.plan.recommend import candidates, recommend
from example_counts import examples

few = examples(6)

models = st.builds(
    Model,
    parameters=st.sampled_from([10**6, 10**8, 3 * 10**9]),
    layers=st.integers(1, 16),
    step_s=st.sampled_from([0.01, 0.3, 5.0]),
)
links = st.builds(Line, st.floats(3, 12).map(lambda power: 10**power), st.sampled_from([0.0, 0.05, 0.3]))
targets = st.sampled_from([0.3, 0.8, 0.95, 0.99])


def risk(model: Model, method: Method) -> int:
    return list(candidates(model)).index(method)


@few
@given(models, st.integers(2, 5), links, targets)
def test_it_keeps_its_word(model: Model, workers: int, link: Line, target: float) -> None:
    found = recommend(model, workers, link, target)
    assert 1 <= len(found.choices) <= 3
    assert found.next_level.endswith(".")
    for choice in found.choices:
        assert (choice.utilisation_with_atoll >= target) == found.reached
    if found.reached:
        ranks = [risk(model, choice.method) for choice in found.choices]
        assert ranks == sorted(ranks)
    assert recommend(model, workers, link, target) == found


@few
@given(models, st.integers(2, 64), links, targets, st.floats(1.0, 100.0), st.sampled_from([0, 60, 3000]))
@example(Model(parameters=1000000, layers=1, step_s=0.01), 4, Line(1000.0, 0.05), 0.3, 1.0, 60)  # next: beyond any line
def test_on_a_better_line_nothing_riskier_is_needed(
    model: Model, workers: int, link: Line, target: float, faster: float, steps: int
) -> None:
    """Whether the papers' losses are known, up to 8 workers, or not."""
    better = Line(link.bits_per_s * faster, link.latency_s)
    before, after = (recommend(model, workers, line, target, steps=steps) for line in (link, better))
    assert after.reached or not before.reached
    if before.reached:
        first = [risk(model, found.choices[0].method) for found in (before, after)]
        assert first[1] <= first[0]


@few
@given(models, st.integers(2, 64), links, targets)
def test_a_riskier_choice_gains_something(model: Model, workers: int, link: Line, target: float) -> None:
    choices = recommend(model, workers, link, target).choices
    worth = [
        (
            -(math.inf if choice.penalty.loss is None else choice.penalty.loss),
            -choice.bytes_per_step,
            choice.utilisation_with_atoll,
        )
        for choice in choices
    ]
    for mine, choice in zip(worth, choices, strict=True):
        for theirs, other in zip(worth, choices, strict=True):
            if risk(model, other.method) < risk(model, choice.method):
                assert any(m > t for m, t in zip(mine, theirs, strict=True))


@few
@given(models, st.integers(2, 5))
def test_a_hopeless_line(model: Model, workers: int) -> None:
    found = recommend(model, workers, Line(1.0))
    assert not found.reached
    assert found.next_level.startswith("50 % takes ")
    assert "bit/s with the first of these choices" in found.next_level
