"""Tests which passes are captured: decided without a GPU. That they leave what the pass itself would: test_cuda.py."""

import pytest
import torch
from torch import Tensor

from atoll.settings import config
from atoll.train.model.decoder import Decoder
from atoll.train.step.cuda_graph import capture_small_passes


@pytest.mark.parametrize(
    ("workers", "changes", "captured"),
    [
        (2, (), True),
        (2, ("train.batch=32",), False),  # the GPU has enough to do
        (16, (), True),  # their graphs share the memory of a pass
        (2, ("train.batch=4", "train.accumulate=4"), True),
        (2, ("model.preset=tiny", "train.sequence=64", "train.batch=32", "train.accumulate=32"), False),
        (2, ("compile=false",), False),
        (2, ("device=cpu",), False),
    ],
)
def test_short_passes_are_captured(
    workers: int, changes: tuple[str, ...], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))  # torch for a CPU has none
    run = {"device": "cuda", "compile": True, "train": {"batch": 8, "sequence": 1024}, "model": {"preset": "35M"}}
    settings = config.parse(run, changes)
    with torch.device("meta"):
        models = [Decoder(settings.shape(32_000)) for _ in range(workers)]
    acts = [no_pass] * workers
    assert (capture_small_passes(settings, models, acts) is not acts) == captured


def test_a_model_of_another_kind_is_not_captured() -> None:
    settings = config.parse({"device": "cuda", "compile": True, "train": {"batch": 1, "sequence": 8}})
    acts = [no_pass]
    assert capture_small_passes(settings, [torch.nn.Linear(2, 2)], acts) is acts


def no_pass(batch: Tensor) -> Tensor:
    raise AssertionError("nothing is to be computed here")
