"""The same bits on a GPU as on the CPU: a worker with one and a worker without must agree."""

import copy

import pytest
import torch
from torch import nn

from atoll import Crew, Delayed, DiLoCo, Eager, OuterLoop, Streaming, Sync, local
from atoll.core.codec import Codec
from atoll.core.flat import fingerprint
from atoll.core.fragments import Balanced
from atoll.core.outer import SGD, Adam, Momentum, Nesterov, OuterOptimizer, weighted_mean

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS = ["int8", "int4", "e3m0", "e2m1"]
CODECS = [Codec(name) for name in ("fp64", "fp32", "bf16", "fp16", *BLOCKS)]
CODECS += [Codec(name, stochastic=True) for name in BLOCKS]


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 127, 129, 300_001])
def test_payloads(codec: Codec, numel: int) -> None:
    here, there = codec.encode(noise(numel), 3), codec.encode(noise(numel).cuda(), 3)
    assert torch.equal(here, there.cpu())
    assert torch.equal(codec.decode(here, numel), codec.decode(there, numel).cpu())


@pytest.mark.parametrize("outer", [SGD(), Momentum(), Nesterov(), Adam()], ids=str)
def test_outer_steps(outer: OuterOptimizer) -> None:
    results = []
    for device in ("cpu", "cuda"):
        anchor, *rest = (noise(100_003, seed).to(device) for seed in range(5))
        slots = tuple(slot.abs() for slot in rest[: len(outer.slot_names)])
        mean = weighted_mean(rest, [1.0, 2.0, 0.3, 1.7])
        anchor, slots = outer.step(anchor, slots, mean, 3)
        results.append([t.cpu() for t in (mean, anchor, *slots)])
        assert fingerprint(anchor) == fingerprint(anchor.cpu())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "sync",
    [
        DiLoCo(period=4),
        DiLoCo(period=4, outer=Adam()),
        Streaming(period=4, fragments=Balanced(count=3), codec=Codec("e3m0", feedback=True)),
        Eager(period=4),
        Delayed(period=4, codec="int8"),
    ],
    ids=str,
)
def test_loops(sync: Sync) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    results = []
    for device in ("cpu", "cuda"):
        models = [copy.deepcopy(start).to(device) for _ in range(3)]
        crew = Crew([OuterLoop(model, sync, link) for model, link in zip(models, local(3), strict=True)])
        seed = 0
        for _ in range(13):
            for model in models:
                for p in model.parameters():
                    seed += 1
                    p.data.sub_(noise(p.numel(), seed).view(p.shape).to(device))
            crew.step()
        crew.finish()
        results.append(torch.cat([p.detach().cpu().flatten() for p in models[0].parameters()]))
    assert torch.equal(*results)
