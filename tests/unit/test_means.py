"""The mean of many workers: what two shots lose of it, and what the observer sees of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.codec import Codec
from atoll.core.outer_step import SGD


class Vector(nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(values))


class Workers:
    """Workers whose inner steps are given deltas, and whose anchor moves by their mean."""

    def __init__(self, workers: int, codec: Codec, values: int = 2000, **sync: Any) -> None:
        self.models = [Vector(values) for _ in range(workers)]
        method = atoll.DiLoCo(**{"period": 1, "codec": codec, "outer": SGD(1.0), **sync})
        self.loops = [
            atoll.OuterLoop(model, method, link, guard=atoll.Guard(outlier_ratio=None))
            for model, link in zip(self.models, atoll.local(workers), strict=True)
        ]
        self.crew = atoll.Lockstep(self.loops)

    def round(self, deltas: list[Tensor]) -> None:
        with torch.no_grad():
            for model, delta in zip(self.models, deltas, strict=True):
                model.values.add_(delta)
        self.crew.step()

    def anchor(self) -> Tensor:
        with self.loops[0].anchor() as model:
            return next(model.parameters()).detach().clone()


def deltas(workers: int, values: int, generator: torch.Generator) -> list[Tensor]:
    """What all learn, and as much that only one does."""
    common = torch.randn(values, generator=generator)
    return [0.01 * (common + torch.randn(values, generator=generator)) for _ in range(workers)]


@pytest.mark.thorough_after(6)
@pytest.mark.parametrize("name", ["e3m0", "e2m1", "int4", "lloyd4"])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_with_feedback_nearly_nothing_is_lost_after_twenty_rounds(workers: int, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    run, work = Workers(workers, Codec(name, feedback=True)), torch.zeros(2000)
    for _ in range(20):
        given = deltas(workers, 2000, generator)
        work += torch.stack(given).mean(0)
        run.round(given)
    assert (run.anchor() - work).norm() <= 0.05 * work.norm()


@pytest.mark.parametrize("workers", [2, 5])
def test_with_feedback_all_of_a_steady_delta_arrives_in_time_though_each_round_sends_little(workers: int) -> None:
    run, delta = Workers(workers, Codec("top64", feedback=True)), torch.linspace(-0.01, 0.01, 2000)
    for _ in range(400):
        run.round([delta] * workers)
    assert torch.cosine_similarity(run.anchor(), delta, dim=0) > 0.95


@pytest.mark.parametrize(("workers", "least"), [(8, 0.99), (16, 0.992)])
def test_the_direction_of_the_mean_of_many_is_kept(workers: int, least: float) -> None:
    given = deltas(workers, 200_000, torch.Generator().manual_seed(0))
    run = Workers(workers, Codec("e3m0"), 200_000)
    run.round(given)
    exact = torch.stack(given).mean(0).double()
    assert torch.cosine_similarity(run.anchor().double(), exact, dim=0) >= least
    assert run.loops[0].counters.bytes_sent == Codec("e3m0").payload_bytes(200_000)


def test_what_was_kept_of_a_mean_is_dropped_when_others_are_present() -> None:
    """Parts are then cut differently, and a part's loss would be added to another part."""
    from atoll.core.allreduce import MeanResidual

    residual = MeanResidual()
    residual.keep((1, 0), (0, 1, 2, 3), 2, torch.ones(3))
    assert residual.before((2, 0), (0, 1, 2, 3), 2) is not None
    assert residual.before((1, 0), (0, 1, 2, 3), 2) is None
    assert residual.before((2, 0), (0, 1, 2, 4), 2) is None
    assert residual.before((2, 0), (0, 1, 2, 3), 1) is None


def test_a_residual_keeps_what_rounds_in_flight_find_and_no_more() -> None:
    from atoll.core.allreduce import MeanResidual

    residual = MeanResidual()
    for step in (1, 2, 3, 4):
        residual.keep((step, 0), (0, 1, 2, 3), 0, torch.full((2,), float(step)))
    residual.drop((3, 0))
    assert residual.before((2, 0), (0, 1, 2, 3), 0) is None
    again = MeanResidual()
    again.load_state_dict(residual.state_dict((3, 0)), torch.device("cpu"))
    for kept in (residual, again):
        found = kept.before((3, 0), (0, 1, 2, 3), 0)
        assert found is not None and found.tolist() == [2.0, 2.0]
    residual.drop(None)
    found = residual.before((9, 0), (0, 1, 2, 3), 0)
    assert found is not None and found.tolist() == [4.0, 4.0]
    fresh = MeanResidual()
    fresh.load_state_dict(MeanResidual().state_dict(None), torch.device("cpu"))
    assert fresh.before((1, 0), (0, 1, 2, 3), 0) is None
