"""How much of a GPU's matmul rate the trainer uses: tokens a second, and the share of a rate measured in the same run.

    python benchmarks/mfu.py [--presets 35M 300M 1B] [--batch 128] [--seconds 5] [--workers 1]

One `Trainer.step` after the other, with everything that a run does between evaluations: batches from a token file,
compiled forward and backward pass, clipping, AdamW, metrics. FLOPs are 6 per matmul parameter and token, and 12 for
every value of every layer's attention and token that it looks at, half of the sequence on average: causal attention,
no embedding look-ups. The matmul rate is that of 8192 x 8192 matrices in bf16, the fastest of bursts before and after,
so anything else the GPU does (it lowers its clocks under load) counts against the share. Sequences of 1024, or as
long as the preset's context.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.link.local import local
from atoll.settings import config
from atoll.settings.model_presets import PRESETS, ModelConfig, preset
from atoll.train.data.batches import Batches, held_out
from atoll.train.model.decoder import Decoder
from atoll.train.step.recipe import resolve
from atoll.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "mfu.json"
SEQUENCE = 1024
BATCHES = {"35M": 256, "100M": 64, "300M": 32, "1B": 16}
"""Sequences a step that fill an H200."""


def matmul_rate(size: int = 8192, bursts: int = 5) -> float:
    """FLOP/s of a bf16 matmul of square matrices of random numbers."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for burst in range(bursts + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            left @ right
        torch.cuda.synchronize()
        if burst:  # the first one warms up
            best = max(best, 20 * 2 * size**3 / (time.perf_counter() - began))
    return best


def sequence_of(shape: ModelConfig) -> int:
    """Tokens of a sequence."""
    return min(SEQUENCE, shape.context)


def flops_a_token(shape: ModelConfig) -> int:
    """Of forward and backward pass."""
    return 6 * shape.matmul_parameters + 6 * shape.layers * shape.heads * shape.head_width * sequence_of(shape)


def trainer_of(name: str, batch: int, workers: int = 1) -> Trainer:
    """A trainer of a preset on random tokens; several workers exchange with Streaming, in this process."""
    shape = preset(name)
    sequence = sequence_of(shape)
    settings = config.parse(
        {
            "model": {"preset": name},
            "device": "cuda",
            "train": {"steps": 10**6, "batch": batch, "sequence": sequence, "lr": 1e-4, "log_every": 50},
            "sync": {"method": "none", "workers": 1}
            if workers == 1
            else {"method": "streaming", "workers": workers, "period": 30},
            "log": {"view": "none"},
        }
    )
    settings = resolve(settings, parameters=shape.parameters, context=shape.context)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, 4_000_000, dtype=np.uint16)
    batches = Batches([tokens], workers=workers, batch=batch, sequence=sequence, seed=0, device="cuda")
    with torch.device("cuda"):
        model = Decoder(shape, generator=torch.Generator("cuda").manual_seed(0)).train()
    links = local(workers) if workers > 1 else ()
    return Trainer(settings, model, batches, held_out(tokens, sequence=sequence, tokens=1024, batch=1), links)


def measure(name: str, batch: int, workers: int, seconds: float) -> dict[str, float | int | str]:
    """One preset."""
    torch.cuda.reset_peak_memory_stats()
    rate, trainer = matmul_rate(), trainer_of(name, batch, workers)
    began = time.perf_counter()
    for _ in range(5):
        trainer.step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    began, steps = time.perf_counter(), 0
    while steps < 10 or time.perf_counter() - began < seconds:
        for _ in range(5):
            trainer.step()
        torch.cuda.synchronize()
        steps += 5
    tokens_s = steps * batch * sequence_of(preset(name)) * workers / (time.perf_counter() - began)
    rate = max(rate, matmul_rate())  # of a GPU that may have been hot before, or is now
    return {
        "preset": name,
        "workers": workers,
        "batch": batch,
        "compile_s": compile_s,
        "tokens_per_s": tokens_s,
        "matmul_flops": rate,
        "mfu": tokens_s * flops_a_token(preset(name)) / rate,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["35M", "300M", "1B"])
    parser.add_argument("--batch", type=int, help="sequences a step; left out: what fills an H200")
    parser.add_argument("--workers", type=int, default=1, help="more than one: Streaming, all in this process")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    table: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    if arguments.results.exists():
        before = json.loads(arguments.results.read_text())
        table = before if before | {"rows": []} == table else table  # of another machine nothing is kept
    for name in arguments.presets:
        row = measure(name, arguments.batch or BATCHES.get(name, 16), arguments.workers, arguments.seconds)
        same = ("preset", "workers", "batch")
        table["rows"] = [*(other for other in table["rows"] if any(other[key] != row[key] for key in same)), row]
        print(
            f"{name:>5}, {row['batch']} x {sequence_of(preset(name))} tokens, {arguments.workers} worker(s): "
            f"{row['tokens_per_s']:,.0f} tokens/s, {row['mfu']:.1%} of {row['matmul_flops'] / 1e12:.0f} TFLOP/s, "  # type: ignore[operator]
            f"{row['memory_gib']:.1f} GiB, ready after {row['compile_s']:.0f} s",
            flush=True,
        )
        torch.compiler.reset()
        gc.collect()  # a compiled model refers to itself
        torch.cuda.empty_cache()
        arguments.results.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
