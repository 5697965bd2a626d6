"""One worker's parameters explode once: what it costs a run, in percent of the undisturbed run's held-out loss.

    python benchmarks/explosion.py [--workers 2 3 4 5] [--steps 300] [--scale 1e6]

A small decoder learns the bytes of Python's own source. After a third of the steps, in the middle of a period, noise of
the given scale is added to all parameters of worker 1. Its delta is left out by the default `atoll.Guard()`.
"""

import argparse
import copy
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import atoll
from atoll.core.fragments import Blocks
from atoll.outer.presets import Sync
from atoll.settings.model_presets import preset
from atoll.train.model.decoder import Decoder

SEQUENCE, BATCH, PERIOD = 64, 8, 20


def text() -> torch.Tensor:
    """The standard library's larger files, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files[:40])), dtype=torch.uint8)


def batch(data: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of SEQUENCE + 1 bytes from anywhere, int64."""
    first = torch.randint(len(data) - SEQUENCE - 1, (rows, 1), generator=generator)
    return data[first + torch.arange(SEQUENCE + 1)].long()


def held_out_loss(sync: Sync, workers: int, steps: int, scale: float) -> tuple[float, int]:
    """Loss of the final model on text that no worker saw, and how many deltas were left out; 0: no explosion."""
    data = text()
    train, held = data[: -len(data) // 10], data[-len(data) // 10 :]
    shape = replace(preset("tiny"), vocabulary=256, context=SEQUENCE)
    start = Decoder(shape, generator=torch.Generator().manual_seed(0))
    models = [copy.deepcopy(start) for _ in range(workers)]
    loops = [atoll.OuterLoop(m, sync, link) for m, link in zip(models, atoll.local(workers), strict=True)]
    inner = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    draws = [torch.Generator().manual_seed(1 + worker) for worker in range(workers)]
    crew = atoll.Lockstep(loops)
    for step in range(1, steps + 1):
        for model, optimizer, draw in zip(models, inner, draws, strict=True):
            optimizer.zero_grad()
            model.loss(batch(train, BATCH, draw)).total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if scale and step == steps // 3 + PERIOD // 2:
            noise = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for parameter in models[1].parameters():
                    parameter.add_(scale * torch.randn(parameter.shape, generator=noise))
        crew.step()
    crew.finish()
    with torch.no_grad():
        loss = float(models[0].loss(batch(held, 512, torch.Generator().manual_seed(9))).cross_entropy)
    return loss, loops[0].counters.outliers_seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scale", type=float, default=1e6)
    arguments = parser.parse_args()
    outer = atoll.Nesterov(0.7, 0.6)
    methods: dict[str, Callable[[str], Sync]] = {
        "DiLoCo": lambda codec: atoll.DiLoCo(period=PERIOD, codec=codec, outer=outer),
        "Streaming": lambda codec: atoll.Streaming(
            period=PERIOD, fragments=Blocks(each=2), codec=codec, merge=atoll.Blend(0.5), outer=outer
        ),
        "Eager": lambda codec: atoll.Eager(period=PERIOD, codec=codec, outer=outer),
    }
    print(f"{'':10} {'codec':6} workers  undisturbed  disturbed  difference  left out")
    for name, method in methods.items():
        for codec in ("fp32", "e3m0"):
            for workers in arguments.workers:
                plain, _ = held_out_loss(method(codec), workers, arguments.steps, 0)
                spoilt, left_out = held_out_loss(method(codec), workers, arguments.steps, arguments.scale)
                row = f"{plain:11.4f}  {spoilt:9.4f}  {100 * (spoilt / plain - 1):+9.2f} %  {left_out:8}"
                print(f"{name:10} {codec:6} {workers:7}  {row}", flush=True)


if __name__ == "__main__":
    main()
