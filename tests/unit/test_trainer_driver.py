"""The driver that trainers' callbacks share: a worker whose ranks shard the model with FSDP2."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll
from atoll.core.flat import local_part
from atoll.errors import ConfigError
from atoll.integrations.driver import Driver
from fleet import Fleet, Me, as_rank, free_port

pytestmark = pytest.mark.processes


class Blocks(nn.Module):
    """A few layers, each sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def sharded(me: Me, rank: int, port: int, later_port: int) -> Any:
    """Drive a model under FSDP2 as a trainer does: step, evaluate, save; then the same from what was saved."""
    as_rank(rank, 2, port)
    distributed.init_process_group("gloo")

    def made(link: Any) -> tuple[Any, Any, Driver]:
        model, mesh = Blocks(), init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        driver = Driver(atoll.DiLoCo(period=3), link, {})
        driver.meet_ranks()
        return model, torch.optim.SGD(model.parameters(), lr=0.05), driver

    def train(first: int, model: Any, inner: Any, driver: Driver) -> list[float]:
        scores = []
        for step in range(first, 9):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * me.worker + 10 * step + rank))
            model(x).square().mean().backward()
            inner.step()
            inner.zero_grad()
            driver.step(step, 8, keep=True)
            if step == 5:
                kept.append(driver.resumable())
            with driver.anchor(), torch.no_grad():
                scores.append(model(torch.ones(1, 8)).sum().item())
        return scores

    kept: list[Any] = []
    places = [me.link(rank=rank, ranks=2), replace(me, port=later_port).link(rank=rank, ranks=2)]
    model, inner, driver = made(places[0])
    told = driver.gather("told", me.worker)
    driver.start(model)
    scores = train(1, model, inner, driver)
    final = [local_part(p).clone() for p in model.parameters()]
    driver.close()
    again, inner, driver = made(places[1])
    driver.start(again, kept[0])
    later = train(6, again, inner, driver)
    driver.close()
    same = all(torch.equal(a, local_part(b)) for a, b in zip(final, again.parameters(), strict=True))
    return told, scores, later, same, [part.sum().item() for part in final]


def test_a_worker_may_shard_its_model_inside(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none") as fleet:
        later_port = free_port()
        for worker in range(2):
            port = free_port()
            for rank in range(2):
                fleet.add(worker, sharded, rank, port, later_port)
        ended = fleet.results()
    for told, scores, later, same, _ in ended:
        assert told == {0: 0, 1: 1}
        assert scores == ended[0][1] and len(set(scores)) == 4, "three anchors and the final model, the same for all"
        assert later == scores[5:] and same
    assert ended[0][4] == ended[2][4] and ended[1][4] == ended[3][4]


def one_rank(me: Me, rank: int, port: int) -> Any:
    as_rank(rank, 2, port)
    distributed.init_process_group("gloo")
    driver = Driver(atoll.DiLoCo(period=3), atoll.local(workers=1)[0], {})
    driver.meet_ranks()
    model = Blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        driver.start(model)
    except ConfigError as fault:
        return fault.setting
    return None


def test_a_sharded_model_needs_a_link_for_every_rank(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", 1, keys="none") as fleet:
        port = free_port()
        for rank in range(2):
            fleet.add(0, one_rank, rank, port)
        assert fleet.results() == ["ranks", "ranks"]


def behind_a_line(me: Me) -> Any:
    (link,) = atoll.shaped([me.link()], atoll.Shape(latency_s=0.01))
    driver = Driver(atoll.DiLoCo(period=3), link, {})
    driver.meet_ranks()
    told = driver.gather("told", me.worker)
    driver.start(Blocks())
    for step in range(1, 4):
        driver.step(step, 3, keep=False)
    assert driver.outer is not None and driver.outer.counters.rounds_applied == 1
    driver.close()
    return told


def test_workers_behind_an_emulated_line_compare_their_settings(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none") as fleet:
        for worker in range(2):
            fleet.add(worker, behind_a_line)
        assert fleet.results() == [{0: 0, 1: 1}] * 2


def test_the_library_imports_no_trainer() -> None:
    code = "import atoll, sys; atoll.OuterLoop; atoll.connect; atoll.checkpoint; import atoll.integrations.driver; "
    code += "sys.exit(' '.join({'transformers', 'accelerate', 'lightning'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
