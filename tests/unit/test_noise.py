"""Stochastic rounding: nothing that is sent in a run shares its noise with anything else."""

import pytest
import torch
from torch import Tensor

from atoll import DiLoCo
from atoll.core.codec import Codec
from harness import Problem, train


def test_means_of_early_rounds_do_not_share_the_noise_of_later_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of means grow faster than those of payloads; torch's generator takes the low 32 bits of both."""
    seeds, encode = [], Codec.encode

    def watched(codec: Codec, vector: Tensor, seed: int = 0) -> Tensor:
        seeds.append(seed % 2**32)
        return encode(codec, vector, seed)

    monkeypatch.setattr(Codec, "encode", watched)
    problem = Problem(sizes=(8,), workers=4, dtype=torch.float32)
    train(problem.loops(DiLoCo(period=1, codec=Codec("int4", stochastic=True))), 140, 0.1)
    assert len(set(seeds)) == len(seeds) == 140 * (4 + 4)  # four payloads, and the means of four parts
