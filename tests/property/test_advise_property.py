"""What must hold for all advice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.plan.advise import advise, candidates
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
@given(models, st.integers(1, 5), links, targets)
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
def test_a_better_line_never_leads_to_riskier_advice(
    model: Model, workers: int, link: Link, target: float, faster: float
) -> None:
    before = advise(model, workers, link, target, most=1)
    after = advise(model, workers, Link(link.bits_per_s * faster, link.latency_s), target, most=1)
    assert after.reached >= before.reached
    if before.reached:
        assert risk(model, after.choices[0].outlook.method) <= risk(model, before.choices[0].outlook.method)


@few
@given(models, st.integers(2, 5))
def test_a_hopeless_line(model: Model, workers: int) -> None:
    found = advise(model, workers, Link(1.0))
    assert not found.reached
    assert found.next_level.startswith("50 % takes ")
    assert "bit/s with the first of these choices" in found.next_level
