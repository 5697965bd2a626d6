"""The outer optimizers against torch.optim, and the merges."""

import math

import pytest
import torch
from torch import Tensor

from atoll.core.outer_step import (
    SGD,
    Adam,
    Blend,
    Momentum,
    Nesterov,
    OuterOptimizer,
    blend,
    eager_start,
    weighted_mean,
)
from atoll.errors import ConfigError

START = torch.linspace(-1, 1, 7, dtype=torch.float64)
DELTAS = [torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(6)]


def path(outer: OuterOptimizer, deltas: list[Tensor]) -> Tensor:
    anchor, slots = START, tuple(torch.zeros_like(START) for _ in outer.slot_names)
    for count, delta in enumerate(deltas, 1):
        anchor, slots = outer.step(anchor, slots, delta, count)
    return anchor


@pytest.mark.parametrize(
    ("outer", "make"),
    [
        (SGD(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
        (Momentum(0.3, 0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        (Nesterov(0.7, 0.9), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        (Adam(0.3, 0.9, 0.95, 0.1), lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.95), eps=0.1)),
    ],
)
def test_as_in_torch(outer: OuterOptimizer, make) -> None:  # type: ignore[no-untyped-def]
    parameter = torch.nn.Parameter(START.clone())
    optimizer = make([parameter])
    for delta in DELTAS:
        parameter.grad = delta.clone()
        optimizer.step()
    torch.testing.assert_close(path(outer, DELTAS), parameter.data, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("outer", [SGD(0.5), Momentum(0.3, 0.8), Nesterov(0.7, 0.9)])
def test_an_eager_start_is_where_the_lagging_anchor_will_be_moved_by_the_own_delta(
    outer: SGD | Momentum | Nesterov,
) -> None:
    own = torch.zeros_like(START)
    for delta in DELTAS:
        own = outer.remember(own, delta)
    lagging, full = path(outer, DELTAS[:-1]), path(outer, DELTAS)
    torch.testing.assert_close(eager_start(outer, lagging, own, DELTAS[-1], share=1.0), full, rtol=1e-13, atol=1e-13)
    half = eager_start(outer, lagging, own, DELTAS[-1], share=0.5)
    torch.testing.assert_close(half - lagging, 0.5 * (full - lagging), rtol=1e-12, atol=1e-13)


def test_weighted_mean() -> None:
    mean = weighted_mean(DELTAS[:3], [1.0, 2.0, 5.0])
    torch.testing.assert_close(mean, (DELTAS[0] + 2 * DELTAS[1] + 5 * DELTAS[2]) / 8)
    assert torch.equal(weighted_mean([DELTAS[0]] * 2, [1.0, 1.0]), DELTAS[0])
    assert torch.equal(DELTAS[0], torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def test_blend() -> None:
    local, anchor = DELTAS[0], DELTAS[1]
    assert torch.equal(blend(local, anchor, 1.0), local)
    assert torch.equal(blend(local, anchor, 0.0), anchor)
    torch.testing.assert_close(blend(local, anchor, 0.25), 0.25 * local + 0.75 * anchor)


def test_the_rule_by_number_of_workers() -> None:
    assert [Nesterov.for_workers(m).lr for m in (1, 2, 4, 8, 64)] == [0.4, 0.6, 0.6, 0.8, 0.8]
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        Nesterov.for_workers(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0.0), "outer lr must be a finite number above 0, got 0"),
        (lambda: Nesterov(math.nan), "outer lr"),
        (lambda: Momentum(math.inf), "outer lr"),
        (lambda: Nesterov(0.7, 1.0), "outer momentum must be at least 0 and below 1, got 1"),
        (lambda: Adam(beta1=-0.1), "outer beta1"),
        (lambda: Adam(beta2=1.5), "outer beta2"),
        (lambda: Adam(eps=0.0), "outer eps"),
        (lambda: Blend(1.1), "alpha must be between 0 and 1, got 1.1"),
    ],
)
def test_refusals(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()
