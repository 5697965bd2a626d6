"""The same bits on a GPU as on the CPU: a worker with one and a worker without must agree."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll import Crew, Delayed, DiLoCo, Eager, OuterLoop, Streaming, Sync, checkpoint, local
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


SYNCS = [
    DiLoCo(period=4),
    DiLoCo(period=4, outer=Adam()),
    Streaming(period=4, fragments=Balanced(count=3), delay=3, codec=Codec("e3m0", feedback=True)),
    Eager(period=4),
    Delayed(period=4, codec="int8"),
]


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_loops(sync: Sync) -> None:
    assert torch.equal(train("cpu", sync, stop=13), train("cuda", sync, stop=13))


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_resume(sync: Sync, tmp_path: Path) -> None:
    assert torch.equal(train("cuda", sync, stop=6, folder=tmp_path), train("cuda", sync, stop=13))


def train(device: str, sync: Sync, *, stop: int, folder: Path | None = None) -> torch.Tensor:
    """The final parameters after 13 steps; with a folder, by way of checkpoints written after step `stop`."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    loops = [OuterLoop(copy.deepcopy(start), sync, link) for link in local(3)]
    walk(loops, stop)
    if folder is not None:
        for loop in loops:
            state = {"model": loop.model.state_dict(), "outer": loop.state_dict()}
            checkpoint.save(folder / str(loop.link.worker), loop.steps, state)
        loops = [OuterLoop(copy.deepcopy(start), sync, link) for link in local(3)]
        for loop in loops:
            _, state = checkpoint.load(folder / str(loop.link.worker))
            loop.model.load_state_dict(state["model"])
            loop.load_state_dict(state["outer"])
        walk(loops, 13 - stop)
    Crew(loops).finish()
    return torch.cat([p.detach().cpu().flatten() for p in loops[0].model.parameters()])


def walk(loops: list[OuterLoop], steps: int) -> None:
    crew = Crew(loops)
    for _ in range(steps):
        for loop in loops:
            for number, p in enumerate(loop.model.parameters()):
                seed = 1000 * loop.steps + 100 * loop.link.worker + number
                p.data.sub_(noise(p.numel(), seed).view(p.shape).to(p.device))
        crew.step()
