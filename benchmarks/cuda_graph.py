"""Measures what it gains to capture a small model's passes as CUDA graphs instead of launching kernel by kernel.

    python benchmarks/cuda_graph.py [--workers 2] [--seconds 1]

Two trainers of the same preset and batch, one of which captures, take turns; each makes `Trainer.step`s with Streaming,
all workers in this process. "faster" is the median of the ratios of neighbouring turns. `atoll train` captures what is
below `cuda_graph.LARGEST_FLOPS` a pass; here that is asked for, or forbidden.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

from atoll.train.model.decoder import Decoder
from atoll.train.step import cuda_graph
from atoll.train.trainer import Trainer
from mfu import trainer_of

RESULTS = Path(__file__).parent / "results" / "cuda_graph.json"
CASES = [("tiny", 8), ("small", 8), ("small", 64), ("7M", 16), ("35M", 2), ("35M", 8), ("35M", 32)]
"""Presets and sequences a step and worker."""
TURNS = 5


def step_s(trainer: Trainer, seconds: float) -> float:
    """Mean time of a step."""
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            trainer.step()
        torch.cuda.synchronize()
        steps += 10
    return (time.perf_counter() - began) / steps


def measure(name: str, batch: int, workers: int, seconds: float) -> dict[str, float | int | str]:
    """One case."""
    trainers = {}
    for kind, largest in (("launched", 0.0), ("captured", float("inf"))):
        cuda_graph.LARGEST_FLOPS = largest
        trainers[kind] = trainer_of(name, batch, workers)
        for _ in range(2 * trainers[kind].config.sync.used_period + 5):  # compiles, also what rounds need
            trainers[kind].step()
    order = list(trainers.items())
    taken = [{kind: step_s(trainer, seconds / TURNS) for kind, trainer in order[:: (-1) ** n]} for n in range(TURNS)]
    (model, *_) = trainers["captured"].models
    assert isinstance(model, Decoder)
    return {
        "preset": name,
        "batch": batch,
        "workers": workers,
        "pass_flops": cuda_graph.pass_flops(trainers["captured"].config, model),
        **{f"{kind}_step_s": statistics.median(turn[kind] for turn in taken) for kind in trainers},
        "faster": statistics.median(turn["launched"] / turn["captured"] for turn in taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each kind and case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    rows = []
    for name, batch in CASES:
        row = measure(name, batch, arguments.workers, arguments.seconds)
        rows.append(row)
        print(
            f"{name:>5}, {batch:3} sequences, {row['pass_flops']:.1e} FLOPs a pass: a step of {arguments.workers} "
            f"workers {1e3 * row['launched_step_s']:.2f} ms launched, "  # type: ignore[operator]
            f"{1e3 * row['captured_step_s']:.2f} ms captured, {row['faster']:.2f} times as fast",  # type: ignore[operator]
            flush=True,
        )
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        table = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.results.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
