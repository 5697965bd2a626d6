"""How fast `atoll train` with one worker and no outer loop is, against a bare loop of the same model in the same run.

    python benchmarks/trainer.py [--preset tiny] [--rounds 150] [--steps 2]

The bare loop has its tokens ready in memory, no metrics, no checks and no files. Blocks of steps of the two alternate,
so that a busy machine slows both; the figure is the median of the ratios of neighbouring blocks.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from atoll.runs.events import Jsonl
from atoll.settings import config
from atoll.settings.model_presets import preset
from atoll.train import run
from atoll.train.data.batches import Batches, held_out
from atoll.train.model.decoder import Decoder
from atoll.train.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="inner steps in a block")
    parser.add_argument("--rounds", type=int, default=150, help="pairs of blocks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = config.parse(
            {
                "model": {"preset": arguments.preset},
                "data": {"cache": folder},
                "train": {"steps": 10**6, "batch": arguments.batch, "lr": 1e-3, "warmup": 100},
                "sync": {"method": "none", "workers": 1},
                "log": {"view": "none"},
            }
        )
        data = run.prepare(settings)
        model, settings = run.start(settings, data)
        sequence = settings.train.sequence
        assert sequence is not None
        batches = Batches(data.train, workers=1, batch=arguments.batch, sequence=sequence, seed=0)
        checks = held_out(data.held_out, sequence=sequence, tokens=1024, batch=8)
        trainer = Trainer(settings, model, batches, checks)
        trainer.reporter.sink = Jsonl(Path(folder) / "metrics.jsonl")

        bare = Decoder(preset(arguments.preset), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=True)
        ready = [batches.batch(0, draw) for draw in range(arguments.steps)]

        def bare_block() -> None:
            for tokens in ready:
                optimizer.zero_grad()
                bare.loss(tokens).total.backward()
                nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
                optimizer.step()

        def trainer_block() -> None:
            for _ in ready:
                trainer.step()

        ratios = []
        for block in (bare_block, trainer_block):  # warm up
            block()
        for _ in range(arguments.rounds):
            bare_s, trainer_s = seconds(bare_block), seconds(trainer_block)
            ratios.append(bare_s / trainer_s)
        rate = arguments.steps * arguments.batch * sequence / trainer_s
        print(f"{arguments.preset}, {arguments.batch} x {sequence} tokens a step, {torch.get_num_threads()} threads:")
        print(f"atoll train runs at {statistics.median(ratios):.3f} of a bare loop's speed ({rate:,.0f} tokens/s)")
        print(f"  blocks of {arguments.steps} steps: lowest {min(ratios):.3f}, highest {max(ratios):.3f}")


def seconds(block: object) -> float:
    began = time.perf_counter()
    assert callable(block)
    block()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
